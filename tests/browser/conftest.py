from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import chromium
import pytest
from dash_site import Tab
from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# the double of a finished run is kept beside the unit tests of the room
sys.path.append(str(Path(__file__).parents[1] / "unit" / "measure"))


@pytest.fixture(scope="session")
def browser() -> Iterator[chromium.Browser]:
    program = chromium.find()
    if program is None:
        pytest.skip("no Chromium on PATH (Debian: apt-get install chromium)")
    with chromium.Browser(program) as running:
        yield running


@pytest.fixture(scope="module")
def playwright_browser() -> Iterator[Browser]:
    """The system's Chromium, driven by Playwright: nothing is downloaded.

    No longer than a file's tests: meanwhile an event loop runs in this thread, and `asyncio.run` is refused to others.
    """
    program = chromium.find()
    if program is None:
        pytest.skip("no Chromium on PATH (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # the sandbox needs a user that is not root
        running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@pytest.fixture
def open_tab(playwright_browser: Browser) -> Iterator[Callable[..., Tab]]:
    """`open_tab(url, width=…, theme=…)`: a tab in a profile of its own."""
    contexts = []

    def open_one(url: str, *, width: int = 1280, height: int = 900, theme: str = "light", **more: Any) -> Tab:
        viewport = {"width": width, "height": height}
        context = playwright_browser.new_context(viewport=viewport, color_scheme=theme, **more)  # type: ignore[arg-type]
        context.set_default_timeout(60_000)
        contexts.append(context)
        tab = Tab(context.new_page())
        tab.watch()
        tab.page.goto(url)
        return tab

    yield open_one
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def shoot() -> Callable[[Page, str], None]:
    """`shoot(page, name)` keeps a picture in the folder DASH_SCREENSHOTS; without one nobody would look at it."""
    wanted = os.environ.get("DASH_SCREENSHOTS")

    def keep(page: Page, name: str) -> None:
        if wanted:
            Path(wanted).mkdir(parents=True, exist_ok=True)
            width, height = page.evaluate("[innerWidth, Math.ceil(document.body.getBoundingClientRect().height)]")
            area = {"x": 0, "y": 0, "width": width, "height": height}
            picture = Image.open(io.BytesIO(page.screenshot(full_page=True, clip=area)))
            # a palette holds the page at a third of the bytes
            picture.convert("RGB").quantize(256).save(Path(wanted) / f"dash-{name}.png", optimize=True)

    return keep
