from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from synthetic_report import make_report

from drafthouse.measure import ReportError, provenance, render, samples, view, write_report
from drafthouse.measure.report_schema import parse_report

VOID = {"meta", "link", "input"}
FETCHING = {"src", "srcset", "data", "poster", "action", "background", "ping"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; complains about tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_page_nests_and_its_ids_are_unique(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    pointed = [attributes.get("aria-labelledby") or attributes.get("for") for _, attributes in page.tags]
    anchors = [href[1:] for link in page.all("a") if (href := link["href"] or "").startswith("#")]
    assert {*filter(None, pointed), *anchors} <= set(ids)


def test_nothing_is_fetched_and_nothing_is_run(page: Page, html: str) -> None:
    assert not page.all("script")
    for tag, attributes in page.tags:
        assert not FETCHING & set(attributes), tag
        assert not [name for name in attributes if name.startswith("on")], tag
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert not re.search(r"url\(\s*[\"']?(?!#)", html)
    assert "@import" not in html
    policy = next(meta for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in (policy["content"] or "")
    assert {link["href"] for link in page.all("a") if not (link["href"] or "").startswith("#")} == {"report.json"}


def test_page_is_accessible_by_structure(page: Page) -> None:
    headings = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(headings))
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(header.get("scope") in ("col", "row") for header in page.all("th"))
    pictures = page.all("svg")
    assert len(pictures) == 12
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in pictures)
    assert page.all("html")[0]["lang"] == "en"
    labelled = {label["for"] for label in page.all("label")}
    assert {field["id"] for field in page.all("input")} == labelled


def test_headline_and_key_figures(page: Page, report: dict[str, Any]) -> None:
    text = page.text.replace("\u00a0", " ")
    assert report["verdict"] in text
    for words in ("256 of 256", "16 of 16", "2 redone after worker w1 was killed", "5 min 23 s", "71 %"):
        assert words in text
    for lengths in report["acceptance_length"].values():
        assert all(f"{value:.2f}" in text for value in lengths.values())


def test_sample_text_is_escaped_and_complete(page: Page, html: str, report: dict[str, Any]) -> None:
    assert "<script>" not in html
    assert 'onclick="x()"' not in html
    for sample in report["samples"]:
        for run in sample["runs"].values():
            written = "".join(token["text"] for token in run["tokens"])
            assert re.sub(r"\s+", " ", written.replace("\n", "↵\n")) in page.text


def test_marked_text_tells_rounds_and_sources(report: dict[str, Any]) -> None:
    report["samples"] = report["samples"][:1]
    report["samples"][0]["runs"] = {
        "ours/chain": {
            "rounds": 3,
            "tokens": [
                {"text": "a", "source": "target", "round": 0},
                {"text": "b", "source": "draft", "round": 1},
                {"text": "c", "source": "draft", "round": 1},
                {"text": "d", "source": "target", "round": 1},
                {"text": "e", "source": "target", "round": 2},
            ],
        }
    }
    page = render(report)
    assert 'data-tip="Round 1: 2 drafted tokens accepted, 1 token of the target&#39;s own"' in page
    assert 'data-tip="Round 2: no drafted token accepted, 1 token of the target&#39;s own"' in page
    assert '<span class="drafted">b</span><span class="drafted">c</span><span class="own">d</span>' in page
    assert page.count('<span class="round odd" tabindex="0"') == 1
    assert "ours, chain: 5 tokens in 3 target passes, 1.67 tokens per pass" in page


def test_runs_that_wrote_different_texts_are_flagged(report: dict[str, Any]) -> None:
    report["samples"][0]["runs"]["ours/tree"]["tokens"][-1]["text"] = "!"
    views = samples.sample_views(parse_report(report))
    assert [sample.same_text for sample in views] == [False, True, True, True]


def test_run_that_was_not_kept_is_said(report: dict[str, Any]) -> None:
    del report["samples"][1]["runs"]["baseline/tree"]
    assert render(report).count("This run was not kept for this prompt.") == 1


def test_absent_sections_leave_no_trace(report: dict[str, Any]) -> None:
    for key in ("wall_clock", "peak_memory_bytes", "samples"):
        del report[key]
    report["corpus"]["drops"] = {}
    report["machine"] = {}
    report["versions"] = {}
    report["seeds"] = {}
    report["target"]["by_kind"] = {}
    report["shards"]["table"] = []
    page = Page(render(report))
    for words in ("Wall-clock", "In the text", "of memory at its peak", "Left out", "None", "Seeds"):
        assert words not in page.text
    assert not [link for link in page.all("a") if link["href"] in ("#speed", "#samples")]


def test_what_went_wrong_is_said_plainly(report: dict[str, Any]) -> None:
    acceptance = report["acceptance"]
    acceptance["ours"], acceptance["baseline"] = acceptance["baseline"], acceptance["ours"]
    acceptance["ours"]["tree"]["micro"] = 3.2
    report["acceptance_length"] = {
        name: {mode: cell["micro"] for mode, cell in modes.items()} for name, modes in acceptance.items()
    }
    report["greedy_identical"] = False
    report["identical"].update(chain=251, tree=240)
    report["shards"].update(committed=15, lost=1)
    report["target"].update(exact_match=0.22, repeated_4grams=0.61)
    text = Page(render(report)).text.replace("\u00a0", " ")
    for words in (
        "240 of 256 texts differ",
        "15 of 16 not complete",
        "22 % under 60 %",
        "wanted: under 30 %, missed",
        "−18.4 %",
        "A tree falls below its chain for ours, all prompts",
        "no acceptance length on this page counts",
    ):
        assert words in text


def test_speed_is_told_as_it_was_measured(report: dict[str, Any]) -> None:
    modes = report["wall_clock"]["modes"]
    modes["autoregressive"] = {"tokens": 1000, "seconds": 10.0, "target_passes": 1000}
    modes["chain"] = {"tokens": 1000, "seconds": 20.0, "target_passes": 250}
    modes["tree"] = {"tokens": 1000, "seconds": 10.0, "target_passes": 200}
    chain, tree = view.speed_sentences(parse_report(report))
    assert "took 8.00× the time of a plain step and yielded 4.00 tokens, so it was slower: 0.50×" in chain
    assert "took 5.00× the time of a plain step and yielded 5.00 tokens, so it broke even: 1.00×" in tree


def test_redone_shards_are_marked(report: dict[str, Any]) -> None:
    assert [row.redone for row in provenance.shard_rows(parse_report(report))].index(True) == 6
    report["shards"]["table"][0]["redone"] = True
    report["shards"]["table"][6]["redone"] = False
    marks = [row.redone for row in provenance.shard_rows(parse_report(report))]
    assert marks[0]
    assert not marks[6]
    assert marks[7]


def test_recipe_rows_mark_what_differs(report: dict[str, Any]) -> None:
    report["training"]["ours"]["recipe"]["temperature"] = 1.0
    rows = {row.name: row for row in provenance.recipe_rows(parse_report(report))}
    assert rows["loss"].differs
    assert not rows["optimizer"].differs
    assert rows["temperature"].cells == ("–", "1")
    assert rows["parameters"].cells == ("443,264", "443,264")


def test_same_report_gives_same_page_in_another_process(html: str, tmp_path: Path) -> None:
    code = (
        "import sys; from synthetic_report import make_report; from drafthouse.measure import render; "
        "sys.stdout.reconfigure(encoding='utf-8', newline=''); sys.stdout.write(render(make_report()))"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "12345", "TZ": "Asia/Tokyo"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert result.stdout.decode() == html


def test_written_files_hold_the_dict_and_the_page(report: dict[str, Any], html: str, tmp_path: Path) -> None:
    json_path, html_path = write_report(report, tmp_path / "runs" / "demo")
    assert json.loads(json_path.read_text(encoding="utf-8")) == report
    assert html_path.read_text(encoding="utf-8") == html
    assert sorted(path.name for path in html_path.parent.iterdir()) == ["report.html", "report.json"]
    assert html_path.stat().st_mode & 0o044 == 0o044
    assert len(html) < 1_000_000


def test_a_broken_report_leaves_the_old_one(report: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("old")
    del report["target"]["exact_match"]
    with pytest.raises(ReportError, match=r"lacks the key 'target\.exact_match'"):
        write_report(report, tmp_path)
    assert (tmp_path / "report.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_folder_that_cannot_be_written_is_one_sentence(report: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where a folder should be")
    with pytest.raises(ReportError) as caught:
        write_report(report, tmp_path / "runs" / "demo")
    assert str(tmp_path / "runs" / "demo") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_full_disk_leaves_the_old_report(
    report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.html").write_text("old")
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ReportError, match="no space left on device"):
        write_report(report, tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_double_depends_on_its_seed_only() -> None:
    assert make_report(3) == make_report(3)
    assert make_report(3) != make_report(4)
