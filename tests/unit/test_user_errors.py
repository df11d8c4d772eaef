"""The ten errors that a user will make, as a shell sees them: exit code 2, one sentence on standard error that
names what, where and what to do, no traceback, and nothing half-written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from drafthouse.loop.tiny import embedded_target
from tests.command_line import drafthouse, files_of
from tests.doubles.s3_server import S3Double, s3_double
from tests.loop_run import RUN_FILE

# What the lease protocol leaves, each object whole: who works on what, and what the run is.
LEASES = ("*/lease/*", "*/hb/*", "*/failed/*", "*/workers/*", "*/.clock", "*/spec.json")
# Renders what a turn says and leaves out what it calls; no end of turn either.
TALKS_ONLY = "{%- for m in messages -%}{{ m.role + ':' + m.content }}{%- endfor -%}"


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where unfinished shards go; empty again after every test."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.glob("drafthouse-*")) == []


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """The folder of a run that is not there yet."""
    return tmp_path / "new"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A run file without a mistake."""
    path = tmp_path / "mine.yml"
    path.write_text(RUN_FILE, encoding="utf-8")
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A model folder of one's own, the same model as the package's."""
    return Path(shutil.copytree(embedded_target(), tmp_path / "model"))


def refused(*words: str | Path) -> str:
    """The sentence of a command that must be refused."""
    sentence = drafthouse(*words, "--json").sentence
    assert "; " in sentence, "it says what to do"
    assert "Traceback" not in sentence
    return sentence


def refused_unchanged(folder: Path, *words: str | Path, new: tuple[str, ...] = LEASES) -> str:
    """The same, of a command that changes no file below `folder` and adds none but those of `new`."""
    before = files_of(folder)
    sentence = refused(*words)
    after = files_of(folder)
    assert {name: after.get(name) for name in before} == before
    added = [name for name in after.keys() - before.keys() if not any(fnmatch(name, pattern) for pattern in new)]
    assert added == []
    return sentence


def flip(path: Path, place: float = 0.7) -> None:
    """Change one bit, `place` of the way through the file."""
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 16
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


class TestTokenizerWithoutTemplate:
    @pytest.mark.parametrize("verb", ["corpus build", "demo"])
    def test_it_is_refused_before_anything_is_written(self, verb: str, target: Path, file: Path, new: Path) -> None:
        (target / "chat_template.jinja").unlink()
        said = refused(*verb.split(), "--out", new, "--file", file, "--set", f"target.path={target}")
        assert said == (
            f"{target}: the tokenizer has no chat template; give one in chat_template.jinja beside tokenizer.json"
        )
        assert not new.exists()


class TestEmptyMask:
    def test_a_template_that_leaves_tool_calls_out(self, target: Path, file: Path, new: Path) -> None:
        (target / "chat_template.jinja").write_text(TALKS_ONLY, encoding="utf-8")
        said = refused("corpus", "build", "--out", new, "--file", file, "--set", f"target.path={target}")
        assert re.fullmatch(
            r"tool_call-\S+: no assistant tokens: the mask of this conversation is empty; the chat template renders its"
            r" assistant turns as nothing; use another template",
            said,
        )
        assert list(files_of(new)) == ["run.yml"]


class TestLayerOutOfRange:
    @pytest.mark.parametrize("verb", ["corpus build", "demo"])
    def test_it_is_refused_before_anything_is_written(self, verb: str, file: Path, new: Path) -> None:
        said = refused(*verb.split(), "--out", new, "--file", file, "--set", "drafter.target_layer_ids=[0, 9]")
        assert said == (
            "drafter: target_layer_ids [9] are out of range: the target has layers 0 to 3;"
            " change the drafter section of the run file"
        )
        assert not new.exists()

    def test_a_run_file_that_was_changed_later(self, run: Path) -> None:
        shutil.rmtree(run / "store/runs/states")
        text = (run / "run.yml").read_text(encoding="utf-8")
        (run / "run.yml").write_text(text.replace("  - 2\n", "  - 4\n"), encoding="utf-8")
        assert "target_layer_ids [4] are out of range" in refused_unchanged(run, "states", "extract", "--out", run)

    def test_a_demo_that_cannot_work_keeps_the_earlier_run(self, run: Path, file: Path) -> None:
        words = ("demo", "--out", run, "--file", file, "--set", "drafter.target_layer_ids=[4]")
        assert "out of range" in refused_unchanged(run, *words, new=())


class TestDrafterOfAnotherTarget:
    @pytest.fixture
    def stranger(self, run: Path) -> Path:
        folder = run / "drafters/ours/drafter"
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["drafthouse"]["target_identity"] = "f" * 64
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder

    def test_check(self, stranger: Path, run: Path) -> None:
        said = refused_unchanged(run, "drafter", "check", stranger, "--target", "embedded", new=())
        assert re.fullmatch(
            rf"{stranger}: drafter of another target: its identity is f{{12}}, this target's is [0-9a-f]{{12}};"
            r" train or fetch the drafter of this target",
            said,
        )

    def test_evaluate(self, stranger: Path, run: Path) -> None:
        said = refused_unchanged(run, "evaluate", "--out", run, "--drafter", "ours", new=())
        assert said.startswith(f"{stranger}: drafter of another target")


class TestRunFile:
    @pytest.mark.parametrize(
        ("wrong", "sentence"),
        [
            ("samples: 48 -> sample: 48", "unknown key 'corpus.sample' (known here: heldout, max_tokens, samples, "),
            ("soft_weight -> softweight", "unknown key 'train.ours.loss.softweight' (known here: "),
            ("steps: 12 -> steps: twelve", "'train.baseline.steps': should be a valid integer"),
            ("kind: cosine -> kind: linear", "'train.ours.noise.kind': should be 'none', 'constant' or 'cosine'"),
            ("kind: lookup -> kind: poem", "'corpus.sources.0.grammar.kind': should be "),
            ("rows: 6 -> rows: 0", "'answers.rows': should be greater than or equal to 1"),
            ("block_size: 4 -> block_size: 16", "evaluate.budget 8 cannot hold the spine of drafter.block_size 16"),
            ("max_new_tokens: 24 -> max_new_tokens: 990", "extract.max_tokens 1024 would cut answers"),
            ("  ours: -> theirs:", "train lacks the recipe 'ours', which reports compare"),
            ("name: small -> name: [small", "not valid YAML ("),
        ],
    )
    def test_one_sentence_with_the_path_of_the_key(self, wrong: str, sentence: str, file: Path, new: Path) -> None:
        right, _, mistake = wrong.partition(" -> ")
        text = file.read_text(encoding="utf-8")
        assert right in text
        file.write_text(text.replace(right, "  " * right.startswith("  ") + mistake, 1), encoding="utf-8")
        said = refused("demo", "--out", new, "--file", file)
        assert said.startswith(f"{file}: ")
        assert sentence in said
        assert not new.exists()

    @pytest.mark.parametrize(
        ("override", "sentence"),
        [
            ("corpus.sample=3", "unknown key 'corpus.sample' (known here: "),
            ("corpus.samples=many", "'corpus.samples': should be a valid integer"),
            ("corpus.samples", "--set: 'corpus.samples' is not of the form key.path=value; write it so"),
            ("=3", "--set: '=3' is not of the form key.path=value; write it so"),
            ("corpus.samples=[1", "--set: the value of 'corpus.samples' is not YAML; quote it"),
            ("corpus.samples.x=3", "--set: 'corpus.samples.x' goes through 'samples', which holds a value"),
            ("corpus=3", "'corpus': should be a valid dictionary"),
            ("train.a/b.steps=3", "'train.a/b.[key]': string should match pattern"),
        ],
    )
    def test_set(self, override: str, sentence: str, file: Path, new: Path) -> None:
        said = drafthouse("corpus", "build", "--out", new, "--file", file, "--set", override).sentence
        assert sentence in said
        assert not new.exists()

    @pytest.mark.parametrize(
        ("path", "sentence"),
        [("nowhere.yml", "there is no such run file; check the path"), (".", "cannot be read (Is a directory)")],
    )
    def test_no_file(self, path: str, sentence: str, tmp_path: Path, new: Path) -> None:
        said = refused("corpus", "build", "--out", new, "--file", tmp_path / path)
        assert said.startswith(f"{tmp_path / path}: {sentence}")
        assert not new.exists()


class TestStoreThatIgnoresConditionalPuts:
    SENTENCE = (
        "this store ignores conditional puts, so two workers would both win a lease; use a store that honours"
        " If-None-Match (AWS, R2, MinIO, Ceph, SeaweedFS)"
    )

    @pytest.fixture
    def lying(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Double]:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with s3_double() as double:
            double.faults.ignore_conditions = True
            yield double

    def test_probe(self, lying: S3Double) -> None:
        said = refused("store", "probe", f"s3://bucket/mine?endpoint={lying.endpoint}")
        assert said == f"s3://bucket/mine: {self.SENTENCE}"
        assert lying.objects == {}

    def test_no_worker_starts_on_it(self, lying: S3Double, file: Path, new: Path) -> None:
        store = f"store=s3://bucket/mine?endpoint={lying.endpoint}"
        assert drafthouse("corpus", "build", "--out", new, "--file", file, "--set", store).code == 0
        before = dict(lying.objects)
        assert refused("corpus", "answer", "--out", new) == f"s3://bucket/mine: {self.SENTENCE}"
        for name, data in before.items():  # as if the corpus had been answered elsewhere and copied here
            lying.objects[name.replace("/corpus/", "/answers/")] = data
        assert refused("states", "extract", "--out", new) == f"s3://bucket/mine: {self.SENTENCE}"
        assert not [name for name in lying.objects if "/runs/" in name]


class TestDiskFull:
    @pytest.fixture
    def small_disk(self, tmp_path: Path) -> Iterator[Path]:
        """16 KiB: less than one shard."""
        folder = tmp_path / "disk"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)]
        if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("mounting a small file system needs root")
        yield folder
        subprocess.run(["umount", str(folder)], check=True)

    FIX = "the disk is full; free space there and start again: done shards are kept"

    def test_corpus_shard(self, small_disk: Path, file: Path, new: Path) -> None:
        many = ("--set", "corpus.samples_per_shard=48")
        said = refused("corpus", "build", "--out", new, "--file", file, "--set", f"store={small_disk}", *many)
        assert re.fullmatch(rf"file://{small_disk}/corpus/[0-9a-f]{{64}}\.safetensors: {self.FIX}", said)
        assert files_of(small_disk) == {}

    def test_states_shard(self, small_disk: Path, run: Path) -> None:
        shutil.rmtree(run / "store/runs/states")
        scratch = ("--set", f"extract.scratch={small_disk}")
        said = refused_unchanged(run, "states", "extract", "--out", run, *scratch)
        assert re.fullmatch(rf"{small_disk}/drafthouse-states-\w+/[0-9a-f]{{64}}\.1: {self.FIX}", said)
        assert list(small_disk.iterdir()) == []

    def test_result_of_a_step(self, small_disk: Path, run: Path) -> None:
        (small_disk / "filler").write_bytes(bytes(12 * 1024))
        (run / "report.json").unlink()
        for name in ("drafters", "store", *(path.name for path in run.glob("*.*"))):
            if name != "evaluation-ours.json":
                (small_disk / name).symlink_to(run / name)
        said = refused_unchanged(small_disk, "evaluate", "--out", small_disk, "--drafter", "ours", new=())
        assert said == f"{small_disk}/evaluation-ours.json: {self.FIX}"


class TestFlippedBit:
    def test_question_shard(self, run: Path) -> None:
        shutil.rmtree(run / "store/runs")
        shutil.rmtree(run / "store/answers")
        shard = min((run / "store/corpus").glob("*.safetensors"))
        flip(shard)
        said = refused_unchanged(run, "corpus", "answer", "--out", run, new=(*LEASES, "*/runs/answers/*"))
        assert said == (
            f"corpus: shard {shard.name} is damaged: its bytes do not have the hash in its name;"
            " build or seal the corpus again: that replaces the shard"
        )
        assert drafthouse("corpus", "build", "--out", run, "--json").result["samples"] == 48
        assert drafthouse("corpus", "answer", "--out", run, "--json").code == 0

    def test_answer_shard(self, run: Path) -> None:
        shutil.rmtree(run / "store/runs/states")
        shard = min((run / "store/answers").glob("*.safetensors"))
        flip(shard)
        words = ("states", "extract", "--out", run)
        said = refused_unchanged(run, *words, new=(*LEASES, "*/states/data/*", "*/states/done/*"))
        assert said.startswith(f"answers: shard {shard.name} is damaged: its bytes do not have the hash in its name; ")
        assert drafthouse("corpus", "seal", "--out", run, "--json").result["samples"] == 48
        assert drafthouse(*words, "--json").result["shards"] > 0

    def test_states_shard(self, run: Path) -> None:
        shutil.rmtree(run / "drafters/ours")
        shard = min((run / "store/runs/states/data").glob("*/*.safetensors"))
        flip(shard)
        words = ("drafter", "train", "ours", "--out", run)
        said = refused_unchanged(run, *words, new=("drafters/ours/metrics.jsonl",))
        assert re.fullmatch(
            rf"file://{shard}: the shard {shard.parent.name} was changed: its sha256 is [0-9a-f]{{64}}, and its"
            r" done-marker says [0-9a-f]{64}; delete its done-marker and extract it again",
            said,
        )
        (run / "store/runs/states/done" / shard.parent.name).unlink()
        assert drafthouse("states", "extract", "--out", run, "--json").result["redone"] == 1
        assert drafthouse(*words, "--json").result["stopped"] == "finished"


class TestCheckpointCutShort:
    def test_every_checkpoint(self, run: Path) -> None:
        shutil.rmtree(run / "drafters/ours/drafter")
        for weights in (run / "drafters/ours/checkpoints").glob("*/weights.safetensors"):
            cut_short(weights)
        said = refused_unchanged(run, "drafter", "train", "ours", "--out", run, new=())
        assert re.fullmatch(
            rf"{run}/drafters/ours/checkpoints: no checkpoint is whole \(step-00000012: weights.safetensors has \d+"
            r" bytes, not \d+: it was cut short; step-00000006: .*\); delete the folder to start anew",
            said,
        )
        shutil.rmtree(run / "drafters/ours/checkpoints")
        assert drafthouse("drafter", "train", "ours", "--out", run, "--json").result["resumed_from"] is None

    def test_the_newest_costs_its_own_steps_and_nothing_else(self, run: Path) -> None:
        drafter = run / "drafters/ours/drafter"
        whole = files_of(drafter)
        shutil.rmtree(drafter)
        cut_short(run / "drafters/ours/checkpoints/step-00000012/training.safetensors")
        assert drafthouse("drafter", "train", "ours", "--out", run, "--json").result["resumed_from"] == 6
        assert files_of(drafter) == whole

    @pytest.mark.parametrize("verb", ["drafter check", "evaluate"])
    def test_exported_drafter(self, verb: str, run: Path) -> None:
        drafter = run / "drafters/ours/drafter"
        cut_short(drafter / "model.safetensors")
        arguments: dict[str, list[Any]] = {
            "drafter check": [drafter],
            "evaluate": ["--out", run, "--drafter", "ours"],
        }
        said = refused_unchanged(run, *verb.split(), *arguments[verb], new=())
        assert said.startswith(f"{drafter}/model.safetensors: the weights are damaged or cut short (")
        assert said.endswith("; copy the file again")


class TestOutOfMemory:
    """Address space is limited to what small batches take: the allocator's own refusal, in a process of its own."""

    SCRIPT = """
        import json, resource, sys
        from pathlib import Path
        from tests.command_line import drafthouse

        run, file = sys.argv[1:]

        def within(megabytes, *words):
            used = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line)
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (int(used.split()[1]) * 1024 + megabytes * 2**20, hard))
            outcome = drafthouse(*words, "--out", run, "--json")
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
            return outcome

        def put(*words):
            return drafthouse(*words, "--out", run, "--json").result

        def data():
            return len(list((Path(run) / "store/runs").glob("*/data/*/*")))

        sizes = ["corpus.samples=320", "corpus.samples_per_shard=320", "answers.max_new_tokens=1"]
        sizes += ["train.ours.rows=4000", "train.ours.anchors=64"]
        put("corpus", "build", "--file", file, *[f"--set={size}" for size in sizes])
        answer = ["corpus", "answer", "--set=answers.rows=160"]
        extract = ["states", "extract", "--set=extract.rows=1000", "--set=extract.batch_tokens=1000000"]
        said = [within(96, *answer).sentence, data()]
        put(*answer)
        put("corpus", "seal")
        said += [within(128, *extract).sentence, data()]
        lower = ["states", "extract"]
        lower += ["--set=extract.rows=8", "--set=extract.batch_tokens=1024", "--set=extract.pad_multiple=64"]
        said += [within(128, *lower).result["shards"], data()]
        said += [within(384, "drafter", "train", "ours").sentence]
        said += [sorted(path.name for path in (Path(run) / "drafters/ours").rglob("*"))]
        print(json.dumps(said))
    """

    def test_the_sentence_names_the_batch_and_its_advice_helps(self, new: Path, file: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        words = [sys.executable, "-c", dedent(self.SCRIPT), str(new), str(file)]
        root = Path(__file__).parents[2]
        ended = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=root, check=False)
        assert ended.returncode == 0, ended.stderr
        answer, answered, extract, extracted, lower, committed, train, left = json.loads(ended.stdout)
        assert re.fullmatch(
            r"[\w.]+: decoding 160 prompts of up to \d+ tokens does not fit the device; .*(fewer|lower).*", answer
        )
        assert extract == (
            "extract: a batch of 320 rows × 128 tokens does not fit cpu; lower extract.batch_tokens or"
            " extract.rows, or extract.max_tokens"
        )
        assert re.fullmatch(
            r"train: 4000 rows of 64 anchors do not fit .*; lower train.rows, train.anchors or .*", train
        )
        assert (answered, extracted, lower, committed) == (0, 1, 1, 2), "the answers, then the states"
        assert left == ["metrics.jsonl"]
