"""Curations that are killed, that meet another one, or whose disk says no: one sentence, and the same command again
leads to the same corpus."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from drafthouse.corpus import save_tokenizer
from drafthouse.corpus import tokenise as tokenising
from drafthouse.corpus.conversations import ConversationSet
from drafthouse.corpus.curate import curate
from drafthouse.corpus.curation import CurationSettings
from drafthouse.corpus.tokenise import tokenise
from drafthouse.errors import ConfigError, CorpusError, StoreError
from drafthouse.store import Store
from drafthouse.store.exclusive import exclusive
from tests.patience import until

SETTINGS: dict[str, Any] = {
    "name": "mix",
    "kinds": {"code": {}},
    "sources": [
        {
            "type": "files",
            "name": "code",
            "kind": "code",
            "licence": "MIT",
            "format": "alpaca",
            "paths": ["code.jsonl"],
        }
    ],
    "filters": {"near_duplicates": None},
    "heldout_one_in": 4,
    "samples_per_shard": 64,
}
# Does one step of the command line and is killed behind its n-th change of the store.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from drafthouse.corpus.curate import curate
from drafthouse.corpus.curation import CurationSettings
from drafthouse.store import Store

left = [int(sys.argv[1])]
def counted(real):
    def changed(*given):
        made = real(*given)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return made
    return changed
Store.put, Store.create = counted(Store.put), counted(Store.create)
folder = Path(sys.argv[2])
if sys.argv[3] == "tokenise":
    from drafthouse.corpus.tokenise import tokenise
    Store.delete = counted(Store.delete)
    tokenise(str(folder / "store"), "mix", "corpus", folder / "tokenizer", max_tokens=512, processes=1)
else:
    settings = CurationSettings.model_validate(json.loads(sys.argv[3]))
    curate(settings, str(folder / "store"), folder / "work", base=folder, processes=1)
"""


