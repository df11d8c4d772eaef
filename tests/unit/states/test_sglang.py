"""States that an SGLang server writes through our plug-in: the same as ours, whole, and of the prompts asked for."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drafthouse.config import validate
from drafthouse.errors import ConfigError, StatesError
from drafthouse.states import ExtractSettings, StatesReader, run_worker
from drafthouse.states import sglang as worker_side
from drafthouse.states.settings import EngineSettings
from drafthouse.states.sglang import SglangTaps
from drafthouse.store import Store
from drafthouse.target import Target
from tests.doubles.extraction import MemoryCorpus
from tests.doubles.sglang_states import MODULE, Behaviour, Model, engine, load_plugins, sglang_server

LAYERS = (0, 2)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class whose instances are servers' model runners; plug-ins are not loaded yet."""
    monkeypatch.setitem(sys.modules, MODULE, None)  # put back at the end
    for name in ("sglang", "sglang.srt", "sglang.srt.model_executor"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    return engine()


def taps(described: Target, url: str, storage: Path, layers: tuple[int, ...] = LAYERS, **more: float) -> SglangTaps:
    settings = EngineSettings.model_validate({"kind": "sglang", "url": url, "storage": storage, **more})
    return SglangTaps(described, settings, layers)


def started(
    runner: Any, embedded: Target, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, **server_args: Any
) -> Behaviour:
    """A server that was started with `environment`."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    load_plugins()
    one = runner(Model(embedded.num_layers), **server_args)
    one.init_attention_backends()
    assert one.ready
    return Behaviour(embedded, one)


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(4, 900, (3, 12), generator=generator), torch.tensor([12, 5, 9])


@pytest.mark.parametrize("layers", [(0, 2), (1,), (0, 3)], ids=str)
@pytest.mark.parametrize("chunk", [100, 5, 1])
def test_its_states_are_those_of_our_own_pass(
    embedded: Target, described: Target, runner: Any, storage: Path, monkeypatch: pytest.MonkeyPatch,
    layers: tuple[int, ...], chunk: int,
) -> None:  # fmt: skip
    ids, lengths = texts()
    behaviour = started(runner, embedded, taps(described, "", storage, layers).environment(), monkeypatch)
    behaviour.chunk = chunk
    with sglang_server(behaviour) as url:
        found = taps(described, url, storage, layers).capture(ids, lengths, layers)
    for row, length in enumerate(lengths.tolist()):
        alone = embedded.capture(ids[row : row + 1, :length], lengths[row : row + 1], layers)
        assert torch.equal(found[row, :length], alone[0].bfloat16())
    assert list(storage.iterdir()) == [], "nothing stays, and nothing of others came"


def test_how_a_server_is_started(described: Target) -> None:
    line = taps(described, "", Path("/dev/shm/states"), (1, 16, 31, 46, 61)).start_line()
    assert shlex.split(line) == shlex.split(
        "DRAFTHOUSE_STATES=/dev/shm/states DRAFTHOUSE_LAYERS=1,16,31,46,61 python -m sglang.launch_server"
        " --model-path MODEL --disable-radix-cache --cuda-graph-backend-prefill=disabled"
    )


def test_a_server_without_the_variables_is_left_as_it_is(
    embedded: Target, described: Target, runner: Any, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = runner.init_attention_backends
    behaviour = started(runner, embedded, {}, monkeypatch)
    assert runner.init_attention_backends is before
    monkeypatch.setattr(worker_side, "_PATIENCE_S", 0.2)
    storage.mkdir()
    sentence = r"wrote no states to .*DRAFTHOUSE_STATES=.*DRAFTHOUSE_LAYERS=0,2 .*--disable-radix-cache"
    with sglang_server(behaviour) as url, pytest.raises(StatesError, match=sentence):
        taps(described, url, storage).capture(*texts(), LAYERS)


def test_a_server_for_other_layers_is_told(
    embedded: Target, described: Target, runner: Any, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaviour = started(runner, embedded, taps(described, "", storage, (1,)).environment(), monkeypatch)
    with sglang_server(behaviour) as url, pytest.raises(StatesError, match=r"needs \[12, 3, 128\].*LAYERS=0,2"):
        taps(described, url, storage).capture(*texts(), LAYERS)
    assert list(storage.iterdir()) == []


@pytest.mark.parametrize(
    ("layers", "server_args", "sentence"),
    [
        ("", {}, "must be rising numbers"),
        ("2,1", {}, "must be rising numbers"),
        ("1,4", {}, "names layer 4, and the model has 4"),
        ("1", {"disable_radix_cache": False}, "--disable-radix-cache"),
        ("1", {"tp_size": 2}, "on one GPU alone"),
    ],
)
def test_where_states_would_be_wrong_the_server_does_not_start(
    embedded: Target, runner: Any, storage: Path, monkeypatch: pytest.MonkeyPatch,
    layers: str, server_args: dict[str, Any], sentence: str,
) -> None:  # fmt: skip
    environment = {"DRAFTHOUSE_STATES": str(storage), "DRAFTHOUSE_LAYERS": layers}
    with pytest.raises(RuntimeError, match=sentence):
        started(runner, embedded, environment, monkeypatch, **server_args)


def test_a_folder_that_cannot_be_written_ends_no_server(
    embedded: Target, described: Target, runner: Any, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = storage.with_name("theirs")
    behaviour = started(runner, embedded, taps(described, "", theirs).environment(), monkeypatch)
    monkeypatch.setattr(worker_side, "_PATIENCE_S", 0.2)
    theirs.rmdir()
    ids, lengths = texts()
    with sglang_server(behaviour) as url:
        with pytest.raises(StatesError, match="wrote no states"):
            taps(described, url, storage).capture(ids, lengths, LAYERS)
        theirs.symlink_to(storage)
        monkeypatch.setattr(worker_side, "_PATIENCE_S", 20.0)
        assert taps(described, url, storage).capture(ids, lengths, LAYERS).shape == (3, 12, 3, 128)


def test_no_server(described: Target, storage: Path) -> None:
    with pytest.raises(StatesError, match="the server is not there"):
        taps(described, "http://127.0.0.1:9", storage).capture(*texts(), LAYERS)


def test_a_run_that_a_server_computes_is_read_like_any_other(
    embedded: Target, described: Target, runner: Any, storage: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    behaviour = started(runner, embedded, taps(described, "", storage).environment(), monkeypatch)
    corpus = MemoryCorpus(shards=2, samples=3, seed=2)
    settings = ExtractSettings(layer_ids=LAYERS, scratch=str(tmp_path))
    store = Store.open(str(tmp_path / "store"))
    run_worker(store, "ours", corpus, embedded, settings)
    with sglang_server(behaviour) as url:
        run_worker(store, "theirs", corpus, taps(described, url, storage), settings)
        behaviour.broken = "zeros"
        with pytest.raises(StatesError, match="is all zeros"):
            run_worker(store, "broken", corpus, taps(described, url, storage), settings)
    ours, theirs = StatesReader(store, "ours"), StatesReader(store, "theirs")
    assert ours.spec == theirs.spec
    for index in range(len(ours)):
        one, other = ours.sample(index), theirs.sample(index)
        torch.testing.assert_close(other.hidden_states, one.hidden_states, rtol=0.02, atol=0.02)
        torch.testing.assert_close(other.last_hidden_state, one.last_hidden_state, rtol=0.02, atol=0.02)


def test_the_plugin_needs_nothing_of_ours_where_the_engine_lives() -> None:
    code = "import sys, drafthouse.plugins.sglang_states; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in loaded if name.startswith("drafthouse")} == {
        "drafthouse",
        "drafthouse.plugins",
        "drafthouse.plugins.sglang_states",
    }
    assert not {"torch", "pydantic", "numpy"} & set(loaded), "no process of SGLang's is slowed down by it"


def test_a_server_without_its_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.storage is missing"):
        validate(ExtractSettings, {"engine": {"kind": "sglang"}}, "run.yml")
