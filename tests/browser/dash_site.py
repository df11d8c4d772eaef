"""The dashboard behind its real server, and a browser's tab that remembers what it complained about."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drafthouse.dash.model import Snapshot
from drafthouse.dash.serve import Server
from drafthouse.dash.settings import DashSettings
from drafthouse.dash.web import create_app

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request


@dataclass
class Tab:
    """A page with what it complained about: console, uncaught errors, the content policy, failed requests."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def watch(self) -> None:
        self.page.on(
            "console",
            lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("requestfailed", self._failed)
        self.page.add_init_script(
            "document.addEventListener('securitypolicyviolation', (e) =>"
            " console.error('policy', e.violatedDirective, e.blockedURI));"
        )

    def _failed(self, request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # what a page asked for when it was left
            self.complaints.append(f"{request.url}: {request.failure}")


@contextmanager
def served(snapshot: Callable[[], Snapshot], *, token: str | None = None, **settings: Any) -> Iterator[str]:
    """The application behind its real server; gives the address, without a slash at the end."""
    values = DashSettings.model_validate({"stores": ["x"], "port": 0, "refresh_s": 0.5, **settings})
    server = Server(create_app(snapshot, values, token=token), values)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server.address.rstrip("/")
    finally:
        server.close()
        thread.join(60)
