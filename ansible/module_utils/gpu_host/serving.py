"""How a serving profile runs on a host: as a systemd unit or as a container, one launch a host.

A launch is data that the controller rendered from the profile. What runs is compared with it by a digest, never by
parsing flags. A launch counts as proven once the canary passed and this host has noted it, so a play that died between
the start and the canary is taken up again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .apply import Handler, Undo, write_file
from .steps import Plan, Refusal, Step
from .world import World

UNIT = "drafthouse-serve.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
DROP_IN = f"{UNIT_FILE}.d/host.conf"
#: What its lines in the journal are found by.
TAG = "drafthouse-serve"
#: Label of the container, and its value: the digest of the launch.
LABEL = "drafthouse.serve"
#: The launch that was started last, and the last one that the canary let pass.
#: Below /var/lib itself: what is started again from here must not lie in a folder of the user of jobs.
FOLDER = "/var/lib/drafthouse-serve"
STARTED, PROVEN = f"{FOLDER}/started.json", f"{FOLDER}/proven.json"
PROVEN_ENVIRONMENT = f"{FOLDER}/proven.env"
_LISTING = ["docker", "ps", "--all", "--filter", f"label={LABEL}"]
_LISTING += ["--format", f'{{{{.Names}}}}\t{{{{.Label "{LABEL}"}}}}\t{{{{.State}}}}']
#: An image of some GB may have to be pulled first.
RUN_TIMEOUT_S = 3600
#: A server that is told to end finishes its requests; systemd's own limit is in the unit.
STOP_TIMEOUT_S = 90


def environment_file(profile: str) -> str:
    """Where the profile's unit and container read secrets, such as a token of the hub."""
    return f"/etc/drafthouse/{profile}.env"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Launch:
    """What is to run.

    Attributes:
        profile: name of the profile, which is the container's name too.
        form: `systemd` or `container`.
        unit, drop_in: texts of the unit's files, for `systemd`.
        image, argv: the image and `docker run …`, for `container`; the label is added here.
        environment: sha256 of the environment file, empty where there is none; its text never leaves the host's disk.
    """

    profile: str
    form: str
    unit: str = ""
    drop_in: str = ""
    image: str = ""
    argv: tuple[str, ...] = ()
    environment: str = ""

    @property
    def environment_file(self) -> str:
        return environment_file(self.profile)

    @property
    def digest(self) -> str:
        return sha256(self.text())

    def text(self) -> str:
        """As it is kept on the host, to be compared and to be started again."""
        return json.dumps(asdict(self), sort_keys=True, indent=1) + "\n"

    @classmethod
    def read(cls, text: str | None) -> Launch | None:
        """The launch that `text` kept; None where there is none, or one of another release."""
        try:
            values = json.loads(text or "")
            return cls(**{**values, "argv": tuple(values["argv"])})
        except (ValueError, TypeError, KeyError):
            return None


@dataclass(frozen=True)
class ServingState:
    """What a host has of it.

    Attributes:
        systemd, engine: whether either is there to start something.
        texts: path -> text of the unit's files and of the two notes, None where absent.
        environments: profile -> (sha256, mode) of its environment file, of those that may be here.
        active, enabled: of the unit.
        starting: it is on its way up, for the first time or again after its end; the canary waits and tells which.
        containers: name -> (digest of its launch, state such as `running`), of containers with our label.
    """

    systemd: bool = False
    engine: bool = False
    texts: Mapping[str, str | None] = field(default_factory=dict)
    environments: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    active: bool = False
    starting: bool = False
    enabled: bool = False
    containers: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def proven(self) -> Launch | None:
        """The launch that last passed its canary here."""
        return Launch.read(self.texts.get(PROVEN))


@dataclass
class ServingPlan(Plan):
    """A plan that says whether the launch has yet to be proven on this host."""

    due: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "due": self.due}


def gather_state(world: World, *profiles: str) -> ServingState:
    """Read a host; changes nothing.

    Args:
        profiles: those whose environment files are of interest, beside those that were started here.
    """
    systemd = world.exists("/run/systemd/system")
    listed = world.run(_LISTING, 30)
    rows = (line.split("\t") for line in listed.out.splitlines())
    shown = world.run(["systemctl", "show", "--property=ActiveState,UnitFileState", UNIT], 30).out if systemd else ""
    texts = {path: world.read(path) for path in (UNIT_FILE, DROP_IN, STARTED, PROVEN)}
    noted = [Launch.read(texts[path]) for path in (STARTED, PROVEN)]
    names = {*profiles, *(launch.profile for launch in noted if launch is not None)}
    return ServingState(
        systemd=systemd,
        engine=listed.ok,
        texts=texts,
        environments={name: found for name in sorted(names) if (found := _environment(world, name))},
        active="ActiveState=active" in shown,
        starting="ActiveState=activating" in shown,
        enabled="UnitFileState=enabled" in shown,
        containers={row[0]: (row[1], row[2]) for row in rows if len(row) == 3},
    )


