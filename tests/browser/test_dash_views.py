"""Every view of the page in a real browser: quiet, inside of its viewport, accessible in both themes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from axe_playwright_python.sync_playwright import Axe
from dash_site import Tab, served
from tests.doubles import dash_sample

if TYPE_CHECKING:
    from playwright.sync_api import Page

    Shoot = Callable[[Page, str], None]

VIEWS = {
    "overview": "/",
    "fleet": "/fleet",
    "node": "/fleet/rented3",
    "jobs": "/jobs",
    "extraction": "/extraction",
    "extraction-run": "/extraction/qwen-800k",
    "training": "/training",
    "training-run": "/training/ours",
    "serving": "/serving",
    "server": "/serving/serve-qwen",
    "stores": "/stores",
    "problem": "/extraction/nothing",
}
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with served(dash_sample.sample) as address:
        yield address


def violations(page: Page, *, only: str | None = None) -> list[str]:
    """What axe finds, a line each; by one rule or by all of `RULES`."""
    run_only = {"type": "rule", "values": [only]} if only else {"type": "tag", "values": RULES}
    found = Axe().run(page, options={"runOnly": run_only, "resultTypes": ["violations"]})
    return [
        f"{one['id']} ({one['impact']}): {node['html'][:160]} {node['failureSummary']}"
        for one in found.response["violations"]
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("view", VIEWS)
def test_view_is_quiet_accessible_and_fits(site: str, open_tab: Callable[..., Tab], shoot: Shoot, view: str) -> None:
    tab = open_tab(site + VIEWS[view])
    page = tab.page
    assert violations(page) == []
    shoot(page, f"{view}-wide-light")
    page.emulate_media(color_scheme="dark")
    assert violations(page, only="color-contrast") == []
    shoot(page, f"{view}-wide-dark")
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert violations(page) == []
    shoot(page, f"{view}-phone-dark")
    page.emulate_media(color_scheme="light")
    shoot(page, f"{view}-phone-light")
    if view == "problem":  # the browser itself reports the page's status 404
        tab.complaints = [one for one in tab.complaints if "404" not in one]
    assert tab.complaints == []


@pytest.mark.parametrize("view", ["overview", "fleet", "jobs", "extraction", "training", "serving", "stores"])
def test_an_empty_view_says_what_to_do(open_tab: Callable[..., Tab], shoot: Shoot, view: str) -> None:
    with served(dash_sample.empty) as address:
        tab = open_tab(address + VIEWS[view], width=360, theme="dark")
        if view == "training":  # the others are made of the same parts
            assert violations(tab.page) == []
        assert tab.page.locator(".empty code").count() == 1
        shoot(tab.page, f"{view}-empty")
        assert tab.complaints == []


def test_the_login_is_accessible_and_fits(open_tab: Callable[..., Tab], shoot: Shoot) -> None:
    with served(dash_sample.sample, token="t" * 16) as address:
        tab = open_tab(f"{address}/training", width=360, theme="dark")
        assert tab.page.locator("h1").inner_text() == "Log in"
        assert tab.page.evaluate("document.activeElement.id") == "token"
        assert violations(tab.page) == []
        shoot(tab.page, "login")
        tab.page.emulate_media(color_scheme="light")
        assert violations(tab.page, only="color-contrast") == []
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
        assert tab.complaints == []


def test_names_that_are_markup_run_nothing(open_tab: Callable[..., Tab]) -> None:
    with served(dash_sample.hostile, refresh_s=0.2) as address:
        tab = open_tab(address)
        tab.page.on("dialog", lambda dialog: tab.complaints.append(f"a name was run: {dialog.message}"))
        for path in ("/", "/fleet", "/jobs", "/extraction", "/training", "/serving", "/stores"):
            with tab.page.expect_response(lambda answer: "/live/" in answer.url):  # drawn anew by other code
                tab.page.goto(address + path)
            assert tab.page.locator("main script").count() == 0
            assert "<script>" in tab.page.inner_text("main")
        assert tab.complaints == []


def test_the_dense_forms_are_accessible_too(open_tab: Callable[..., Tab]) -> None:
    many = dash_sample.large(nodes=26, shards=300)
    with served(lambda: many) as address:
        tab = open_tab(f"{address}/fleet", width=360, theme="dark")
        assert tab.page.locator("tbody tr").count() == 26
        assert violations(tab.page) == []
        tab.page.goto(f"{address}/extraction/qwen-800k")
        assert tab.page.locator(".scroll.tall tbody tr").count() == 26
        assert violations(tab.page) == []
        assert tab.complaints == []


def test_a_huge_fleet_is_drawn_and_stays_inside_of_a_phone(open_tab: Callable[..., Tab], shoot: Shoot) -> None:
    whole = dash_sample.large()
    with served(lambda: whole) as address:
        tab = open_tab(f"{address}/fleet", width=360)
        assert tab.page.locator("tbody tr").count() == 200
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
        tab.page.goto(f"{address}/extraction/qwen-800k")
        assert tab.page.locator("svg.shards").get_attribute("data-cells") == "10000"
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
        tab.page.set_viewport_size(WIDE)
        shoot(tab.page, "extraction-10000")
        assert tab.complaints == []
