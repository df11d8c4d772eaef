"""matplotlib figures as inline SVG that follows the page: its fonts, its colours, its light or dark theme.

Figures are drawn in the sentinel colours of `INKS`, one for each role; `to_svg` replaces them by CSS
variables of the same name (`--ours`, `--grid`, …), which the report's style sheet defines for both themes.
Text stays text: it can be searched, selected and read at any zoom. The output depends on nothing but the
figure: the hash salt is fixed, there is no date, and the user's own matplotlib settings are not read.
"""

from __future__ import annotations

import io
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that nobody would choose, so that replacing them can hit nothing else.
INKS = {
    "ink": "#fe0101",
    "muted": "#fe0102",
    "grid": "#fe0103",
    "paper": "#fe0104",
    "ours": "#fe0105",
    "baseline": "#fe0106",
    "third": "#fe0107",
    "fourth": "#fe0108",
    "target": "#fe0109",
}

# view-box units: about as many pixels as a panel has on a phone 390 px wide, where text then keeps its size
WIDTH = 360.0
FONT_SIZE = 11.5

_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "drafthouse",
    "text.parse_math": False,  # a prompt kind may be called "$x$"
    "font.size": FONT_SIZE,
    "axes.titlesize": FONT_SIZE,
    "axes.labelsize": FONT_SIZE,
    "xtick.labelsize": FONT_SIZE,
    "ytick.labelsize": FONT_SIZE,
    "text.color": INKS["ink"],
    "axes.labelcolor": INKS["muted"],
    "axes.edgecolor": INKS["muted"],
    "axes.linewidth": 0.9,
    "xtick.color": INKS["muted"],
    "ytick.color": INKS["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INKS["grid"],
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.0,
    "hatch.linewidth": 1.0,
    "axes.unicode_minus": True,
}


@contextmanager
def panel(height: float = 230.0) -> Iterator[Figure]:
    """A figure of `WIDTH` × `height` view-box units in the report's style, whatever matplotlibrc says."""
    # about a second to import, needed only when a report is drawn
    import matplotlib.style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")
        FigureCanvasSVG(figure)
        yield figure


def to_svg(figure: Figure, name: str, label: str) -> str:
    """One `<svg role="img">` element for a page.

    Args:
        figure: drawn within `panel`, which must still be open.
        name: unique on the page; ids inside the picture are prefixed with it.
        label: what a screen reader says in place of the picture.
    """
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # widths are estimated with matplotlib's own font; the browser draws glyphs that this font lacks
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(re.sub(r"<!DOCTYPE.*?>", "", buffer.getvalue(), count=1, flags=re.DOTALL))
    for unwanted in (f"{_SVG}metadata", f"{_SVG}defs"):
        # the first <defs> holds a <style> that would apply to the whole page
        if (element := root.find(unwanted)) is not None:
            root.remove(element) if unwanted.endswith("metadata") else _drop_style(element)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        _rewrite(element, name)
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    root.attrib.pop("version", None)
    root.attrib.update({"class": "plot", "role": "img", "aria-label": label})
    return _colour(ElementTree.tostring(root, encoding="unicode"))


def _drop_style(defs: ElementTree.Element) -> None:
    for style in defs.findall(f"{_SVG}style"):
        defs.remove(style)


def _rewrite(element: ElementTree.Element, name: str) -> None:
    attributes = element.attrib
    if "id" in attributes:
        attributes["id"] = f"{name}-{attributes['id']}"
    if _HREF in attributes:
        attributes["href"] = attributes.pop(_HREF).replace("#", f"#{name}-", 1)
    for key, value in attributes.items():
        attributes[key] = value.replace("url(#", f"url(#{name}-")
    if element.tag == "text":
        attributes["style"] = re.sub(r"font-family:[^;]*;?\s*", "", attributes.get("style", ""))
    if element.tag == "path" and "d" in attributes:
        attributes["d"] = " ".join(_rounded(part) for part in attributes["d"].split())


def _rounded(part: str) -> str:
    """Two decimals are a hundredth of a pixel; six would be half of the file."""
    try:
        return f"{float(part):.2f}".rstrip("0").rstrip(".")
    except ValueError:
        return part


def _colour(text: str) -> str:
    for role, sentinel in INKS.items():
        text = text.replace(sentinel, f"var(--{role})")
    return text
