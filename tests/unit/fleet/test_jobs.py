"""Job files: what they mean, and what is told about one that is wrong."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from drafthouse.config import load, validate
from drafthouse.errors import ConfigError, FleetError
from drafthouse.fleet.inventory import Inventory
from drafthouse.fleet.jobs import Job, jobs
from drafthouse.fleet.node import Node
from drafthouse.loop.settings import RunSettings

EXAMPLE = Path(__file__).parents[3] / "inventory"
DIGEST = "sha256:" + "0123456789abcdef" * 4
HOSTS = ("ct129", "kpro5", "rented1", "depot")
LISTED = {
    "_meta": {"hostvars": {name: {"ansible_host": name, "fleet_store": "s3://records/fleet"} for name in HOSTS}},
    "all": {"children": ["rented"]},
    "rented": {"hosts": list(HOSTS)},
}
COMMAND = {"kind": "command", "venv": "/opt/v", "command": ["sleep", "1"]}
NASTY = [
    "$(touch x)",
    "`touch x`",
    "; touch x",
    "a'b\"c",
    "a\nb",
    "../../etc",
    "/etc",
    "a b",
    "*",
    "-n",
    "",
    "é",
    "a\0b",
    "~",
]


@pytest.fixture
def inventory(tmp_path: Path) -> Inventory:
    for name in ("jobs", "profiles"):
        shutil.copytree(EXAMPLE / name, tmp_path / name)
    return Inventory.of(tmp_path, LISTED, tmp_path / "known_hosts")


def write(inventory: Inventory, values: dict[str, Any], name: str = "job") -> Path:
    file = inventory.path / "jobs" / f"{name}.yml"
    file.write_text(yaml.safe_dump({"name": name, **values}, allow_unicode=True), encoding="utf-8")
    return file


def refused(inventory: Inventory, values: dict[str, Any]) -> str:
    with pytest.raises(FleetError) as caught:
        Job.load(write(inventory, values), inventory)
    sentence = str(caught.value)
    assert "job.yml" in sentence
    return sentence


def test_the_examples_are_jobs_that_can_be_launched(inventory: Inventory) -> None:
    found = jobs(inventory)
    assert {job.kind for job in found.values()} == {"extract", "train", "serve", "command"}
    for name, job in found.items():
        assert job.name == name
        node = inventory.node(job.node or "")
        launch = job.launch(2, node, job.secret_values(dict.fromkeys(job.secrets, "value")))
        assert launch.unit == f"drafthouse-{name}-e2"
        assert set(launch.secrets) == set(job.secrets)
        assert launch.argv
    extract, train = found["extract-qwen"], found["train-qwen"]
    run_file = load(RunSettings, inventory.path / "jobs/qwen/run.yml")
    assert extract.store == train.store == run_file.store
    assert train.recipe in run_file.train
    assert yaml.safe_load(train.launch(1, inventory.node("kpro5"), dict.fromkeys(train.secrets, "")).files["run.yml"])


def test_a_served_job_runs_the_launch_line_of_its_profile_with_its_own_address(inventory: Inventory) -> None:
    job = Job.load(inventory.path / "jobs/serve-qwen.yml", inventory)
    launch = job.launch(1, inventory.node("ct129"), {})
    line = shlex.join(launch.argv)
    assert "sglang.launch_server" in line
    assert "--host 0.0.0.0 --port 30000" in line
    assert launch.ports == (30000,) == (job.serving_port(),)
    assert launch.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert job.serving_profile().speculation.method == "dflash"
    moved = job.model_copy(update={"port": 30001})
    assert moved.serving_port() == 30001
    assert "--port 30001" in shlex.join(moved.launch(1, inventory.node("ct129"), {}).argv)


def test_a_job_that_was_kept_is_the_same_without_its_files(inventory: Inventory) -> None:
    before = jobs(inventory)
    kept = {name: json.loads(json.dumps(job.model_dump(mode="json"))) for name, job in before.items()}
    shutil.rmtree(inventory.path / "profiles")
    shutil.rmtree(inventory.path / "jobs")
    for name, values in kept.items():
        again = Job.model_validate(values)
        assert again == before[name]
        assert again.digest() == before[name].digest()
        secrets = dict.fromkeys(again.secrets, "s")
        node = Node("n", "h")
        assert again.launch(1, node, secrets) == before[name].launch(1, node, secrets)


def test_the_digest_follows_files_and_profile(inventory: Inventory) -> None:
    train, serve = inventory.path / "jobs/train-qwen.yml", inventory.path / "jobs/serve-qwen.yml"
    before = Job.load(train, inventory).digest(), Job.load(serve, inventory).digest()
    assert before == (Job.load(train, inventory).digest(), Job.load(serve, inventory).digest())
    run_file = inventory.path / "jobs/qwen/run.yml"
    run_file.write_text(run_file.read_text().replace("steps: 20000", "steps: 20001"))
    profile = inventory.path / "profiles/qwen3.6-27b-dflash-a6000x2.yml"
    profile.write_text(profile.read_text().replace("context_length: 131072", "context_length: 65536"))
    after = Job.load(train, inventory).digest(), Job.load(serve, inventory).digest()
    assert after[0] != before[0]
    assert after[1] != before[1]


def test_the_store_is_the_fleets_unless_the_job_says_otherwise(inventory: Inventory) -> None:
    assert Job.load(write(inventory, COMMAND), inventory).store == "s3://records/fleet"
    assert (
        Job.load(write(inventory, {**COMMAND, "store": "file:///mnt/shared"}), inventory).store == "file:///mnt/shared"
    )
    assert Job.load(write(inventory, {**COMMAND, "store": None}), inventory).store is None
    assert "'store': a job of kind extract keeps its work" in refused(
        inventory, {**COMMAND, "kind": "extract", "store": None}
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"comand": ["x"]}, "unknown key 'comand' (known here: "),
        ({"contents": {"a": "b"}}, "unknown key 'contents'"),
        ({"profile_values": {}}, "unknown key 'profile_values'"),
        ({"kind": "batch"}, "'kind': "),
        ({"command": "sleep 1"}, "'command': is a text, and no shell is there"),
        ({"command": []}, "'command' is missing"),
        ({"image": DIGEST}, "exactly one of 'image' (a container) and 'venv'"),
        ({"venv": None}, "exactly one of 'image' (a container) and 'venv'"),
        ({"venv": "opt/v"}, "'venv': 'opt/v' is no absolute path"),
        ({"venv": "/opt/../etc"}, "'venv': '/opt/../etc' is no absolute path"),
        ({"mounts": {"/a": "/b"}}, "'mounts' and 'shm_gib' are for containers"),
        ({"profile": "x"}, "'profile' is for jobs of kind serve"),
        ({"port": 1}, "'port' is for jobs of kind serve"),
        ({"kind": "train"}, "jobs of kind train have a 'recipe'"),
        ({"recipe": "ours"}, "jobs of kind train have a 'recipe', and no others"),
        ({"kind": "serve"}, "a job of kind serve has a 'profile'"),
        ({"gpus": -1}, "'gpus': -1 is no number of GPUs from 0 to 64"),
        ({"gpus": [0, 0]}, "'gpus': names one GPU twice"),
        ({"gpus": ["0,1"]}, "'gpus': '0,1' is neither the index nor the UUID"),
        ({"gpus": True}, "'gpus': is neither a number of GPUs nor a list"),
        ({"env": {"A": "1"}, "secrets": ["A"]}, "'A' stands in 'env' and in 'secrets'"),
        ({"env": {"DRAFTHOUSE_EPOCH": "7"}}, "'DRAFTHOUSE_EPOCH' is set by the fleet itself"),
        ({"env": {"A": 1}}, "'env.A': "),
        ({"secrets": "TOKEN"}, "'secrets': "),
        ({"store": "s3://key:secret@bucket/x"}, "'store': holds credentials"),
        ({"needs": {"python": 3.11}}, "'needs.python': "),
        ({"needs": {"disk": 1}}, "unknown key 'needs.disk' (known here: "),
        ({"needs": {"peers": {"nobody": 22}}}, "'needs.peers': there is no node 'nobody'"),
        ({"node": "rented2"}, "'node': there is no node 'rented2'; did you mean rented1"),
        ({"gate": {"timeout_s": 0}}, "'gate.timeout_s': "),
        ({"restart": "sometimes"}, "'restart': "),
        ({"files": {"a": "nowhere"}}, "'files': nowhere cannot be read (No such file"),
        ({"files": {"a": "jobs"}}, "'files': jobs cannot be read (Is a directory"),
        ({"name": "other"}, "'name': the job calls itself 'other'; name it 'job'"),
    ],
)
def test_a_wrong_job_is_told_with_file_and_key(inventory: Inventory, change: dict[str, Any], sentence: str) -> None:
    assert sentence in refused(inventory, {**COMMAND, **change})


def test_a_tag_is_refused_with_the_way_to_a_digest(inventory: Inventory) -> None:
    container = {"kind": "command", "command": ["true"]}
    for image in ("drafthouse/train:0.1.0", "train", f"{DIGEST}0", "a@sha256:1234", f"$(x)@{DIGEST}", f"a\n@{DIGEST}"):
        assert "docker image inspect" in refused(inventory, {**container, "image": image})
    for image in (DIGEST, f"drafthouse/train@{DIGEST}", f"registry.example:5000/a/b:tag@{DIGEST}"):
        job = Job.load(write(inventory, {**container, "image": image}), inventory)
        assert (job.image, job.runtime) == (image, "docker")


def test_a_file_of_a_job_lies_in_the_inventory_and_is_small_text(inventory: Inventory, tmp_path: Path) -> None:
    outside = tmp_path.parent / "outside.txt"
    outside.write_text("not yours")
    (inventory.path / "link").symlink_to(outside)
    (inventory.path / "binary").write_bytes(b"\xff\xfe")
    (inventory.path / "large").write_bytes(b"x" * ((1 << 20) + 1))
    assert "link lies outside of" in refused(inventory, {**COMMAND, "files": {"a": "link"}})
    assert "binary is not text" in refused(inventory, {**COMMAND, "files": {"a": "binary"}})
    assert "large is larger than 1 MiB" in refused(inventory, {**COMMAND, "files": {"a": "large"}})
    for path in ("../outside.txt", "/etc/passwd", "jobs/../../outside.txt", "", "a//b"):
        assert "is no relative path" in refused(inventory, {**COMMAND, "files": {"a": path}})
        assert "is no relative path" in refused(inventory, {**COMMAND, "files": {path: "jobs/qwen/run.yml"}})


def test_an_unknown_profile_is_told_by_the_profiles_own_sentence(inventory: Inventory) -> None:
    served = {"kind": "serve", "image": DIGEST}
    with pytest.raises(FleetError, match=r"no profile of that name; did you mean 'qwen3.6-27b-mtp-a6000x2'"):
        Job.load(write(inventory, {**served, "profile": "qwen3.6-27b-mtp-a6000"}), inventory)
    assert "'profile': " in refused(inventory, {**served, "profile": "../jobs/serve-qwen"})


@pytest.mark.parametrize("text", NASTY)
def test_names_are_refused_by_their_alphabet(inventory: Inventory, text: str) -> None:
    proxy = {"node": "depot", "admin": "/run/a.sock", "backend": "b", "servers": {"ct129": "s"}}
    served = {"kind": "serve", "image": DIGEST, "profile": "embedded-dflash-cpu"}
    cases: list[dict[str, Any]] = [
        {**COMMAND, "name": text},
        {**COMMAND, "node": text},
        {**COMMAND, "run": text},
        {**COMMAND, "env": {text: "x"}},
        {**COMMAND, "secrets": [text]},
        {**COMMAND, "gpus": [text]},
        {**COMMAND, "needs": {"driver": text}},
        {**COMMAND, "kind": "train", "recipe": text},
        {**COMMAND, "needs": {"peers": {text: 1}}},
        {**served, "profile": text},
        {**served, "host": text},
        *({**served, "proxy": {**proxy, key: text}} for key in ("node", "backend")),
        {**served, "proxy": {**proxy, "servers": {"ct129": text}}},
        {**served, "proxy": {**proxy, "servers": {text: "s"}}},
    ]
    for values in cases:
        assert "\n" not in refused(inventory, values)
    if text != "/etc":
        refused(inventory, {**served, "proxy": {**proxy, "admin": text}})


def test_a_job_whose_file_name_is_no_name_is_refused(inventory: Inventory) -> None:
    with pytest.raises(FleetError, match="'name'"):
        Job.load(write(inventory, COMMAND, "Two Words"), inventory)


@given(text=st.text(max_size=40) | st.sampled_from(NASTY), where=st.sampled_from(["command", "env", "contents"]))
def test_free_text_is_carried_to_the_launch_as_it_is(text: str, where: str) -> None:
    values: dict[str, Any] = {"name": "job", **COMMAND}
    values |= {"command": ["echo", text]} if where == "command" else {where: {"key": text}}
    if "\0" in text:
        with pytest.raises(ConfigError, match="NUL"):
            validate(Job, values, "job.yml")
        return
    job = validate(Job, values, "job.yml")
    launch = Job.model_validate(json.loads(json.dumps(job.model_dump(mode="json")))).launch(1, Node("n", "h"), {})
    carried = {"command": launch.argv[-1], "env": launch.env.get("key"), "contents": launch.files.get("key")}
    assert carried[where] == text


def test_secrets_come_from_the_environment_and_all_missing_ones_are_named(inventory: Inventory) -> None:
    job = Job.load(write(inventory, {**COMMAND, "secrets": ["ONE", "TWO", "THREE"]}), inventory)
    with pytest.raises(FleetError, match=r"job job, secrets: no value for ONE, THREE; set it in the environment"):
        job.secret_values({"TWO": "2", "ONE": ""})
    launch = job.launch(1, inventory.node("ct129"), job.secret_values({"ONE": "1", "TWO": "2", "THREE": "3", "X": "4"}))
    assert launch.secrets == {"ONE": "1", "TWO": "2", "THREE": "3"}
    assert "'3'" not in repr(launch)


def test_more_gpus_than_the_inventory_gives_are_refused() -> None:
    job = validate(Job, {"name": "job", **COMMAND, "gpus": ["0", "GPU-1a2b"]}, "job.yml")
    assert job.launch(1, Node("n", "h", gpu_count=2), {}).gpus == ("0", "GPU-1a2b")
    assert job.launch(1, Node("n", "h"), {}).gpus == ("0", "GPU-1a2b")
    with pytest.raises(FleetError, match=r"'gpus': it wants 2 and n has 1"):
        job.launch(1, Node("n", "h", gpu_count=1), {})


def test_a_list_of_numbers_means_these_gpus_and_a_number_how_many() -> None:
    def gpus(value: Any) -> Any:
        return validate(Job, {"name": "job", **COMMAND, "gpus": value}, "job.yml").gpus

    assert gpus(2) == 2
    assert gpus([2]) == ("2",)
    assert gpus([]) == ()
    with pytest.raises(ConfigError):
        gpus(True)


def test_a_broken_file_is_named_among_the_others(inventory: Inventory) -> None:
    (inventory.path / "jobs/broken.yml").write_text("name: [unclosed")
    with pytest.raises(FleetError, match=r"broken\.yml: not valid YAML"):
        jobs(inventory)


def test_only_a_served_job_has_a_profile() -> None:
    with pytest.raises(FleetError, match="a job of kind command has no profile"):
        validate(Job, {"name": "job", **COMMAND}, "job.yml").serving_port()
