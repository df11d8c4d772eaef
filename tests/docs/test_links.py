"""Links of the documents lead somewhere: pages, anchors, pictures, named tests. Nothing is fetched."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs.blocks import PAGES, ROOT, shown_path
from tests.docs.evidence import find

_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+(?:\([^()\s]*\))?)(?: \"[^\"]*\")?\)")
_HTML = re.compile(r"<(?:a|img|source)\b[^>]*?(?:href|src|srcset)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::([\w:]+))?`")
PAGE_IDS = [shown_path(page) for page in PAGES]


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> Iterator[str]:
    text = _CODE.sub("`code`", prose(page))
    yield from _LINK.findall(text)
    yield from _HTML.findall(text)


def anchor(heading: str) -> str:
    """As Python-Markdown's `toc` and GitHub both make it, for the headings that we write."""
    text = re.sub(r"[`*_]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def anchors(page: Path) -> set[str]:
    return {anchor(heading) for heading in _HEADING.findall(prose(page))}


def broken(page: Path, link: str) -> str | None:
    """What is wrong with a link; None when nothing is."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        well = parts.scheme == "https" and re.fullmatch(r"[a-z0-9.-]+\.[a-z]{2,}(:\d+)?", parts.netloc)
        return None if well else "not https"
    target = (page.parent / parts.path).resolve() if parts.path else page
    if not target.exists():
        return "there is no such file"
    if page.is_relative_to(ROOT / "docs") and not target.is_relative_to(ROOT / "docs"):
        return "it leads out of the site"
    if parts.fragment and parts.fragment not in anchors(target):
        return f"{target.name} has no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = {link: what for link in links(page) if (what := broken(page, link)) is not None}
    assert not wrong, f"{shown_path(page)}: {wrong}"


def test_there_are_links_to_look_at() -> None:
    assert sum(len(list(links(page))) for page in PAGES) > 50


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_tests_that_are_named_exist(page: Path) -> None:
    for file, name in _TEST.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / file).is_file(), f"{shown_path(page)}: there is no {file}"
        if name:
            find(f"{file}::{name}")


@pytest.mark.parametrize(
    ("link", "wrong"),
    [
        ("index.md", None),
        ("#rules", None),
        ("architecture.md#folders", None),
        ("https://www.rfc-editor.org/rfc/rfc9110#section-13.1.2", None),
        ("nowhere.md", "there is no such file"),
        ("architecture.md#cellar", "architecture.md has no such heading"),
        ("#cellar", "contributing.md has no such heading"),
        ("http://example.org/", "not https"),
        ("https:/example.org/", "not https"),
        ("../src/drafthouse/cli.py", "it leads out of the site"),
    ],
)
def test_a_broken_link_is_found(link: str, wrong: str | None) -> None:
    assert broken(ROOT / "docs" / "contributing.md", link) == wrong


def test_headings_become_anchors() -> None:
    assert anchor('"96 % of the ceiling"') == "96-of-the-ceiling"
    assert anchor("Extraction at the 27B's shape") == "extraction-at-the-27bs-shape"
    assert anchor("`serve check` and [links](x.md)") == "serve-check-and-links"