def _environment(world: World, profile: str) -> tuple[str, int] | None:
    path = environment_file(profile)
    text, whose = world.read(path), world.ownership(path)
    return None if text is None or whose is None else (sha256(text), whose.mode)


def plan(state: ServingState, launch: Launch | None) -> ServingPlan:
    """Bring the host to this launch, or (None) to none; what runs in the other form, or is another's, goes first."""
    proven = state.proven
    made = ServingPlan(due=launch is not None and (proven != launch or state.starting))
    if launch is None:
        made.steps = [*_without_unit(state), *_without_containers(state, None), *_environments(state, None)]
        made.steps += _without_notes(state)
        return made
    if launch.form == "systemd":
        made.refusals = [] if state.systemd else [_no_systemd()]
        steps = [*_without_containers(state, None), *_environments(state, launch), *_unit(state, launch)]
    else:
        made.refusals = [] if state.engine else [_no_engine()]
        steps = [*_without_unit(state), *_environments(state, launch), *_container(state, launch)]
    if made.refusals:
        return made
    made.steps = steps
    if steps or state.texts.get(STARTED) != launch.text():
        # Last, so that a run that broke off before it starts the launch again. A difference in it shows the line of a
        # container; that of a unit shows already.
        action = "write" if launch.form == "container" else "note"
        kept = {"text" if action == "write" else "kept": launch.text(), "mode": 0o600}
        made.steps.append(Step(action, STARTED, "what was started", kept))
    return made


def _no_systemd() -> Refusal:
    return Refusal(
        "no-systemd",
        "the host has no systemd that could run the unit",
        "/run/systemd/system",
        "either set sglang_form: container where an engine runs, or serve it as a job, whose processes need neither",
    )


def _no_engine() -> Refusal:
    return Refusal(
        "no-engine",
        "no container engine answers",
        "docker ps",
        "either install one (the role container_engine), or set sglang_form: systemd",
    )


def profile_refused(profile: str, findings: Sequence[tuple[str, str, str]]) -> Refusal:
    """What was found before anything was written.

    Args:
        findings: name, sentence and way out of each error.
    """
    return Refusal(
        "profile-refused",
        "; ".join(f"{name}: {sentence} ({fix})" for name, sentence, fix in findings),
        f"profile {profile}",
        "nothing was written; change what it names (docs/serving.md has every finding), or override it by "
        "sglang_overrides",
    )


def ended_at_start(profile: str, log: str) -> Refusal:
    return Refusal(
        "ended-at-start",
        f"the server ended before it answered; its last words: {log or 'none'}",
        f"profile {profile}",
        f"read on in `journalctl -t {TAG}`",
    )


def never_healthy(profile: str, seconds: int, said: str) -> Refusal:
    return Refusal(
        "never-healthy",
        f"the server was not healthy within {seconds} s: {said}",
        f"profile {profile}",
        f"read `journalctl -t {TAG}`; where it only needs longer, raise health.start_period_s",
    )


def canary_dead(profile: str, failed: Sequence[str]) -> Refusal:
    """
    Args:
        failed: a sentence for each proof that was not given.
    """
    return Refusal(
        "canary-dead",
        f"the served model gives no proof: {'; '.join(failed)}",
        f"profile {profile}",
        "see `The canary says` in docs/serving.md; what passed last is served again, or nothing",
    )


def _systemctl(target: str, why: str, *verbs: str, undo: list[str] | None = None) -> Step:
    detail: dict[str, Any] = {"argv": ["systemctl", *verbs], "timeout_s": STOP_TIMEOUT_S + 30}
    return Step("run", target, why, {**detail, "undo": undo} if undo else detail)


def _unit(state: ServingState, launch: Launch) -> list[Step]:
    texts = {UNIT_FILE: launch.unit, DROP_IN: launch.drop_in}
    steps = [
        Step("write", path, f"runs the profile {launch.profile}", {"text": text, "mode": 0o644})
        for path, text in texts.items()
        if state.texts.get(path) != text
    ]
    restart = bool(steps) or state.texts.get(STARTED) != launch.text() or not (state.active or state.starting)
    if restart:
        # Not only after a write: files that were taken back are older than what systemd has read.
        steps.append(_systemctl("systemd", "it runs the unit as it stands there", "daemon-reload"))
    if not state.enabled:
        steps.append(_systemctl(UNIT, "starts with the host", "enable", UNIT, undo=["systemctl", "disable", UNIT]))
    if restart:
        why = "runs what changed" if state.active else "does not run"
        steps.append(_systemctl(UNIT, why, "restart", UNIT, undo=["systemctl", "stop", UNIT]))
    return steps


