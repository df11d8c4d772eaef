"""How near published figures of Qwen3.6-27B come to the roofline, and the roofline to them.

Writes `results/roofline.json` (a row for every published figure), the page with its figures and pictures into a
folder, and the tables and pictures of `docs/roofline.md`. Nothing is measured here: it is arithmetic on vendors' and
published figures, the same on every machine.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from rows import Rows

from drafthouse.measure.roofline import Serving, load_hardware, roofline
from drafthouse.measure.roofline.compare import compare, compare_sweep
from drafthouse.measure.roofline.page import Case, component_rows, write
from drafthouse.measure.roofline.profile import drafter_config, model_config
from drafthouse.measure.roofline.published import DRAFTER, MODEL, Check, checks

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "roofline.md"
SERVED = "Qwen3.6-27B"
# Published runs on 2x RTX A6000 with MTP (see published.yml). Their acceptance length is told as 3.0 to 3.5.
A6000_TOKENS_PER_S, A6000_ACCEPTANCE = 55, 3.0
A6000_SWEEP = (
    {"concurrency": 1, "context": 1024, "tokens_per_s": 73.6, "acceptance": 3.5},
    {"concurrency": 1, "context": 120_000, "tokens_per_s": 64.9, "acceptance": 3.5},
    {"concurrency": 10, "context": 1024, "tokens_per_s": 500, "acceptance": 3.5},
)
# InferenceX, SGLang 0.5.16: time per output token; acceptance length of a GB300 run of Qwen3.8-27B.
H200_MS_PER_TOKEN, H200_ACCEPTANCE = 5.61, 3.22


def cases() -> list[Case]:
    """2x A6000 with MTP, an H200 with MTP, an H200 with DFlash."""
    model, drafter = model_config(MODEL)[0], drafter_config(DRAFTER)
    a6000, h200 = load_hardware("a6000"), load_hardware("h200")
    mtp = Serving(tensor_parallel=2, draft="mtp", context=1024, acceptance=A6000_ACCEPTANCE)
    two = roofline(model, a6000, mtp)
    step_ms = A6000_ACCEPTANCE / A6000_TOKENS_PER_S * 1000
    points = tuple(compare_sweep(model, a6000, mtp, A6000_SWEEP))
    one = roofline(model, h200, Serving(draft="mtp", context=8704, acceptance=H200_ACCEPTANCE))
    block = roofline(model, h200, Serving(draft="dflash", context=8704, acceptance=5.3), draft=drafter)
    return [
        Case("a6000x2-mtp", SERVED, two, compare(two, step_ms), points),
        Case("h200-mtp", SERVED, one, compare(one, H200_MS_PER_TOKEN * H200_ACCEPTANCE)),
        Case("h200-dflash", SERVED, block),
    ]


def rows_of(found: list[Check]) -> Rows:
    """Agreement with what others calculated (1 is equal), and how many times faster than measured runs the bound is."""
    rows = Rows(seed=0)
    for check in found:
        if check.kind == "calculated":
            ratio = min(check.ours, check.published) / max(check.ours, check.published)
            bar = round(1 - check.tolerance, 6)
        else:
            ratio, bar = check.ours / check.published, 1.0
        name = f"roofline: {check.hardware}: {check.what}"
        rows.add(name, check.ours, check.unit or "share", peer=f"published: {check.published:g}", ratio=ratio, bar=bar)
    return rows


def document_tables(shown: list[Case], found: list[Check]) -> dict[str, str]:
    """Text of every generated block of the document, by its name."""
    blocks = {f"step {case.name}": _step_table(case) for case in shown}
    blocks |= {f"acceptance {case.name}": _acceptance_table(case) for case in shown}
    blocks["sweep a6000x2-mtp"] = _sweep_table(shown[0])
    head = ["hardware", "what", "published", "here", "deviation", "where the rest is"]
    blocks["calculated"] = _markdown(head, [_check_row(check) for check in found if check.kind == "calculated"])
    head = ["hardware", "what", "measured", "bound here", "reached", "what to know"]
    blocks["measured"] = _markdown(head, [_check_row(check) for check in found if check.kind == "measured"])
    blocks["sources"] = "\n".join(f"- {source}" for source in sorted({check.source for check in found}))
    return blocks


def with_blocks(text: str, blocks: dict[str, str]) -> str:
    """The document with the text between its markers replaced; every block must have its place."""
    for name, block in blocks.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"{DOCUMENT.name}: no place for '{name}'; write its two markers")
        text = f"{before}{begin}{block}\n{end}{after}"
    return text


def _step_table(case: Case) -> str:
    head = ["component", "part", "bytes", "FLOPs", "ms", "share", "limited by"]
    total = ("**step**", "", "", "", f"**{case.roofline.step_ms:.2f}**", "", "")
    return f"{case.sentence}\n\n" + _markdown(head, [*component_rows(case.roofline), total])


def _acceptance_table(case: Case) -> str:
    measured = case.comparison.measured_ms if case.comparison else None
    head = ["acceptance length", "tokens/s at most", "against plain decoding"]
    rows = []
    for row in case.roofline.table(measured):
        cells = [f"{row['acceptance']:.2f}", f"{row['bound_tokens_per_s']:.0f}", f"{row['against_plain']:.2f}×"]
        rows.append((*cells, *([f"{row['measured_tokens_per_s']:.0f}"] if measured else [])))
    return _markdown([*head, *(["tokens/s at the measured step"] if measured else [])], rows)


def _sweep_table(case: Case) -> str:
    head = ["requests", "context", "acceptance", "tokens/s", "ms a step", "least ms", "of what is possible"]
    rows = []
    for point in case.sweep:
        serving, bound = point.roofline.serving, point.roofline
        begin = (str(serving.batch), f"{serving.context:,}", f"{bound.acceptance:.1f}", f"{point.tokens_per_s:.1f}")
        rows.append((*begin, f"{point.measured_ms:.1f}", f"{bound.step_ms:.1f}", f"{point.share:.0%}"))
    return _markdown(head, rows)


def _check_row(check: Check) -> tuple[str, ...]:
    last = f"{check.deviation:+.1%}" if check.kind == "calculated" else f"{check.published / check.ours:.0%}"
    published, ours = (f"{value:.4g} {check.unit}".strip() for value in (check.published, check.ours))
    return (check.hardware, check.what, published, ours, last, check.why)


def _markdown(head: list[str], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "roofline.json")
    parser.add_argument("--page", type=Path, default=ROOT / "runs" / "roofline", help="folder of the page")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="Markdown file whose tables are replaced")
    words = parser.parse_args()
    shown, found = cases(), checks()
    text = with_blocks(words.document.read_text(encoding="utf-8"), document_tables(shown, found))
    rows_of(found).write(words.out)
    _, _, *pictures = write(shown, found, words.page)
    words.document.write_text(text, encoding="utf-8")
    for picture in pictures:
        shutil.copyfile(picture, words.document.parent / f"roofline-{picture.name}")
    print(f"{words.page}, {words.out}, {words.document}")


if __name__ == "__main__":
    main()
