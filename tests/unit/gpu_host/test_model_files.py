"""A model on a host: resumed, verified, quarantined, refused before the first byte; with curl against real servers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drafthouse.store import Store
from gpu_host.apply import apply
from gpu_host.model_files import (
    PARTIAL,
    QUARANTINE,
    RECORD,
    Found,
    ModelDesired,
    ModelFacts,
    ModelFile,
    handlers,
    look,
    parse_manifest,
    plan,
)
from gpu_host.steps import ApplyError
from gpu_host.world import World
from tests.doubles.files_server import Behaviour, files_server
from tests.fixtures_s3 import s3_url

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
CONFIG = b'{"architectures": ["Qwen3_5ForCausalLM"]}'
CONTENT = {"model-00001.safetensors": WEIGHTS, "sub/config.json": CONFIG}


def entry(path: str, data: bytes) -> ModelFile:
    return ModelFile(path, len(data), hashlib.sha256(data).hexdigest())


FILES = tuple(entry(path, data) for path, data in CONTENT.items())


def desired_of(root: Path, source: str, **changes: Any) -> ModelDesired:
    values = {"files": FILES, "keep_free": 0, "stall_s": 1, "attempts": 2}
    return ModelDesired(root=str(root), name="target", revision="r1", source=source, **{**values, **changes})


def bring(desired: ModelDesired) -> list[str]:
    world = World()
    made = plan(look(world, desired), desired)
    assert not made.refused, made.refusal_text()
    done = apply(made, world, handlers(desired))
    left = plan(look(world, desired), desired)
    assert left.steps == []
    assert left.refusals == []
    return done


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != RECORD}


def test_a_model_arrives_and_a_second_plan_is_empty(tmp_path: Path) -> None:
    server = Behaviour(dict(CONTENT))
    with files_server(server) as url:
        desired = desired_of(tmp_path, url)
        bring(desired)
        asked = len(server.requests)
        assert plan(look(World(), desired), desired).steps == []
        assert len(server.requests) == asked
    assert files_in(tmp_path / "target/r1") == CONTENT


def test_a_transfer_that_breaks_off_goes_on_where_it_ended(tmp_path: Path) -> None:
    server = Behaviour({"model-00001.safetensors": WEIGHTS}, break_after=300_000, breaks=3)
    with files_server(server) as url:
        bring(desired_of(tmp_path, url, files=FILES[:1]))
    assert [first for _, first, _ in server.requests] == [0, 300_000, 600_000, 900_000]
    assert files_in(tmp_path / "target/r1") == {"model-00001.safetensors": WEIGHTS}


def test_a_stalled_transfer_is_broken_off_and_taken_up(tmp_path: Path) -> None:
    server = Behaviour({"model-00001.safetensors": WEIGHTS}, break_after=300_000, breaks=1, stall_s=20)
    with files_server(server) as url:
        bring(desired_of(tmp_path, url, files=FILES[:1], stall_bytes_per_s=1000))
    assert [first for _, first, _ in server.requests] == [0, 300_000]


def test_a_download_of_an_earlier_run_is_resumed(tmp_path: Path) -> None:
    partial = tmp_path / "target/r1" / PARTIAL / "model-00001.safetensors"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(WEIGHTS[:1000])
    server = Behaviour({"model-00001.safetensors": WEIGHTS})
    with files_server(server) as url:
        desired = desired_of(tmp_path, url, files=FILES[:1])
        assert "1047576 of 1048576 bytes are missing" in plan(look(World(), desired), desired).steps[0].why
        bring(desired)
    assert [first for _, first, _ in server.requests] == [1000]
    assert not partial.parent.exists()


def test_a_server_without_ranges_sends_the_whole_file_again(tmp_path: Path) -> None:
    server = Behaviour({"model-00001.safetensors": WEIGHTS}, break_after=300_000, breaks=1, ranges=False)
    with files_server(server) as url:
        bring(desired_of(tmp_path, url, files=FILES[:1]))
    assert files_in(tmp_path / "target/r1") == {"model-00001.safetensors": WEIGHTS}


def test_a_source_that_only_breaks_off_ends_with_what_is_kept(tmp_path: Path) -> None:
    server = Behaviour({"model-00001.safetensors": WEIGHTS}, break_after=0, breaks=1000)
    with files_server(server) as url:
        desired = desired_of(tmp_path, url, files=FILES[:1])
        with pytest.raises(ApplyError, match=r"0 of 1048576 bytes are kept, run again"):
            apply(plan(look(World(), desired), desired), World(), handlers(desired))
    assert len(server.requests) == 2  # attempts


def test_bytes_with_a_wrong_hash_never_get_their_place(tmp_path: Path) -> None:
    server = Behaviour({"model-00001.safetensors": WEIGHTS[:-1] + b"x"})
    with files_server(server) as url:
        desired = desired_of(tmp_path, url, files=FILES[:1])
        with pytest.raises(ApplyError, match=r"its sha256 is \w+ and not"):
            apply(plan(look(World(), desired), desired), World(), handlers(desired))
        folder = tmp_path / "target/r1"
        assert not (folder / "model-00001.safetensors").exists()
        assert len(list((folder / QUARANTINE).iterdir())) == 1
        server.files = {"model-00001.safetensors": WEIGHTS}
        bring(desired)


def test_a_file_that_rotted_is_quarantined_and_fetched_anew(tmp_path: Path) -> None:
    server = Behaviour(dict(CONTENT))
    with files_server(server) as url:
        desired = desired_of(tmp_path, url)
        bring(desired)
        shard = tmp_path / "target/r1/model-00001.safetensors"
        shard.write_bytes(b"rotten" + WEIGHTS[6:])
        done = bring(desired)
    assert [sentence.split()[0] for sentence in done] == ["quarantine", "fetch", "record"]
    assert shard.read_bytes() == WEIGHTS
    kept = list((tmp_path / "target/r1" / QUARANTINE).iterdir())
    assert [path.read_bytes()[:6] for path in kept] == [b"rotten"]


def test_a_rot_behind_the_records_back_is_found_when_asked(tmp_path: Path) -> None:
    server = Behaviour(dict(CONTENT))
    with files_server(server) as url:
        desired = desired_of(tmp_path, url)
        bring(desired)
    shard = tmp_path / "target/r1/model-00001.safetensors"
    times = shard.stat()
    shard.write_bytes(b"rotten" + WEIGHTS[6:])
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert plan(look(World(), desired), desired).steps == []
    again = desired_of(tmp_path, url, rehash=True)
    assert [step.action for step in plan(look(World(), again), again).steps] == ["quarantine", "fetch", "record"]


def test_a_folder_is_a_source(tmp_path: Path) -> None:
    source = tmp_path / "disk"
    for path, data in CONTENT.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(data)
    bring(desired_of(tmp_path / "store", str(source)))
    assert files_in(tmp_path / "store/target/r1") == CONTENT


def test_a_folder_that_lacks_a_file_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "disk"
    source.mkdir()
    (source / "model-00001.safetensors").write_bytes(WEIGHTS)
    desired = desired_of(tmp_path / "store", str(source))
    refused = plan(look(World(), desired), desired)
    assert [r.rule for r in refused.refusals] == ["source-incomplete"]
    assert "first sub/config.json" in refused.refusals[0].what


def test_removal_takes_the_whole_folder(tmp_path: Path) -> None:
    with files_server(Behaviour(dict(CONTENT))) as url:
        bring(desired_of(tmp_path, url))
    absent = desired_of(tmp_path, "", files=(), absent=True)
    apply(plan(look(World(), absent), absent), World(), handlers(absent))
    assert not (tmp_path / "target/r1").exists()
    assert plan(look(World(), absent), absent).steps == []


def test_removal_takes_a_download_that_was_broken_off(tmp_path: Path) -> None:
    partial = tmp_path / "target/r1" / PARTIAL / "model-00001.safetensors"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(WEIGHTS[:1000])
    absent = desired_of(tmp_path, "", files=(), absent=True)
    apply(plan(look(World(), absent), absent), World(), handlers(absent))
    assert not (tmp_path / "target/r1").exists()


def test_credentials_stay_out_of_the_list_of_processes(tmp_path: Path) -> None:
    server = Behaviour({"bucket/m/model-00001.safetensors": WEIGHTS})
    seen: list[list[str]] = []

    class Watched(World):
        def run(self, argv: Any, timeout_s: float = 60.0, stdin: str | None = None) -> Any:
            seen.append(list(argv))
            return super().run(argv, timeout_s, stdin)

    with files_server(server) as url:
        desired = desired_of(
            tmp_path, "s3://bucket/m", files=FILES[:1], endpoint=url, access_key="AKIDEXAMPLE", secret_key='s"e\\c'
        )
        apply(plan(look(Watched(), desired), desired), Watched(), handlers(desired))
    assert all('s"e' not in word and "AKID" not in word for argv in seen for word in argv)
    assert server.requests[0][2].startswith("AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/")


def facts(**changes: Any) -> ModelFacts:
    return ModelFacts(free=10**12, curl="7.88.1", **changes)


def test_a_disk_that_would_be_too_full_is_refused_with_the_figures() -> None:
    desired = ModelDesired("/models", "m", "r", "https://x.example", (ModelFile("a", 54 * 10**9, "0" * 64),))
    poor = facts()
    poor.free = 60 * 10**9
    refusal = plan(poor, desired).refusals[0]
    assert refusal.rule == "no-space"
    assert "54.0 GB are missing" in refusal.what
    assert "60.0 GB are free" in refusal.what
    resumed = facts(partial={"a": 30 * 10**9})
    resumed.free = 60 * 10**9
    assert plan(resumed, desired).refusals == []


def test_a_complete_model_is_not_refused_for_a_full_disk() -> None:
    file = ModelFile("a", 5, "0" * 64)
    full = facts(files={"a": Found(5, 1, "0" * 64)}, record="{}", recorded="{}")
    full.free = 0
    assert plan(full, ModelDesired("/models", "m", "r", "https://x.example", (file,))).refusals == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "names no file"),
        ("abc 5 a", ":1: not `<sha256> <size"),
        (f"{'0' * 64} five a", ":1: not `<sha256>"),
        (f"{'g' * 64} 5 a", "is no sha256"),
        (f"{'0' * 64} 5 ../a", "leaves the model's folder"),
        (f"{'0' * 64} 5 /etc/passwd", "leaves the model's folder"),
        (f"{'0' * 64} 5 .partial/a", "hides in it"),
        (f"{'0' * 64} 5 a\n{'1' * 64} 5 a", ":2: 'a' stands twice"),
    ],
)
def test_a_manifest_that_is_wrong_is_told_with_its_line(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what.replace("<", ".").replace("`", ".")) as caught:
        parse_manifest(text, "qwen.manifest")
    assert str(caught.value).startswith("qwen.manifest")


def test_a_manifest_keeps_names_with_spaces_and_comments() -> None:
    files = parse_manifest(f"# made today\n{'0' * 64} 5 a b.json\n\n", "m")
    assert files == (ModelFile("a b.json", 5, "0" * 64),)


@pytest.mark.s3
def test_a_model_arrives_from_a_real_s3_server(tmp_path: Path, seaweed: str) -> None:
    url = s3_url(seaweed)
    store = Store.open(url)
    for path, data in CONTENT.items():
        store.put(path, data)
    keys = {"access_key": os.environ["AWS_ACCESS_KEY_ID"], "secret_key": os.environ["AWS_SECRET_ACCESS_KEY"]}
    bring(desired_of(tmp_path, url.partition("?")[0], endpoint=seaweed, **keys))
    assert files_in(tmp_path / "target/r1") == CONTENT


def test_the_module_resumes_verifies_and_shows_its_plan(tmp_path: Path) -> None:
    """Through Ansible itself: check mode writes nothing, the first run changes, the second does not."""
    server = Behaviour(dict(CONTENT))
    ansible = Path(__file__).parents[3] / "ansible"
    manifest = "\n".join(f"{f.sha256} {f.size} {f.path}" for f in FILES)
    with files_server(server) as url:
        arguments = {
            "root": str(tmp_path / "store"),
            "name": "target",
            "source": url,
            "manifest": manifest,
            "keep_free": 0,
        }

        def call(*options: str) -> dict[str, Any]:
            done = subprocess.run(
                [
                    "ansible",
                    "-i",
                    "localhost,",
                    "-c",
                    "local",
                    "localhost",
                    "-e",
                    f"ansible_python_interpreter={sys.executable}",
                    "-m",
                    "model_store",
                    "-a",
                    json.dumps(arguments),
                    *options,
                ],
                cwd=ansible,
                env={
                    **os.environ,
                    "ANSIBLE_LOAD_CALLBACK_PLUGINS": "1",
                    "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
                },
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            return json.loads(done.stdout)["plays"][0]["tasks"][0]["hosts"]["localhost"]

        shown = call("--check")
        assert shown["changed"] is True
        assert [step["action"] for step in shown["plan"]["steps"]] == ["fetch", "fetch", "record"]
        assert not (tmp_path / "store").exists()
        assert call()["changed"] is True
        assert call()["changed"] is False
    assert files_in(tmp_path / "store/target/main") == CONTENT
