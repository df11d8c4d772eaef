"""What a reader does with the page: it stays in place while it changes, says when it is old, and needs no mouse."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from dash_site import Tab, served
from tests.doubles import dash_sample

from drafthouse.dash.model import Snapshot

TOKEN = "correct horse battery"


@dataclass
class Feed:
    """Snapshots that a test changes."""

    now: Snapshot = field(default_factory=dash_sample.sample)

    def __call__(self) -> Snapshot:
        return self.now.model_copy(update={"at": datetime.now(UTC)})

    def change(self, **update: Any) -> None:
        self.now = self.now.model_copy(update={"sequence": self.now.sequence + 1, **update})


@pytest.fixture
def feed() -> Feed:
    return Feed()


@pytest.fixture(scope="module")
def expect(playwright_browser: object) -> Any:
    """Playwright's, which asks again and again."""
    from playwright.sync_api import expect

    expect.set_options(timeout=60_000)
    return expect


@pytest.fixture
def site(feed: Feed) -> Iterator[str]:
    with served(feed, refresh_s=0.2) as address:
        yield address


def test_an_update_leaves_the_reader_in_place(site: str, feed: Feed, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(f"{site}/training/ours")
    page = tab.page
    page.locator("figure details").nth(2).locator("summary").click()
    link = page.locator(".facts a").first
    link.focus()
    page.evaluate("window.kept = document.querySelector('figure svg'); window.scrollTo(0, 300)")
    page.evaluate(
        "() => { const range = document.createRange(); range.selectNodeContents(document.querySelector('h1'));"
        " getSelection().removeAllRanges(); getSelection().addRange(range); }"
    )
    run = feed.now.trainings[0]
    feed.change(trainings=(run.model_copy(update={"step": 7777}), *feed.now.trainings[1:]))
    page.locator("dd", has_text="7,777").wait_for()
    assert page.locator("figure details").nth(2).get_attribute("open") is not None
    assert page.evaluate("document.activeElement.textContent") == "train-qwen"
    assert page.evaluate("window.scrollY") == 300
    assert page.evaluate("getSelection().toString()").startswith("ours")
    assert page.evaluate("window.kept.isConnected"), "what did not change is not drawn anew"
    assert tab.complaints == []


def test_nothing_is_sent_or_drawn_while_nothing_changes(site: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(f"{site}/jobs").page
    page.evaluate(
        "window.changes = 0; new MutationObserver((all) => { for (const one of all) if (!one.target.closest?.('time'))"
        " window.changes += 1; }).observe(document.getElementById('live'), { childList: true, subtree: true })"
    )
    for _ in range(3):
        with page.expect_response(lambda answer: "/live/jobs" in answer.url) as told:
            pass
        assert told.value.status == 304
    assert page.evaluate("window.changes") == 0
    assert re.fullmatch(r"as of \d\d:\d\d:\d\d UTC, \d+\u00a0s ago", page.inner_text(".fresh"))


def test_a_server_that_is_gone_is_said_and_the_last_truth_stays(open_tab: Callable[..., Tab]) -> None:
    with served(dash_sample.sample, refresh_s=0.2) as address:
        page = open_tab(f"{address}/fleet").page
        page.wait_for_timeout(300)
        assert not page.locator("#old").is_visible()
    page.locator("#old", has_text="server does not answer").wait_for()
    assert "what you see was true at" in page.inner_text("#old")
    assert "rented1" in page.inner_text("main")


def test_a_collector_that_stopped_is_said(open_tab: Callable[..., Tab]) -> None:
    first = dash_sample.sample()
    shown = [first]
    with served(lambda: shown[-1], refresh_s=0.2) as address:
        page = open_tab(address).page
        assert not page.locator("#old").is_visible()
        # As if it had been the last one for a minute.
        stuck = {"at": first.at - timedelta(minutes=1), "sequence": first.sequence + 1}
        shown.append(first.model_copy(update=stuck))
        page.locator("#old", has_text="Nothing was looked at since").wait_for()


def test_pause_stops_updates_until_it_is_taken_back(site: str, feed: Feed, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(f"{site}/stores").page
    page.get_by_role("button", name="Pause").click()
    page.wait_for_timeout(250)
    page.evaluate("0")  # what was asked before has been told by now
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    feed.change(stores=())
    page.wait_for_timeout(600)
    assert asked == []
    assert "paused" in page.inner_text(".fresh")
    page.get_by_role("button", name="Pause").click()
    page.locator("text=No store.").wait_for()


def test_a_hidden_tab_asks_nothing_and_catches_up_when_it_is_seen(
    site: str, feed: Feed, open_tab: Callable[..., Tab]
) -> None:
    page = open_tab(f"{site}/stores").page
    hide = "(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
    page.evaluate(hide + " document.dispatchEvent(new Event('visibilitychange')); }", True)
    page.wait_for_timeout(250)
    page.evaluate("0")  # what was asked before has been told by now
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    feed.change(stores=())
    page.wait_for_timeout(600)
    assert asked == []
    page.evaluate(hide + " document.dispatchEvent(new Event('visibilitychange')); }", False)
    page.locator("text=No store.").wait_for()


def test_the_filter_follows_the_typing_and_the_address(site: str, open_tab: Callable[..., Tab], expect: Any) -> None:
    tab = open_tab(f"{site}/fleet")
    page = tab.page
    assert page.locator("section.node").count() == 5
    page.get_by_role("searchbox").press_sequentially("a6000")
    page.locator("text=2 nodes, 4 GPUs").wait_for()
    assert page.locator("section.node h2 a").all_inner_texts() == ["ct129", "kpro5"]
    expect(page).to_have_url(f"{site}/fleet?q=a6000")
    assert page.evaluate("document.activeElement.value") == "a6000"
    page.reload()
    assert page.locator("section.node").count() == 2
    page.get_by_role("searchbox").fill("")
    page.get_by_role("combobox").select_option("silent")
    page.locator("text=1 node, 4 GPUs").wait_for()
    assert tab.complaints == []


def test_the_grid_tells_a_shard_by_keyboard_and_by_pointer(
    site: str, feed: Feed, open_tab: Callable[..., Tab], expect: Any
) -> None:
    run = feed.now.extractions[0]
    tab = open_tab(f"{site}/extraction/qwen-800k")
    page = tab.page
    grid = page.locator("#grid")
    grid.focus()
    page.keyboard.press("ArrowRight")
    page.locator("#cell", has_text="Shard 1 of 1250").wait_for()
    columns = int(page.locator("svg.shards").get_attribute("data-columns") or "0")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.locator("#cell", has_text=f"Shard {columns + 2} of 1250").wait_for()
    assert run.names[columns + 1][:16] in page.inner_text("#cell")
    page.keyboard.press("End")
    page.locator("#cell", has_text="Shard 1250 of 1250: free").wait_for()
    stale = run.grid.index("s")
    box = page.locator("svg.shards").bounding_box()
    assert box is not None
    side = box["width"] / columns
    page.mouse.move(box["x"] + (stale % columns + 0.5) * side, box["y"] + (stale // columns + 0.5) * side)
    page.locator("#cell", has_text=f"Shard {stale + 1} of 1250: stale").wait_for()
    feed.change(extractions=(run.model_copy(update={"done": 900}), *feed.now.extractions[1:]))
    page.locator("dd", has_text="900 of 1,250").wait_for()
    assert f"Shard {stale + 1}" in page.inner_text("#cell"), "an update leaves what was told"
    expect(page.locator(".cursor")).to_have_attribute("x", str(stale % columns))
    assert tab.complaints == []


def test_a_chart_tells_its_values_under_the_pointer(site: str, open_tab: Callable[..., Tab], expect: Any) -> None:
    page = open_tab(f"{site}/training/ours").page
    panel = page.locator("figure", has=page.locator("b", has_text="Noise"))
    before = panel.locator("output").inner_text()
    panel.locator("svg").hover()
    expect(panel.locator("output")).to_have_text(re.compile(r"at step \d,\d{3}$"))
    page.mouse.move(1, 1)
    expect(panel.locator("output")).to_have_text(before)
    panel.locator("summary").click()
    assert panel.locator("tbody tr").count() == 12


def test_everything_can_be_reached_without_a_mouse(site: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(f"{site}/extraction/qwen-800k", width=360).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.locator(".skip").bounding_box()["x"] > 0  # type: ignore[index]
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    seen = []
    for _ in range(30):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate(
                "() => { const e = document.activeElement, s = getComputedStyle(e), b = e.getBoundingClientRect();"
                " return [e.id || e.getAttribute('aria-label') || e.textContent.trim(), s.outlineStyle !== 'none',"
                " b.bottom > 0 && b.top < innerHeight]; }"
            )
        )
        if seen[-1][0] == "Prometheus":
            break
    names = [name for name, _, _ in seen]
    assert "grid" in names
    assert "Workers" in names, "a table that scrolls can be scrolled by keys"
    assert names[-1] == "Prometheus"
    assert [one for one in seen if not (one[1] and one[2])] == [], "the focus is always seen"


def test_the_theme_is_chosen_and_remembered(site: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(site, theme="light").page
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.get_by_role("button", name="Theme: auto").click()
    page.get_by_role("button", name="Theme: light").click()
    dark = page.evaluate(colour)
    assert dark != light
    page.goto(f"{site}/fleet")
    assert page.evaluate(colour) == dark
    page.get_by_role("button", name="Theme: dark").click()
    assert page.evaluate(colour) == light


def test_without_scripts_everything_is_there(site: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(f"{site}/training/ours", java_script_enabled=False).page
    assert page.locator("svg.chart path.line").count() >= 8
    assert page.locator("meta[http-equiv=refresh]").count() == 1
    assert page.get_by_role("button", name="Pause").count() == 0


def test_login_and_logout(feed: Feed, open_tab: Callable[..., Tab]) -> None:
    with served(feed, token=TOKEN, refresh_s=0.2) as address:
        tab = open_tab(f"{address}/fleet", width=360)
        page = tab.page
        assert page.url.startswith(f"{address}/login")
        page.get_by_label("Token").fill("wrong")
        page.get_by_role("button", name="Log in").click()
        assert "That is not the token." in page.inner_text("[role=alert]")
        page.get_by_label("Token").fill(TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_url(f"{address}/fleet")
        with page.expect_response(lambda answer: "/live/fleet" in answer.url) as told:
            pass
        assert told.value.status in (200, 304)
        page.get_by_role("button", name="Log out").click()
        # The refresh that was due meanwhile may have been sent to the login, too, and asks to come back.
        page.wait_for_url(re.compile(rf"{re.escape(address)}/login(\?next=/fleet)?$"))
        assert TOKEN not in page.content()
        # 403: the wrong token; 401: that refresh.
        assert [one for one in tab.complaints if not re.search("40[13]", one)] == []