def write(folder: Path, first: int = 0) -> None:
    records = [{"instruction": f"What is {n}?", "output": f"It is {n}."} for n in range(first, first + 150)]
    (folder / "code.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def run(folder: Path, store: str = "store", work: str = "work", **more: Any) -> dict[Any, Any]:
    settings = CurationSettings.model_validate(SETTINGS)
    return curate(settings, str(folder / store), folder / work, base=folder, **{"processes": 1, **more})


def killed(after: int, folder: Path, what: str) -> int:
    """How a step ends that is killed behind so many changes: -9, or 0 where there are fewer."""
    words = [sys.executable, "-c", KILLED, str(after), str(folder), what]
    return subprocess.run(words, check=False, timeout=120).returncode


def objects(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


def test_a_curation_that_is_killed_anywhere_is_finished_by_the_same_command(data: Path) -> None:
    run(data, "whole")
    wanted = objects(data / "whole")
    for after in range(1, 10):
        ended = killed(after, data, json.dumps(SETTINGS))
        assert ended in (0, -signal.SIGKILL)
        made = run(data)
        assert objects(data / "store") == wanted, f"killed behind change {after}"
        assert made == run(data)
        if ended == 0:
            break
        shutil.rmtree(data / "store")
        shutil.rmtree(data / "work")
    assert after == 6, "behind two training shards, one held out and both manifests nothing is left to be killed at"


def test_what_a_killed_sealing_left_of_other_files_is_made_anew(data: Path) -> None:
    assert killed(4, data, json.dumps(SETTINGS)) == -signal.SIGKILL
    store = Store.open(str(data / "store"))
    left = ConversationSet(store, "mix-heldout").manifest
    with pytest.raises(CorpusError, match="there are no conversations of this name"):
        ConversationSet(store, "mix")
    write(data, first=1000)
    made = run(data)
    assert made["heldout"].digest != left.digest
    assert ConversationSet(store, "mix-heldout").manifest == made["heldout"]
    assert run(data) == made
    asked = [one.messages[0].content for name in ("mix", "mix-heldout") for one in whole(ConversationSet(store, name))]
    assert len(asked) == 150
    assert all("What is 1" in text and len(text) > len("What is 100?") for text in asked)


def test_a_held_out_set_that_is_gone_comes_back(data: Path) -> None:
    made = run(data)
    store = Store.open(str(data / "store"))
    store.child("mix-heldout").put("conversations.json", b"damaged")
    assert run(data) == made
    assert ConversationSet(store, "mix-heldout").manifest == made["heldout"]


@pytest.mark.parametrize("bytes_", [None, b"short"])
def test_a_shard_that_is_gone_or_cut_off_comes_back(data: Path, bytes_: bytes | None) -> None:
    made = run(data)
    there = objects(data / "store")
    for split, name in (("train", "mix"), ("heldout", "mix-heldout")):
        path = data / "store" / name / made[split].shards[-1].key
        path.unlink()
        if bytes_ is not None:
            path.write_bytes(bytes_)
        assert run(data) == made
        assert objects(data / "store") == there


def test_a_sealed_set_is_not_replaced_by_another_of_its_name(data: Path) -> None:
    run(data)
    there = objects(data / "store")
    write(data, first=1000)
    with pytest.raises(CorpusError, match="another corpus has this name already"):
        run(data)
    assert objects(data / "store") == there


def test_a_tokenisation_that_is_killed_anywhere_is_finished_by_the_same_command(
    data: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    save_tokenizer(tokenizer, data / "tokenizer")
    run(data)
    wanted = None
    for after in (99, 1, 2, 4, 5, 6):
        ended = killed(after, data, "tokenise")
        assert ended == (0 if after == 99 else -signal.SIGKILL)
        tokenise(str(data / "store"), "mix", "corpus", data / "tokenizer", max_tokens=512, processes=1)
        tokenising._here.clear()
        made = objects(data / "store" / "corpus")
        wanted = wanted or made
        assert made == wanted, f"killed behind change {after}"
        assert not [name for name in made if name.startswith("parts")]
        shutil.rmtree(data / "store" / "corpus")


def test_two_at_the_same_time_do_not_cut_off_each_others_pieces(data: Path) -> None:
    run(data, "whole", "elsewhere")
    (folder,) = (data / "elsewhere").iterdir()
    with (
        exclusive(folder, "curates"),
        pytest.raises(
            ConfigError, match=rf"{folder.name}: another process curates in this folder; wait for it, or stop it first"
        ),
    ):
        run(data, "second", "elsewhere")
    assert not (data / "second").exists()
    run(data, "second", "elsewhere")
    assert objects(data / "second") == objects(data / "whole")


def test_two_processes_in_one_folder(data: Path) -> None:
    run(data, "whole", "elsewhere")
    words = [sys.executable, "-c", KILLED, "0", str(data), json.dumps(SETTINGS)]
    both = [subprocess.Popen(words, stderr=subprocess.PIPE) for _ in range(2)]
    told = [one.communicate(timeout=120)[1].decode() for one in both]
    refused = [text for one, text in zip(both, told, strict=True) if one.returncode]
    assert len(refused) < 2, told
    assert all("another process curates in this folder" in text for text in refused)
    assert objects(data / "store") == objects(data / "whole")


def test_half_written_pieces_of_a_killed_process_are_removed(data: Path) -> None:
    run(data, "first")
    (folder,) = (data / "work").iterdir()
    for path in folder.glob("*.json"):
        path.write_text("{}", encoding="utf-8")  # a summary that says nothing makes no piece done
    (folder / "000000.jsonl.77.part").write_text("half", encoding="utf-8")
    run(data)
    assert objects(data / "store") == objects(data / "first")
    assert not list(folder.glob("*.part"))


def test_processes_end_with_the_one_that_started_them() -> None:
    program = (
        "import os, time\n"
        "from tests.unit.corpus.test_interrupted import its_process\n"
        "from drafthouse.corpus.workers import Workers\n"
        "if __name__ == '__main__':\n"
        "    with Workers(2) as workers:\n"
        "        found = workers.each(its_process, range(100))\n"
        "        print(next(found), flush=True)\n"
        "        time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    stat = Path(f"/proc/{worker}/stat")
    # Z: it has ended, and whoever adopted it has not asked yet.
    until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z", "the process' end")


def its_process(_: int) -> int:
    return os.getpid()


Disk = Callable[[str], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Makes a disk of its own: of so many bytes, or ("ro") one that cannot be written."""
    mounted = []

    def make(size: str) -> Path:
        target = tmp_path / f"disk-{len(mounted)}"
        target.mkdir()
        options = "ro" if size == "ro" else f"size={size}"
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(target)]
        if subprocess.run(words, capture_output=True, check=False).returncode:
            pytest.skip("mounting a small file system needs root")
        mounted.append(target)
        return target

    yield make
    for target in mounted:
        subprocess.run(["umount", str(target)], check=True)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_under_the_staging_folder(data: Path, disk: Disk, processes: int) -> None:
    small = disk("8k")
    with pytest.raises(StoreError, match=r"work/\w{16}: the disk is full; free space there") as caught:
        run(data, work=small.name + "/work", processes=processes)
    assert "\n" not in str(caught.value)
    assert not (data / "store").exists()
    assert objects(small) == {}, "what cannot be finished does not keep the disk full"


@pytest.mark.parametrize("size", ["4k", "8k", "12k"])
def test_a_full_disk_under_the_store(data: Path, disk: Disk, size: str) -> None:
    small = disk(size)
    with pytest.raises(StoreError, match="the disk is full; free space there"):
        run(data, small.name + "/store")
    left = objects(small)
    assert "store/mix/conversations.json" not in left
    assert not [name for name in left if "#" in name]


def test_a_disk_that_cannot_be_written(data: Path, disk: Disk) -> None:
    fixed = disk("ro")
    with pytest.raises(StoreError, match="the disk is read-only; choose a folder that can be written"):
        run(data, work=fixed.name + "/work")
    with pytest.raises(StoreError, match="the disk is read-only; choose a folder that can be written"):
        run(data, fixed.name + "/store")


def test_a_staging_folder_that_is_a_file(data: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot be used \(Not a directory\); choose another folder"):
        run(data, work="code.jsonl")
    assert not (data / "store").exists()


def whole(given: ConversationSet) -> list[Any]:
    return [one for shard in given.shard_names for one in given.shard(shard)]
