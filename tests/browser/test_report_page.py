"""The report in a real browser: what no parser can tell."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser
from synthetic_report import make_report

from drafthouse.measure import write_report

CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")
WIDTHS = (390, 1280)
THEMES = {"light": False, "dark": True}
SHOWN_RUN = (
    "[...document.querySelectorAll('.sample[open] .run')].filter(e => e.checkVisibility()).map(e => e.className)"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_report(), tmp_path_factory.mktemp("report"))[1]


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long names, long words, many drafters and shards: what a page breaks on."""
    report: dict[str, Any] = make_report()
    long = "a_kind_with_an_extraordinarily_long_name_that_never_ends_and_has_no_space"
    report["verdict"] = f"<b>Long</b> & {long * 3}"
    report["command"] = f"drafthouse demo --set corpus.path={'x' * 300}"
    report["target"]["name"] = long
    report["machine"]["gpus"] = [{"name": "NVIDIA H200", "memory_bytes": 150754820096, "driver": "580"}] * 8
    report["shards"]["table"] *= 6
    for section in ("training", "acceptance", "acceptance_length"):
        for name in (long, "second", "third"):
            report[section][name] = copy.deepcopy(report[section]["ours"])
    for modes in report["acceptance"].values():
        for cell in modes.values():
            cell["by_kind"] = {long: cell["by_kind"]["repeat"], "日本語": cell["by_kind"]["repeat"]}
    report["samples"][0]["runs"]["ours/chain"]["tokens"][0]["text"] = "w" * 500
    return write_report(report, tmp_path_factory.mktemp("crowded"))[1]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_page_is_quiet_fits_and_has_contrast(
    browser: Browser, page: Path, tmp_path: Path, width: int, theme: str
) -> None:
    browser.open(page, width=width, dark=THEMES[theme])
    assert browser.complaints() == []
    assert {url.partition(":")[0] for url in browser.requests()} <= {"file", "data"}
    assert [url for url in browser.requests() if url.startswith("file")] == [page.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    audit = browser.evaluate(CONTRAST)
    assert audit["seen"] > 300
    assert audit["bad"] == []
    shot = tmp_path / f"report-{width}-{theme}.png"
    browser.screenshot(shot)
    assert shot.read_bytes().startswith(b"\x89PNG")
    assert shot.stat().st_size > 100_000


def test_themes_differ(browser: Browser, page: Path) -> None:
    colours = []
    for dark in (False, True):
        browser.open(page, width=1280, dark=dark)
        colours.append(
            browser.evaluate(
                "[getComputedStyle(document.body).backgroundColor,"
                " getComputedStyle(document.querySelector('.plot text')).fill]"
            )
        )
    (light_paper, light_text), (dark_paper, dark_text) = colours
    assert light_paper != dark_paper
    assert light_text != dark_text, "plots must follow the theme"


@pytest.mark.parametrize("width", WIDTHS)
def test_crowded_page_does_not_scroll_sideways(browser: Browser, crowded: Path, width: int) -> None:
    browser.open(crowded, width=width, dark=False)
    assert browser.complaints() == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_plot_text_is_readable_on_a_phone(browser: Browser, page: Path) -> None:
    browser.open(page, width=390, dark=False)
    heights = browser.evaluate(
        "[...document.querySelectorAll('.plot text')].filter(e => e.checkVisibility()).map(e =>"
        " parseFloat(getComputedStyle(e).fontSize) * e.closest('svg').getBoundingClientRect().width"
        " / e.closest('svg').viewBox.baseVal.width)"
    )
    assert len(heights) > 100
    assert min(heights) >= 11


def test_marks_differ_from_the_paper(browser: Browser, page: Path) -> None:
    """Lines and bars need 3:1 (WCAG 2.2, 1.4.11)."""
    for dark in (False, True):
        browser.open(page, width=1280, dark=dark)
        probe = CONTRAST.replace("const bad = [];", "return { ratio, rgba };").replace("let seen = 0;", "")
        ratios = browser.evaluate(
            f"(() => {{ const {{ ratio, rgba }} = {probe.rstrip().rstrip(';')};"
            " const of = (name) => rgba(getComputedStyle(document.documentElement).getPropertyValue(name));"
            " return ['ours', 'baseline', 'third', 'fourth', 'target', 'mark'].flatMap((ink) =>"
            " ['--paper', '--sheet'].map((paper) => [ink, ratio(of('--' + ink), of(paper))])); })()"
        )
        assert len(ratios) == 12
        assert [entry for entry in ratios if entry[1] < 3] == []


def test_runs_are_chosen_with_the_keyboard(browser: Browser, page: Path) -> None:
    browser.open(page, width=1280, dark=False)
    assert set(browser.evaluate(SHOWN_RUN)) == {"run run-1"}
    browser.evaluate("document.getElementById('run-1').focus()")
    browser.press("ArrowRight")
    assert set(browser.evaluate(SHOWN_RUN)) == {"run run-2"}
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    assert set(browser.evaluate(SHOWN_RUN)) == {"run run-0"}


def test_a_round_tells_its_number_by_key_and_by_pointer(browser: Browser, page: Path) -> None:
    browser.open(page, width=1280, dark=False)
    tip = "getComputedStyle(document.activeElement, '::after').content"
    browser.evaluate("document.querySelector('.sample .asked pre:last-child').focus()")
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.className").startswith("round")
    assert "attr(data-tip)" in browser.evaluate(tip) or "Round 0" in browser.evaluate(tip)
    x, y, words = browser.evaluate(
        "(() => { const e = [...document.querySelectorAll('.sample[open] .run-1 .round')][2];"
        " e.scrollIntoView({ block: 'center' }); const r = e.getClientRects()[0];"
        " return [r.x + 2, r.y + r.height / 2, e.dataset.tip]; })()"
    )
    browser.hover(x, y)
    content = browser.evaluate("getComputedStyle(document.querySelector('.round:hover'), '::after').content")
    assert words.startswith("Round 2: ")
    assert words in content or "attr(data-tip)" in content


def test_sections_can_be_reached_without_a_pointer(browser: Browser, page: Path) -> None:
    browser.open(page, width=390, dark=False)
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.textContent") == "Skip to the results"
    browser.press("Enter")
    assert browser.evaluate("location.hash") == "#acceptance"
    boxes = browser.evaluate(
        "[...document.querySelectorAll('nav a, .choice label, summary')].map(e => e.getBoundingClientRect().height)"
    )
    assert min(boxes) >= 20


def test_paper_is_always_light(browser: Browser, page: Path) -> None:
    browser.open(page, width=1280, dark=True)
    browser.emulate_print()
    ink = browser.evaluate("getComputedStyle(document.body).color")
    assert ink == "rgb(21, 32, 44)"
    assert browser.evaluate("document.querySelector('nav').checkVisibility()") is False
    assert browser.pdf().startswith(b"%PDF")
