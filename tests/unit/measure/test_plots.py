from __future__ import annotations

import copy
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse.measure import Report, parse_report, plots
from drafthouse.measure.charts import CURVE_POINTS, Plot, thinned
from drafthouse.measure.svg import INKS


@pytest.fixture(scope="module")
def drawn(parsed: Report) -> dict[str, Plot]:
    found = [
        *plots.training_plots(parsed),
        plots.acceptance_by_slot(parsed),
        plots.accuracy_by_slot(parsed),
        plots.acceptance_by_kind(parsed, "chain"),
        plots.acceptance_by_kind(parsed, "tree"),
        plots.acceptance_by_budget(parsed),
        plots.passes(parsed),
        plots.speed(parsed),
        plots.exact_match(parsed, 0.6),
    ]
    return {plot.name: plot for plot in found if plot is not None}


def test_everything_is_drawn(drawn: dict[str, Plot]) -> None:
    assert len(drawn) == 12


def test_pictures_follow_the_theme(drawn: dict[str, Plot]) -> None:
    for plot in drawn.values():
        assert not re.search(r"#[0-9a-fA-F]{6}", plot.svg), f"{plot.name} holds a fixed colour"
        assert "var(--ink)" in plot.svg or "var(--muted)" in plot.svg
        assert "font-family" not in plot.svg
        assert "<style" not in plot.svg, "a style inside would apply to the whole page"


def test_text_stays_text_and_is_told(drawn: dict[str, Plot]) -> None:
    kinds = drawn["by-kind-chain"]
    root = ElementTree.fromstring(kinds.svg)
    words = [element.text or "" for element in root.iter("text")]
    assert any(word.startswith("tool call") for word in words)
    assert root.attrib["role"] == "img"
    for row in kinds.rows:
        assert all(cell in root.attrib["aria-label"] for cell in row)


def test_ids_are_unique_over_the_page(drawn: dict[str, Plot]) -> None:
    ids = [found for plot in drawn.values() for found in re.findall(r'\bid="([^"]*)"', plot.svg)]
    assert len(ids) == len(set(ids))
    known = set(ids)
    for plot in drawn.values():
        assert set(re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', plot.svg)) <= {
            pair for name in known for pair in ((name, ""), ("", name))
        }


def test_drawing_again_gives_the_same_text(parsed: Report, drawn: dict[str, Plot]) -> None:
    assert plots.acceptance_by_slot(parsed) == drawn["by-slot"]
    assert plots.acceptance_by_budget(parsed) == drawn["by-budget"]


def test_settings_of_the_user_are_not_read(parsed: Report, drawn: dict[str, Plot]) -> None:
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert plots.acceptance_by_slot(parsed) == drawn["by-slot"]


def test_names_are_neither_markup_nor_mathematics(report: dict[str, Any]) -> None:
    odd = "$x^2$ <b>&\"'"
    for modes in report["acceptance"].values():
        for cell in modes.values():
            cell["by_kind"] = {odd: cell["by_kind"]["repeat"]}
    plot = plots.acceptance_by_kind(parse_report(report), "chain")
    words = [element.text or "" for element in ElementTree.fromstring(plot.svg).iter("text")]
    assert f"{odd} (64 prompts)" in words


def test_what_was_not_logged_is_not_drawn(report: dict[str, Any]) -> None:
    for run in report["training"].values():
        for point in run["curve"]:
            for key in ("acceptance", "lr", "noise"):
                point.pop(key, None)
    for modes in report["acceptance"].values():
        modes["tree"].pop("by_budget")
    del report["wall_clock"]
    parsed = parse_report(report)
    assert [plot.name for plot in plots.training_plots(parsed)] == ["loss", "accuracy"]
    assert plots.acceptance_by_budget(parsed) is None
    assert plots.speed(parsed) is None


def test_different_losses_come_with_a_warning(parsed: Report, report: dict[str, Any]) -> None:
    assert "different losses" in plots.training_plots(parsed)[0].note
    report["training"]["ours"]["recipe"]["loss"] = report["training"]["baseline"]["recipe"]["loss"]
    assert plots.training_plots(parse_report(report))[0].note == ""


def test_equal_schedules_are_one_line(drawn: dict[str, Plot]) -> None:
    labels = [key.label for key in drawn["schedule"].keys]
    assert labels == ["baseline and ours, learning rate", "ours, noise"]


def test_ours_and_baseline_keep_their_colours(report: dict[str, Any]) -> None:
    assert plots.inks(["z", "ours", "a", "baseline", "b"]) == {
        "baseline": "baseline",
        "ours": "ours",
        "a": "third",
        "b": "fourth",
        "z": "muted",
    }
    assert set(plots.inks("abc").values()) <= set(INKS)


def test_a_further_drafter_is_drawn(report: dict[str, Any]) -> None:
    for section in ("training", "acceptance", "acceptance_length"):
        report[section]["d-pace"] = copy.deepcopy(report[section]["ours"])
    plot = plots.acceptance_by_slot(parse_report(report))
    assert "var(--third)" in plot.svg
    assert [key.label for key in plot.keys][-2:] == ["d-pace, chain", "d-pace, tree"]


def test_passes_are_the_inverse_of_acceptance(parsed: Report, drawn: dict[str, Plot]) -> None:
    rows = {row[0]: row for row in drawn["passes"].rows}
    assert rows["ours, tree"][1] == f"{100 / parsed.acceptance['ours'].tree.micro:.1f}"
    assert rows["plain decoding, one token a pass"][1:] == ("100.0", "1.00")


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=700), st.integers(2, CURVE_POINTS))
def test_thinning_keeps_ends_order_and_mean(values: list[float], most: int) -> None:
    points = [(float(place), value) for place, value in enumerate(values)]
    thin = thinned(points, most)
    assert len(thin) == min(len(points), most)
    xs = [x for x, _ in thin]
    assert xs == sorted(xs)
    assert (xs[0], xs[-1]) == (points[0][0], points[-1][0])
    assert min(values) - 1e-9 <= min(y for _, y in thin)
    assert max(y for _, y in thin) <= max(values) + 1e-9
