"""Action `serving_plan`: judge a serving profile for a node and render its launch, on the controller.

The unit and the container's command are those of `drafthouse serve plan`; what a host adds to a unit (user, folder,
cards, journal) is a drop-in of its own, so that no flag stands in two places.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "plugin_utils"))

from serving_node import DrafthouseError, Profile, facts_of, profile_of, python_of

from drafthouse.serve.findings import NOT_CHECKED, errors
from drafthouse.serve.launch import launch_line, render_container, render_systemd
from drafthouse.serve.preflight import preflight
from gpu_host.serving import TAG, environment_file, profile_refused


class ActionModule(ActionBase):
    """Fails with all errors that were found before anything is written; changes nothing, in check mode or without.

    Arguments: profile, profiles, overrides, form, devices, model, draft (folders on the node), user, folder, secrets
    (whether there is an environment file).
    """

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        wanted = self._task.args
        profile = profile_of(wanted)
        form, devices = wanted["form"], [str(device) for device in wanted.get("devices") or ()]
        path = profile.model.path
        model = wanted.get("model") or (path if form == "systemd" and path.startswith("/") else "")
        draft = wanted.get("draft") or ""
        findings = preflight(profile, facts_of(self, python_of(task_vars), form == "systemd", model, draft))
        result["findings"] = [f"{one.severity} {one.id}: {one.sentence}; {one.fix}" for one in findings]
        wrong = errors(findings)
        if wrong:
            refusal = profile_refused(profile.name, [(one.id, one.sentence, one.fix) for one in wrong])
            return {**result, "failed": True, "msg": f"[{refusal.rule}] {refusal.sentence()}"}
        result["warnings"] = [
            f"profile {profile.name}: {one.sentence}; {one.fix}" for one in findings if one.severity == "warning"
        ]
        unknown = [one.sentence for one in findings if one.id == NOT_CHECKED]
        try:
            return {**result, "unknown": unknown, "launch": self._launch(profile, form, devices)}
        except DrafthouseError as refused:
            raise AnsibleActionFail(str(refused)) from refused

    def _launch(self, profile: Profile, form: str, devices: list[str]) -> dict[str, Any]:
        line, wanted = launch_line(profile), self._task.args
        launch: dict[str, Any] = {"profile": profile.name, "form": form}
        if form == "systemd":
            return {**launch, "unit": render_systemd(line, profile), "drop_in": _drop_in(wanted, devices)}
        argv = render_container(line, profile, devices)
        own = ["--log-driver", "journald", "--log-opt", f"tag={TAG}"]
        if wanted.get("secrets"):
            own += ["--env-file", environment_file(profile.name)]
        image = profile.container.image if profile.container else ""
        return {**launch, "image": image, "argv": [*argv[:2], *own, *argv[2:]]}


def _drop_in(wanted: dict[str, Any], devices: list[str]) -> str:
    """What the host decides: engines keep downloads and compiled kernels below their user's home."""
    lines = [
        "# Written by the role sglang; changes are lost with its next run.",
        "[Service]",
        f"User={wanted['user']}",
        f"WorkingDirectory={wanted['folder']}",
        f"Environment=HOME={wanted['folder']}",
        *([f"Environment=CUDA_VISIBLE_DEVICES={','.join(devices)}"] if devices else []),
        "StandardOutput=journal",
        "StandardError=journal",
        f"SyslogIdentifier={TAG}",
    ]
    return "\n".join(lines) + "\n"