def _without_unit(state: ServingState) -> list[Step]:
    steps = []
    if state.active or state.starting or state.enabled:
        steps.append(_systemctl(UNIT, "it is not wanted here", "disable", "--now", UNIT))
    gone = [path for path in (DROP_IN, UNIT_FILE) if state.texts.get(path) is not None]
    steps += [Step("remove", path, "it is not wanted here") for path in gone]
    return [*steps, _systemctl("systemd", "its unit is gone", "daemon-reload")] if gone else steps


def _container(state: ServingState, launch: Launch) -> list[Step]:
    found = state.containers.get(launch.profile)
    if found == (launch.digest, "running"):
        return _without_containers(state, launch.profile)
    fetch = 'docker image inspect "$0" >/dev/null 2>&1 || docker pull --quiet "$0"'
    argv = [*launch.argv[:2], "--label", f"{LABEL}={launch.digest}", *launch.argv[2:]]
    why = "does not run" if found is None else "runs what changed"
    detail = {"argv": argv, "timeout_s": RUN_TIMEOUT_S, "undo": ["docker", "rm", "--force", launch.profile]}
    return [
        Step(
            "run",
            f"image {launch.image}",
            "is there before anything ends",
            {"argv": ["sh", "-c", fetch, launch.image], "timeout_s": RUN_TIMEOUT_S},
        ),
        *_without_containers(state, None),
        Step("run", f"container {launch.profile}", why, detail),
    ]


def _without_containers(state: ServingState, kept: str | None) -> list[Step]:
    return [
        Step(
            "run",
            f"container {name}",
            "it is not what is wanted",
            {"argv": ["sh", "-c", f'docker stop -t {STOP_TIMEOUT_S} "$0" && docker rm --force "$0"', name]},
        )
        for name in sorted(state.containers)
        if name != kept
    ]


def _environments(state: ServingState, launch: Launch | None) -> list[Step]:
    """The launch's environment file as it is to be, and none of another profile that ran here."""
    steps = [
        Step("remove", environment_file(profile), "its profile does not run here")
        for profile in state.environments
        if launch is None or profile != launch.profile or not launch.environment
    ]
    wanted = (launch.environment, 0o600) if launch is not None and launch.environment else None
    if launch is not None and wanted is not None and state.environments.get(launch.profile) != wanted:
        steps.append(Step("environment", launch.environment_file, "for root's eyes only"))
    return steps


def _without_notes(state: ServingState) -> list[Step]:
    notes = [path for path in (STARTED, PROVEN) if state.texts.get(path) is not None]
    return [Step("remove", path, "nothing runs here") for path in (*notes, *([PROVEN_ENVIRONMENT] if notes else []))]


def writes_environment(text: str) -> Handler:
    """`environment`: the file at the target has this text, mode 0600; the text is in no step, diff or result."""

    def handler(step: Step, world: World) -> Undo:
        before = world.read(step.target)
        world.write(step.target, text, 0o600, (0, 0))
        if before is None:
            return lambda: world.remove(step.target)
        return lambda: world.write(step.target, before, 0o600, (0, 0))

    return handler


def note(step: Step, world: World) -> Undo | None:
    """`note`: the file at the target has `detail['kept']`; as `write`, without a place in what `--diff` shows."""
    return write_file(Step("write", step.target, step.why, {"text": step.detail["kept"], "mode": 0o600}), world)


def note_proof(world: World) -> bool:
    """Note that what was started has passed its canary, with its environment; whether that was news."""
    started = world.read(STARTED)
    if started is None or started == world.read(PROVEN):
        return False
    launch = Launch.read(started)
    environment = world.read(launch.environment_file) if launch is not None and launch.environment else None
    world.write(PROVEN_ENVIRONMENT, environment or "", 0o600)
    world.write(PROVEN, started, 0o600)
    return True


def environment_text(values: Mapping[str, str]) -> str:
    """An environment file that systemd and `docker run --env-file` read alike: neither quotes nor several lines.

    Raises:
        ValueError: a value that one of the two would read as something else; the sentence has the name only.
    """
    for name, value in values.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is no name of an environment variable")
        if re.search(r"[\s\"'\\#]", value):
            raise ValueError(f"the value of {name} holds white space, a quote, # or \\, which the readers differ about")
    return "".join(f"{name}={value}\n" for name, value in sorted(values.items()))
