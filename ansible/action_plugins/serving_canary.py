"""Action `serving_canary`: wait until a served model answers on its node, then ask it for its proofs.

A server listens on its node's loopback, as a rule. The canary runs on the controller and reaches it through Ansible's
own connection: a relay on the controller hands each request to a few lines of Python on the node.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "plugin_utils"))

from serving_node import Profile, Result, command, profile_of, python_of

from drafthouse.serve.canary import canary_of
from gpu_host.serving import TAG, UNIT, canary_dead, ended_at_start, never_healthy
from gpu_host.steps import Refusal

_POLL_S = 1.0
#: On the node: one request from stdin, its answer as JSON; bodies are base64.
_HAND_ON = """
import base64, http.client, json, sys
asked = json.load(sys.stdin)
try:
    link = http.client.HTTPConnection(asked["host"], asked["port"], timeout=asked["timeout_s"])
    body = base64.b64decode(asked["body"])
    link.request(asked["method"], asked["path"], body or None, {"Content-Type": "application/json"} if body else {})
    answer = link.getresponse()
    said = {"status": answer.status, "body": base64.b64encode(answer.read()).decode()}
except Exception as failure:
    said = {"status": 0, "error": f"{type(failure).__name__}: {failure}"}
print(json.dumps(said))
"""


class ActionModule(ActionBase):
    """Fails with what was not proven; changes nothing.

    Arguments: profile, profiles, overrides, form.
    """

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        profile = profile_of(self._task.args)
        self._python = python_of(task_vars)
        # A connection of Ansible is not made for several threads; requests of the canary come one after the other.
        self._turn = threading.Lock()
        refusal = self._waited(profile)
        if refusal is None:
            with self._relay(profile) as url:
                report = canary_of(profile, url)
            result["canary"] = report.as_dict()
            if not report.passed:
                said = [f"{one.name}: {one.sentence}" for one in report.checks if not one.passed]
                refusal = canary_dead(profile.name, said)
        if refusal is not None:
            result.update(failed=True, msg=f"[{refusal.rule}] {refusal.sentence()}")
        return result

    def _waited(self, profile: Profile) -> Refusal | None:
        """Until the server is healthy; the reason when it ends first, or takes longer than the profile allows."""
        health = profile.health
        end = time.monotonic() + health.start_period_s
        while True:
            answer = self._ask(profile, "GET", health.path, b"", health.timeout_s)
            if answer["status"] == 200:
                return None
            if not self._lives(profile):
                return ended_at_start(profile.name, self._log())
            if time.monotonic() > end:
                said = answer.get("error") or f"{health.path} answers {answer['status']}"
                return never_healthy(profile.name, health.start_period_s, said)
            time.sleep(_POLL_S)

    def _lives(self, profile: Profile) -> bool:
        """It runs and was not started again by whoever watches over it."""
        if self._task.args["form"] == "container":
            argv = ["docker", "inspect", "--format", "{{.State.Running}} {{.RestartCount}}", profile.name]
            return self._command(argv).out.strip() == "true 0"
        shown = self._command(["systemctl", "show", "--property=ActiveState,NRestarts", UNIT]).out.split()
        return "NRestarts=0" in shown and bool({"ActiveState=active", "ActiveState=activating"} & set(shown))

    def _log(self) -> str:
        said = self._command(["journalctl", "--identifier", TAG, "--lines", "5", "--no-pager", "--output", "cat"])
        return " / ".join(line for line in said.out.splitlines() if line.strip())

    def _command(self, argv: list[str], stdin: bytes | None = None) -> Result:
        with self._turn:
            return command(self, argv, stdin)

    def _ask(self, profile: Profile, method: str, path: str, body: bytes, timeout_s: float) -> dict[str, Any]:
        host, _, port = profile.address.removeprefix("http://").rpartition(":")
        asked = {"host": host, "port": int(port), "method": method, "path": path, "timeout_s": timeout_s}
        asked["body"] = base64.b64encode(body).decode()
        said = self._command([self._python, "-c", _HAND_ON], json.dumps(asked).encode())
        try:
            return dict(json.loads(said.out))
        except ValueError:
            return {"status": 0, "error": said.tail(1)}

    @contextmanager
    def _relay(self, profile: Profile) -> Iterator[str]:
        """A server on the controller's loopback that stands for the one of the node."""
        ask, limit_s = self._ask, profile.canary.timeout_s

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                return None

            def _hand_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                answer = ask(profile, self.command, self.path, body, limit_s)
                text = base64.b64decode(answer["body"]) if "body" in answer else str(answer["error"]).encode()
                self.send_response(answer["status"] or 502)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self) -> None:
                self._hand_on()

            def do_POST(self) -> None:
                self._hand_on()

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
