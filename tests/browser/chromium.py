"""A real Chromium, driven over `--remote-debugging-pipe` (DevTools protocol on file descriptors 3 and 4).

The pipe needs no port, no socket library and no driver package: messages are JSON, ended by a zero byte.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """Path of a Chromium on PATH, None when there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One browser process with one page; a context manager that ends it and removes its profile."""

    def __init__(self, program: str, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def descriptors() -> None:
            # either end may already sit on 3 or 4, where dup2 would overwrite it or leave it closed by exec
            incoming = fcntl.fcntl(to_browser, fcntl.F_DUPFD, 10)
            outgoing = fcntl.fcntl(from_browser, fcntl.F_DUPFD, 10)
            os.dup2(incoming, 3)
            os.dup2(outgoing, 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=descriptors,
            close_fds=False,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._next_id = 0
        self.events: list[dict[str, Any]] = []
        targets = self._call("Target.getTargets", session=False)["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self._call("Target.attachToTarget", session=False, targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def open(self, path: Path, *, width: int, dark: bool, height: int = 900) -> None:
        """Load a file in a viewport of `width` CSS pixels and wait until it is loaded."""
        self.events.clear()
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self._call("Page.navigate", url=path.absolute().as_uri())
        self._wait_for("Page.loadEventFired")

    def emulate_print(self) -> None:
        self._call("Emulation.setEmulatedMedia", media="print", features=[])

    def evaluate(self, expression: str) -> Any:
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def press(self, key: str) -> None:
        code = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "Enter": 13}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def hover(self, x: float, y: float) -> None:
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self._call("Page.printToPDF", printBackground=True)["data"])

    def requests(self) -> list[str]:
        """URLs that the page asked for since it was opened."""
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [request["request"]["url"] for request in sent]

    def complaints(self) -> list[str]:
        """Console errors and warnings, uncaught exceptions and log entries of the browser itself."""
        self.evaluate("0")  # everything that was said before this answer is read by now
        found = []
        for event in self.events:
            parameters = event["params"]
            if event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(parameters["entry"]["text"])
            elif event["method"] == "Runtime.exceptionThrown":
                found.append(parameters["exceptionDetails"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
                found.append(str(parameters["args"]))
        return found

    def _call(self, method: str, *, session: bool = True, **parameters: Any) -> dict[str, Any]:
        self._next_id += 1
        message = {"id": self._next_id, "method": method, "params": parameters}
        if session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._next_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _wait_for(self, method: str) -> None:
        while not any(event["method"] == method for event in self.events):
            self._receive()

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout_s
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser said nothing for {self._timeout_s:g} s")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise ConnectionError(f"the browser ended with status {self._process.wait(10)}")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message
