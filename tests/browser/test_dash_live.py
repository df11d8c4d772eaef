"""A real extraction in a browser: a worker is killed, another takes over, the store is lost; nothing is reloaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dash_site import Tab, served

from drafthouse.dash.collector import Collector
from drafthouse.dash.settings import DashSettings

ROOT = Path(__file__).parents[2]


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """`work(store)`: a worker over the doubles in a process of its own; one that is `held` has done a shard and stands
    still in its second. All are ended with the test."""
    begun: list[subprocess.Popen[bytes]] = []

    def begin(store: Path, *, held: bool = False) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.doubles.extract_worker", str(store), "run", "2", "0"]
        command += ["4", str(tmp_path / "never")] if held else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
        log = (tmp_path / f"worker-{len(begun)}.log").open("wb")
        begun.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.wait()


def counts(page: Any) -> dict[str, int]:
    """The legend of the grid: shards by state."""
    pairs = page.locator(".legend li").evaluate_all(
        "all => all.map(e => e.textContent.trim().match(/^(.*) (\\d+)$/s).slice(1))"
    )
    return {word: int(count) for word, count in pairs}


def test_a_killed_worker_and_a_lost_store_are_seen_without_a_reload(
    tmp_path: Path, work: Callable[..., Any], open_tab: Callable[..., Tab]
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    settings = DashSettings(stores=(str(store),), refresh_s=0.3, probe_s=0)
    with Collector(settings) as collector, served(collector.snapshot, stores=[str(store)], refresh_s=0.3) as address:
        victim = work(store, held=True)
        tab = open_tab(f"{address}/extraction")
        page = tab.page
        page.get_by_role("link", name="run", exact=True).wait_for(timeout=60_000)
        page.get_by_role("link", name="run", exact=True).click()
        page.evaluate("window.neverReloaded = true")
        page.locator("h1", has_text="extracting").wait_for()
        page.locator("#grid .done").wait_for(state="attached")
        page.locator("#grid .leased").wait_for(state="attached")
        before = page.locator("#grid .done").get_attribute("d")
        victim.kill()

        page.locator("h1", has_text="nobody works").wait_for()
        page.locator("#grid .stale").wait_for(state="attached")
        assert counts(page)["stale"] >= 1

        work(store)
        page.locator("h1", has_text="complete").wait_for(timeout=60_000)
        assert page.locator("#grid .done").first.get_attribute("d") != before
        seen = counts(page)
        assert seen["done"] + seen["done after a re-claim"] == 6
        assert seen["done after a re-claim"] >= 1
        assert page.locator("section", has_text="Failures").locator("tbody tr").count() >= 1

        store.rename(tmp_path / "moved")
        page.locator(".alarm", has_text="Last known").wait_for()
        assert counts(page) == seen
        assert page.evaluate("window.neverReloaded")
        page.get_by_role("link", name="Stores").click()
        page.locator("text=down").wait_for()
        page.go_back()
        assert counts(page) == seen

        (tmp_path / "moved").rename(store)
        page.locator("main .alarm").wait_for(state="detached")
        assert tab.complaints == []
