"""What serves a model on a host: planned from what runs, taken step by step on a tree, noted when it is proven."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_host import serving
from gpu_host.apply import apply
from gpu_host.serving import DROP_IN, PROVEN, STARTED, UNIT, UNIT_FILE, Launch, ServingPlan
from gpu_host.steps import ApplyError
from gpu_host.world import Result
from tests.doubles.host_tree import HostTree, TreeWorld

UNIT_LAUNCH = Launch("small", "systemd", unit="[Service]\nExecStart=engine\n", drop_in="[Service]\nUser=drafthouse\n")
ARGV = ("docker", "run", "--detach", "--name", "small", "example.org/engine:1", "--port", "30000")
CONTAINER = Launch("small", "container", image="example.org/engine:1", argv=ARGV)
SECRETS = "HF_TOKEN=example-only\n"


class Host:
    """A tree with systemd and a container engine that do as they are told.

    Attributes:
        engine: it answers.
        broken: programs' words that fail, such as `run`.
        dies: what was started ends at once, and systemd tries again.
    """

    def __init__(self, path: Path) -> None:
        self.tree = HostTree(path)
        self.world = self.tree.world
        self.tree.path("/run/systemd/system").mkdir(parents=True)
        self.active = self.enabled = False
        self.dies = False
        self.restarts = 0
        self.containers: dict[str, tuple[str, str]] = {}
        self.engine, self.broken = True, set[str]()
        for name, program in (("systemctl", self._systemctl), ("docker", self._docker), ("sh", self._sh)):
            self.world.on(name, program)

    def _systemctl(self, _world: TreeWorld, argv: list[str]) -> Result | int | str:
        verb = argv[1]
        if verb in self.broken:
            self.active = self.active and verb != "restart"
            return Result(1, "", "Job failed.\n")
        if verb == "show":
            state = "activating" if self.dies and self.active else "active" if self.active else "inactive"
            return f"ActiveState={state}\nUnitFileState={'enabled' if self.enabled else ''}\n"
        self.enabled = {"enable": True, "disable": False}.get(verb, self.enabled)
        self.active = {"restart": True, "stop": False, "disable": False}.get(verb, self.active)
        self.restarts += verb == "restart"
        return 0

    def _docker(self, _world: TreeWorld, argv: list[str]) -> Result | int | str:
        if not self.engine or argv[1] in self.broken:
            return Result(1, "", "Cannot connect to the Docker daemon\n")
        if argv[1] == "ps":
            return "".join(f"{name}\t{digest}\t{state}\n" for name, (digest, state) in self.containers.items())
        if argv[1] == "run":
            label = argv[argv.index("--label") + 1]
            self.containers[argv[argv.index("--name") + 1]] = (label.removeprefix(f"{serving.LABEL}="), "running")
        elif argv[1] == "rm":
            self.containers.pop(argv[-1], None)
        return 0

    def _sh(self, _world: TreeWorld, argv: list[str]) -> Result | int | None:
        if "docker stop" in argv[2]:
            self.containers.pop(argv[3], None)
            return 0
        return 0 if "docker pull" in argv[2] else None

    def plan(self, launch: Launch | None) -> ServingPlan:
        return serving.plan(serving.gather_state(self.world, *([launch.profile] if launch else [])), launch)

    def bring(self, launch: Launch | None, secrets: str = "") -> ServingPlan:
        """As the module does it: nothing may be left to do afterwards."""
        made = self.plan(launch)
        assert not made.refused, made.refusal_text()
        apply(made, self.world, {"environment": serving.writes_environment(secrets), "note": serving.note})
        assert self.plan(launch).steps == []
        return made


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize("launch", [UNIT_LAUNCH, CONTAINER])
def test_started_once_and_proven_once(host: Host, launch: Launch) -> None:
    assert host.bring(launch).due
    assert (host.active, "small" in host.containers) == (launch.form == "systemd", launch.form == "container")
    assert host.plan(launch).due, "a play that ended before the canary has proven nothing"
    assert serving.note_proof(host.world)
    again = host.plan(launch)
    assert (again.steps, again.due) == ([], False)
    assert not serving.note_proof(host.world)


def test_a_changed_unit_is_restarted_and_has_to_prove_itself_again(host: Host) -> None:
    host.bring(UNIT_LAUNCH)
    serving.note_proof(host.world)
    changed = replace(UNIT_LAUNCH, unit="[Service]\nExecStart=engine --port 1\n")
    assert host.bring(changed).due
    assert host.restarts == 2
    assert host.world.read(UNIT_FILE) == changed.unit


def test_a_changed_container_takes_the_place_of_the_former_after_its_image_is_there(host: Host) -> None:
    host.bring(CONTAINER)
    changed = replace(CONTAINER, image="example.org/engine:2", argv=(*ARGV[:5], "example.org/engine:2"))
    made = host.plan(changed)
    assert [step.target for step in made.steps[:3]] == [
        "image example.org/engine:2",
        "container small",
        "container small",
    ]
    host.bring(changed)
    assert host.containers == {"small": (changed.digest, "running")}


@pytest.mark.parametrize(("first", "then"), [(UNIT_LAUNCH, CONTAINER), (CONTAINER, UNIT_LAUNCH)])
def test_the_other_form_goes_first(host: Host, first: Launch, then: Launch) -> None:
    host.bring(first)
    host.bring(then)
    assert (host.active, bool(host.containers)) == (then.form == "systemd", then.form == "container")
    assert (host.world.read(UNIT_FILE) is None) == (then.form == "container")


def test_one_profile_a_host(host: Host) -> None:
    host.bring(replace(CONTAINER, environment=serving.sha256(SECRETS)), SECRETS)
    other = replace(CONTAINER, profile="other", argv=(*ARGV[:4], "other", *ARGV[5:]))
    host.bring(other)
    assert list(host.containers) == ["other"]
    assert host.world.read("/etc/drafthouse/small.env") is None


@pytest.mark.parametrize(("state", "why"), [("exited", "runs what changed"), (None, "does not run")])
def test_a_container_that_ended_is_started_again(host: Host, state: str | None, why: str) -> None:
    host.bring(CONTAINER)
    if state:
        host.containers["small"] = (CONTAINER.digest, state)
    else:
        host.containers.clear()
    assert why in [step.why for step in host.bring(CONTAINER).steps]


def test_a_unit_that_ended_or_was_disabled_is_brought_back(host: Host) -> None:
    host.bring(UNIT_LAUNCH)
    host.active = host.enabled = False
    host.bring(UNIT_LAUNCH)
    assert host.active
    assert host.enabled


def test_a_server_that_ends_at_once_is_left_to_the_canary_to_tell(host: Host) -> None:
    host.dies = True
    assert host.bring(UNIT_LAUNCH).due
    serving.note_proof(host.world)
    again = host.plan(UNIT_LAUNCH)
    assert (again.steps, again.due) == ([], True), "what was proven once and ends now is asked again"
    host.bring(None)
    assert not host.active


def test_a_run_that_broke_off_before_its_last_step_restarts(host: Host) -> None:
    host.bring(UNIT_LAUNCH)
    host.world.remove(STARTED)
    host.bring(UNIT_LAUNCH)
    assert host.restarts == 2


def test_the_environment_is_for_root_only_and_in_no_result(host: Host) -> None:
    launch = replace(UNIT_LAUNCH, environment=serving.sha256(SECRETS))
    made = host.bring(launch, SECRETS)
    path = launch.environment_file
    assert host.world.read(path) == SECRETS
    assert host.tree.path(path).stat().st_mode & 0o777 == 0o600
    assert "example-only" not in json.dumps(made.as_dict())
    host.tree.path(path).chmod(0o644)
    assert [step.action for step in host.plan(launch).steps][:1] == ["environment"]
    host.bring(launch, SECRETS)
    # Another token of the same length is another launch.
    assert host.plan(replace(launch, environment=serving.sha256("HF_TOKEN=example-0nly\n"))).due
    host.bring(UNIT_LAUNCH)
    assert host.world.read(path) is None


def test_what_was_proven_is_kept_with_its_environment(host: Host) -> None:
    launch = replace(UNIT_LAUNCH, environment=serving.sha256(SECRETS))
    host.bring(launch, SECRETS)
    serving.note_proof(host.world)
    host.bring(replace(UNIT_LAUNCH, unit="[Service]\nExecStart=worse\n"))
    former = serving.gather_state(host.world).proven
    assert former == launch
    host.bring(former, host.world.read(serving.PROVEN_ENVIRONMENT) or "")
    assert host.world.read(launch.environment_file) == SECRETS
    assert host.world.read(UNIT_FILE) == launch.unit


def test_a_start_that_fails_takes_the_files_back(host: Host) -> None:
    host.broken = {"restart"}
    with pytest.raises(ApplyError, match="Job failed"):
        host.bring(replace(UNIT_LAUNCH, environment=serving.sha256(SECRETS)), SECRETS)
    left = [path for path in (UNIT_FILE, DROP_IN, STARTED, "/etc/drafthouse/small.env") if host.world.exists(path)]
    assert (left, host.enabled) == ([], False)


def test_files_that_were_taken_back_are_read_again_before_the_restart(host: Host) -> None:
    host.bring(UNIT_LAUNCH)
    host.broken = {"restart"}
    with pytest.raises(ApplyError):
        host.bring(replace(UNIT_LAUNCH, unit="[Service]\nExecStart=worse\n"))
    host.broken = set()
    assert not host.active
    steps = [step.detail["argv"][1] for step in host.bring(UNIT_LAUNCH).steps if step.action == "run"]
    assert steps == ["daemon-reload", "restart"]


def test_a_container_that_does_not_start_is_no_success(host: Host) -> None:
    host.broken = {"run"}
    with pytest.raises(ApplyError, match="Cannot connect"):
        host.bring(CONTAINER)
    assert host.world.read(STARTED) is None


def test_nothing_is_written_where_nothing_can_run_it(host: Host) -> None:
    host.engine = False
    assert [refusal.rule for refusal in host.plan(CONTAINER).refusals] == ["no-engine"]
    host.tree.path("/run/systemd/system").rmdir()
    refused = host.plan(UNIT_LAUNCH)
    assert [refusal.rule for refusal in refused.refusals] == ["no-systemd"]
    assert refused.steps == []


@pytest.mark.parametrize("launch", [UNIT_LAUNCH, CONTAINER])
def test_the_way_back_leaves_nothing(host: Host, launch: Launch) -> None:
    before = host.tree.snapshot()
    host.bring(replace(launch, environment=serving.sha256(SECRETS)), SECRETS)
    serving.note_proof(host.world)
    host.bring(None)
    assert {path: text for path, text in host.tree.snapshot().items() if path in before} == before
    assert (host.active, host.enabled, host.containers) == (False, False, {})
    assert not any(host.world.exists(path) for path in (UNIT_FILE, DROP_IN, STARTED, PROVEN))


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"profile": "x"}', '{"unheard": 1, "argv": []}'])
def test_a_note_that_cannot_be_read_proves_nothing(text: str | None) -> None:
    assert Launch.read(text) is None


@pytest.mark.parametrize("value", ["two words", "a\nb", 'with"quote', "with'quote", "back\\slash", "#comment"])
def test_values_that_systemd_and_the_engine_read_differently_are_refused_by_name(value: str) -> None:
    with pytest.raises(ValueError, match="HF_TOKEN") as wrong:
        serving.environment_text({"HF_TOKEN": value})
    assert value not in str(wrong.value)
    with pytest.raises(ValueError, match="no name"):
        serving.environment_text({"HF TOKEN": "x"})


def test_an_environment_file_is_sorted_so_that_order_is_no_change() -> None:
    assert serving.environment_text({"B": "2=3", "A": "1"}) == "A=1\nB=2=3\n"
    assert UNIT.endswith(".service")
