"""Comparison, page, pictures, and the document that the benchmark script keeps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drafthouse.measure.roofline import Roofline, RooflineError, roofline
from drafthouse.measure.roofline.compare import Comparison, compare
from drafthouse.measure.roofline.page import Case, bound_sentence, render, write
from drafthouse.measure.roofline.plots import acceptance_plot, step_plot
from drafthouse.measure.roofline.profile import drafter_config, model_config
from drafthouse.measure.roofline.published import checks

REPOSITORY = Path(__file__).parents[3]
MODEL = model_config("Qwen/Qwen3.6-27B")[0]


def bound(**serving: Any) -> Roofline:
    common = {"tensor_parallel": 2, "draft": "mtp", "context": 1024, "acceptance": 3.1}
    return roofline(MODEL, "a6000", common | serving)


def at_share(found: Roofline, share: float) -> Comparison:
    return compare(found, found.step_ms / share)


class TestComparison:
    def test_near_the_bound_the_lever_is_acceptance(self) -> None:
        found = at_share(bound(), 0.96)
        assert found.sentence.replace("\u00a0", " ").startswith("You are at 96 % of what this hardware can do: ")
        gain = found.gain_of_a_tenth
        assert found.sentence.endswith(
            f"The lever left is acceptance length: 0.1 more of it is {gain:.1f} tokens/s more."
        )
        assert gain == pytest.approx(found.tokens_per_s / 31)

    @pytest.mark.parametrize(
        ("serving", "share", "words"),
        [
            ({}, 0.7, "Look there first: .*all-reduce"),
            ({"draft": "none", "acceptance": None}, 0.95, "The lever left is speculation"),
            ({"acceptance": None}, 0.95, "Every draft is taken to be accepted"),
            ({}, 1.2, "which cannot be: .*Check that the time is of a step and not of a token"),
        ],
    )
    def test_other_levers(self, serving: dict[str, Any], share: float, words: str) -> None:
        assert re.search(words, at_share(bound(**serving), share).sentence)

    def test_one_gpu_has_no_all_reduce_to_look_at(self) -> None:
        assert "all-reduce" not in at_share(bound(tensor_parallel=1), 0.5).sentence

    @pytest.mark.parametrize("time", [0, -1, float("nan")])
    def test_no_time(self, time: float) -> None:
        with pytest.raises(RooflineError, match="is no time of a step"):
            compare(bound(), time)

    def test_a_bound_alone_is_told_too(self) -> None:
        assert "if all of the 4 tokens of every round were accepted" in bound_sentence(bound(acceptance=None))
        assert "at an acceptance length of 3.10" in bound_sentence(bound())
        assert "tokens/s at most." in bound_sentence(bound(draft="none", acceptance=None))


class TestPlots:
    def test_bars_add_up_to_the_step(self) -> None:
        found = bound()
        plot = step_plot("step", found, at_share(found, 0.9))
        titles = [row[0] for row in plot.rows]
        assert titles == ["plain decoding, least", "a round with MTP, least", "measured"]
        parts = [float(cell) for cell in plot.rows[1][1:-1]]
        assert sum(parts) == pytest.approx(float(plot.rows[1][-1]), abs=0.03)
        assert float(plot.rows[2][-1]) == pytest.approx(found.step_ms / 0.9, abs=0.01)
        assert [key.mark for key in plot.keys].count("pale") == 1
        assert step_plot("step", found, None).keys[-1].mark != "pale"

    def test_pictures_follow_the_theme_and_are_told(self) -> None:
        found = bound()
        for plot in (step_plot("a", found, None), acceptance_plot("b", found, at_share(found, 0.9))):
            assert not re.search(r"#[0-9a-fA-F]{6}", plot.svg)
            assert f'aria-label="{plot.title}' in plot.svg
            assert all(len(row) == len(plot.columns) for row in plot.rows)

    def test_throughput_is_a_line_through_the_bound(self) -> None:
        plot = acceptance_plot("b", bound(), None)
        at = {float(row[0]): float(row[1]) for row in plot.rows}
        assert at[4.0] == pytest.approx(4 * at[1.0], rel=0.01)
        assert 3.1 in at

    def test_plain_decoding_has_its_pictures_too(self) -> None:
        found = bound(draft="none", acceptance=None)
        assert len(acceptance_plot("b", found, None).rows) == 1
        assert [row[0] for row in step_plot("a", found, None).rows] == ["plain decoding, least"]


class TestPage:
    def test_it_says_the_figures_and_needs_nothing(self, tmp_path: Path) -> None:
        found = bound()
        case = Case("mtp", "Qwen3.6-27B", found, at_share(found, 0.96), (at_share(found, 0.5),))
        html_path, json_path, picture = write([case], checks(), tmp_path / "page")
        html, data = html_path.read_text(encoding="utf-8"), json.loads(json_path.read_text(encoding="utf-8"))
        assert "Qwen3.6-27B on 2× RTX A6000, MTP" in html
        assert "<script" not in html
        assert not re.search(r"(src|href)=\"https?:", html)
        ids = re.findall(r'\bid="([^"]*)"', html)
        assert len(ids) == len(set(ids))
        assert data["cases"][0]["step_ms"] == pytest.approx(found.step_ms)
        assert data["cases"][0]["sweep"][0]["share_of_bound"] == pytest.approx(0.5)
        assert len(data["published"]) == len(checks())
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size > 20_000

    def test_the_same_cases_give_the_same_page(self) -> None:
        case = Case("mtp", "<b>&", bound())
        assert render([case]) == render([case])
        assert "&lt;b&gt;&amp;" in render([case])
        assert "Against published figures" not in render([case])

    def test_a_small_model_may_be_faster_than_its_bound(self) -> None:
        small = roofline(model_config("embedded")[0], "h200", {"context": 64})
        assert "a step can be faster than this" in Case("small", "embedded", small).notes[0]
        assert Case("mtp", "Qwen3.6-27B", bound()).notes == ()

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("", encoding="utf-8")
        with pytest.raises(RooflineError, match="the page cannot be written"):
            write([Case("mtp", "Qwen3.6-27B", bound())], (), tmp_path / "file" / "page")


def test_dflash_on_one_h200_is_drawn(tmp_path: Path) -> None:
    drafter = drafter_config("z-lab/Qwen3.6-27B-DFlash")
    found = roofline(MODEL, "h200", {"draft": "dflash", "context": 8704, "acceptance": 5.3}, draft=drafter)
    assert [row[0] for row in step_plot("a", found, None).rows][-1] == "a round with DFlash, least"


def test_the_document_holds_what_the_script_writes(tmp_path: Path) -> None:
    document = REPOSITORY / "docs" / "roofline.md"
    copy = tmp_path / "roofline.md"
    # Each generated block is emptied, so that equality afterwards means that the script wrote it.
    text = document.read_text(encoding="utf-8")
    copy.write_text(re.sub(r"(<!-- begin (.*?) -->\n).*?(<!-- end \2 -->)", r"\1\3", text, flags=re.DOTALL), "utf-8")
    assert len(copy.read_text(encoding="utf-8")) < len(text) / 2
    script = REPOSITORY / "benchmarks" / "roofline_page.py"
    words = ["--out", str(tmp_path / "rows.json"), "--page", str(tmp_path / "page"), "--document", str(copy)]
    subprocess.run([sys.executable, str(script), *words], check=True, capture_output=True, timeout=120)
    assert copy.read_text(encoding="utf-8") == text
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert len(rows) == len(checks())
    assert all(row["met"] for row in rows)
    assert {path.name for path in tmp_path.glob("*.png")} == {
        path.name for path in document.parent.glob("roofline-*.png")
    }
