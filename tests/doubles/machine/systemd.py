"""`systemctl` of the machine double: unit files and enabling links are real files, what is active is remembered here.

Starting a unit runs its commands inside the machine; one that stays in the foreground is left running until it is
stopped. Text formats: systemctl(1), systemd.unit(5).
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_host.world import Result

FOLDERS = ("/etc/systemd/system", "/run/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system")
READERS = frozenset(
    [
        "show",
        "is-active",
        "is-enabled",
        "is-failed",
        "is-system-running",
        "status",
        "cat",
        "list-units",
        "list-unit-files",
        "list-timers",
        "--version",
        "get-default",
    ]
)
#: Runs a command inside the machine, to its end or beside everything else.
Inside = Callable[[Sequence[str]], Result]
Beside = Callable[[Sequence[str]], "subprocess.Popen[bytes]"]


class Systemd:
    """Units of one machine.

    Args:
        root: the machine's root as seen from here.
        inside, beside: run a command in it.
        stopped: called with a unit whose processes end.
        offline: systemd does not run there; every verb that talks to it fails as in a plain container.
    """

    def __init__(
        self, root: Path, inside: Inside, beside: Beside, stopped: Callable[[str], None], offline: bool = False
    ) -> None:
        self.root = root
        self.inside = inside
        self.beside = beside
        self.stopped = stopped
        self.offline = offline
        self.active: set[str] = set()
        self.failed: set[str] = set()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, argv: Sequence[str]) -> Result:
        words = [word for word in argv[1:] if not word.startswith("-") or word == "--version"]
        flags = [word for word in argv[1:] if word.startswith("-")]
        verb, names = (words[0], words[1:]) if words else ("list-units", [])
        if verb == "--version":
            return Result(0, "systemd 257 (257.7-1)\n", "")
        if self.offline and verb not in ("enable", "disable", "mask", "unmask", "is-enabled", "cat"):
            return Result(1, "", "System has not been booted with systemd as init system (PID 1). Can't operate.\n")
        units = [name if "." in name else f"{name}.service" for name in names]
        act = getattr(self, f"_{verb.replace('-', '_')}", None)
        if act is None:
            return Result(1, "", f"Unknown command verb {verb}.\n")
        result: Result = act(units)
        if verb in ("enable", "disable") and "--now" in flags and result.ok:
            return self._start(units) if verb == "enable" else self._stop(units)
        return result

    # -- reading ---------------------------------------------------------------------------------------------------

    def _show(self, units: list[str]) -> Result:
        blocks = []
        for unit in units:
            file = self._file(unit)
            state = "active" if unit in self.active else "failed" if unit in self.failed else "inactive"
            values = {
                "Id": unit,
                "LoadState": "masked" if self._masked(unit) else "loaded" if file else "not-found",
                "ActiveState": state,
                "SubState": {"active": "running", "failed": "failed", "inactive": "dead"}[state],
                "UnitFileState": self._enabled(unit),
                "FragmentPath": file or "",
            }
            blocks.append("".join(f"{key}={value}\n" for key, value in values.items()))
        return Result(0, "\n".join(blocks), "")

    def _is_active(self, units: list[str]) -> Result:
        states = ["active" if u in self.active else "failed" if u in self.failed else "inactive" for u in units]
        return Result(0 if "active" in states else 3, "".join(f"{state}\n" for state in states), "")

    def _is_failed(self, units: list[str]) -> Result:
        states = ["failed" if u in self.failed else "active" if u in self.active else "inactive" for u in units]
        return Result(0 if "failed" in states else 1, "".join(f"{state}\n" for state in states), "")

    _status = _is_active

    def _is_enabled(self, units: list[str]) -> Result:
        states = [self._enabled(unit) for unit in units]
        known = [state or "not-found" for state in states]
        good = all(state in ("enabled", "static", "enabled-runtime") for state in states)
        return Result(0 if good else 1, "".join(f"{state}\n" for state in known), "")

    def _is_system_running(self, _units: list[str]) -> Result:
        return Result(0, "running\n", "")

    def _list_unit_files(self, units: list[str]) -> Result:
        lines = [f"{unit} {self._enabled(unit)} enabled" for unit in units if self._file(unit)]
        return Result(0, "\n".join([*lines, f"{len(lines)} unit files listed."]) + "\n", "")

    def _cat(self, units: list[str]) -> Result:
        files = [self._file(unit) for unit in units]
        if not all(files):
            return Result(1, "", "No files found.\n")
        return Result(0, "".join((self.root / str(file).lstrip("/")).read_text(encoding="utf-8") for file in files), "")

    # -- acting ----------------------------------------------------------------------------------------------------

    def _daemon_reload(self, _units: list[str]) -> Result:
        return Result(0, "", "")

    _reset_failed = _daemon_reload
    _reload = _daemon_reload

    def _enable(self, units: list[str]) -> Result:
        return self._link(units, present=True)

    def _disable(self, units: list[str]) -> Result:
        return self._link(units, present=False)

    def _link(self, units: list[str], present: bool) -> Result:
        for unit in units:
            file = self._file(unit)
            if not file:
                return Result(1, "", f"Failed to enable unit: Unit file {unit} does not exist.\n")
            for wanted in self._settings(file, "WantedBy"):
                for target in wanted.split():
                    link = self.root / "etc/systemd/system" / f"{target}.wants" / unit
                    if present and not link.is_symlink():
                        link.parent.mkdir(parents=True, exist_ok=True)
                        link.symlink_to(file)
                    elif not present and link.is_symlink():
                        link.unlink()
        return Result(0, "", "")

    def _mask(self, units: list[str]) -> Result:
        for unit in units:
            link = self.root / "etc/systemd/system" / unit
            link.unlink(missing_ok=True)
            link.symlink_to("/dev/null")
        return Result(0, "", "")

    def _unmask(self, units: list[str]) -> Result:
        for unit in units:
            if self._masked(unit):
                (self.root / "etc/systemd/system" / unit).unlink()
        return Result(0, "", "")

    def _start(self, units: list[str]) -> Result:
        for unit in units:
            if unit in self.active:
                continue
            file = self._file(unit)
            if not file or self._masked(unit):
                return Result(5, "", f"Failed to start {unit}: Unit {unit} not found.\n")
            if not all(Path(self._real(path)).exists() for path in self._settings(file, "ConditionPathExists")):
                continue  # systemd skips such a unit without calling it a failure
            problem = self._run_commands(file)
            if problem:
                self.failed.add(unit)
                return Result(1, "", f"Job for {unit} failed: {problem}\n")
            self.failed.discard(unit)
            kind = (self._settings(file, "Type") or ["simple"])[-1]
            if kind not in ("oneshot", "forking"):
                self._running[unit] = self.beside(shlex.split(self._settings(file, "ExecStart")[-1].lstrip("-@:+!")))
            remains = (self._settings(file, "RemainAfterExit") or ["no"])[-1]
            if kind != "oneshot" or remains in ("yes", "true", "1"):
                self.active.add(unit)
        return Result(0, "", "")

    def _stop(self, units: list[str]) -> Result:
        for unit in units:
            file = self._file(unit)
            if not file and unit not in self.active:
                return Result(5, "", f"Failed to stop {unit}: Unit {unit} not loaded.\n")
            if unit in self.active and file:
                for line in [*self._settings(file, "ExecStop"), *self._settings(file, "ExecStopPost")]:
                    self.inside(shlex.split(line.lstrip("-@:+!")))
            self.active.discard(unit)
            self.failed.discard(unit)
            running = self._running.pop(unit, None)
            if running:
                running.kill()
                running.wait()
            self.stopped(unit)
        return Result(0, "", "")

    def _restart(self, units: list[str]) -> Result:
        self._stop([unit for unit in units if unit in self.active])
        return self._start(units)

    _reload_or_restart = _restart
    _try_restart = _restart

    def _run_commands(self, file: str) -> str:
        """Run what the unit runs at start; the reason of a failure, or nothing."""
        kind = (self._settings(file, "Type") or ["simple"])[-1]
        before = self._settings(file, "ExecStartPre")
        lines = [*before, *self._settings(file, "ExecStart")] if kind in ("oneshot", "forking") else before
        for line in lines:
            result = self.inside(shlex.split(line.lstrip("-@:+!")))
            if not result.ok and not line.startswith("-"):
                return f"`{line}` ended with {result.rc}: {result.tail()}"
        for line in self._settings(file, "ExecStart"):
            program = shlex.split(line.lstrip("-@:+!"))[0]
            if not os.access(self._real(program), os.X_OK):
                return f"Failed to locate executable {program}: No such file or directory"
        return ""

    # -- files -----------------------------------------------------------------------------------------------------

    def _file(self, unit: str) -> str | None:
        for folder in FOLDERS:
            if (self.root / folder.lstrip("/") / unit).exists():
                return f"{folder}/{unit}"
        return None

    def _masked(self, unit: str) -> bool:
        link = self.root / "etc/systemd/system" / unit
        return link.is_symlink() and str(link.readlink()) == "/dev/null"

    def _enabled(self, unit: str) -> str:
        file = self._file(unit)
        if self._masked(unit):
            return "masked"
        if not file:
            return ""
        wanted = [target for line in self._settings(file, "WantedBy") for target in line.split()]
        if not wanted:
            return "static"
        links = [self.root / "etc/systemd/system" / f"{target}.wants" / unit for target in wanted]
        return "enabled" if all(link.is_symlink() for link in links) else "disabled"

    def _settings(self, file: str, key: str) -> list[str]:
        text = (self.root / file.lstrip("/")).read_text(encoding="utf-8").replace("\\\n", " ")
        found = [line.partition("=")[2].strip() for line in text.splitlines() if line.partition("=")[0].strip() == key]
        return [value for value in found if value]

    def _real(self, path: str) -> str:
        """A path inside the machine as a path of this process, with absolute links followed inside."""
        current = self.root / path.lstrip("/")
        for _ in range(10):
            if not current.is_symlink():
                break
            target = current.readlink()
            current = self.root / str(target).lstrip("/") if target.is_absolute() else current.parent / target
        return str(current)
