"""States that a vLLM server computes: the same as ours, and every way in which they can be wrong is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from drafthouse.config import validate
from drafthouse.errors import ConfigError, StatesError
from drafthouse.states import ExtractSettings, StatesReader, run_worker
from drafthouse.states.settings import EngineSettings
from drafthouse.states.vllm import VllmTaps
from drafthouse.store import Store
from drafthouse.target import Target
from tests.command_line import drafthouse
from tests.doubles.extraction import MemoryCorpus
from tests.doubles.vllm_states import Behaviour, vllm_server

LAYERS = (0, 2)
FROM_ONE = (1, 3, 4)


@pytest.fixture
def behaviour(embedded: Target, tmp_path: Path) -> Behaviour:
    return Behaviour(embedded, tmp_path / "shared", FROM_ONE)


def _taps(described: Target, url: str, storage: Path, **more: float) -> VllmTaps:
    settings = EngineSettings.model_validate({"kind": "vllm", "url": url, "storage": storage, **more})
    return VllmTaps(described, settings, LAYERS)


def _ids() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(4, 900, (3, 12), generator=generator), torch.tensor([12, 5, 9])


def test_a_target_without_weights_is_the_same_target(embedded: Target, described: Target) -> None:
    assert described.identity == embedded.identity
    assert (described.num_layers, described.hidden_size) == (embedded.num_layers, embedded.hidden_size)
    assert described.device.type == "meta"


def test_its_states_are_those_of_our_own_pass(embedded: Target, described: Target, behaviour: Behaviour) -> None:
    ids, lengths = _ids()
    behaviour.write_s = 0.05  # the path is told before the file is whole
    with vllm_server(behaviour) as url:
        found = _taps(described, url, behaviour.storage).capture(ids, lengths, LAYERS)
    wanted = embedded.capture(ids, lengths, LAYERS)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(found[row, :length].float(), wanted[row, :length], rtol=0.02, atol=0.02)
    assert list(behaviour.storage.iterdir()) == [], "nothing of it stays in memory"


def test_the_command_line_asks_for_these_layers_counted_from_one(described: Target, tmp_path: Path) -> None:
    arguments = dict(one.partition("=")[::2] for one in _taps(described, "http://127.0.0.1:1", tmp_path).arguments())
    speculative = json.loads(arguments["--speculative-config"])
    assert speculative["method"] == "extract_hidden_states"
    assert speculative["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": list(FROM_ONE)}
    transfer = json.loads(arguments["--kv-transfer-config"])
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path)}


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ("loading", "the server answered 503: the engine is loading"),
        ("no-path", "the server extracts no hidden states"),
        ("elsewhere", "the server writes to .*other, and not to .*shared"),
        ("tokens", "the states belong to other tokens"),
        ("torn", "what the server wrote cannot be read"),
    ],
)
def test_what_is_no_states_is_told(described: Target, behaviour: Behaviour, broken: str, sentence: str) -> None:
    behaviour.broken = broken
    with vllm_server(behaviour) as url, pytest.raises(StatesError, match=sentence):
        _taps(described, url, behaviour.storage).capture(*_ids(), LAYERS)


def test_a_server_for_other_layers_is_told(described: Target, behaviour: Behaviour) -> None:
    behaviour.layer_ids = (1, 4)
    with vllm_server(behaviour) as url, pytest.raises(StatesError, match=r"needs \[12, 3, 128\].*--speculative-config"):
        _taps(described, url, behaviour.storage).capture(*_ids(), LAYERS)


def test_no_server(described: Target, tmp_path: Path) -> None:
    with pytest.raises(StatesError, match="the server is not there"):
        _taps(described, "http://127.0.0.1:9", tmp_path).capture(*_ids(), LAYERS)


def test_a_run_that_a_server_computes_is_read_like_any_other(
    embedded: Target, described: Target, behaviour: Behaviour, tmp_path: Path
) -> None:
    corpus = MemoryCorpus(shards=2, samples=3, seed=2)
    settings = ExtractSettings(layer_ids=LAYERS, scratch=str(tmp_path))
    store = Store.open(str(tmp_path / "store"))
    run_worker(store, "ours", corpus, embedded, settings)
    with vllm_server(behaviour) as url:
        run_worker(store, "theirs", corpus, _taps(described, url, behaviour.storage), settings)
    ours, theirs = StatesReader(store, "ours"), StatesReader(store, "theirs")
    assert ours.spec == theirs.spec
    for index in range(len(ours)):
        one, other = ours.sample(index), theirs.sample(index)
        torch.testing.assert_close(other.hidden_states, one.hidden_states, rtol=0.02, atol=0.02)
        torch.testing.assert_close(other.last_hidden_state, one.last_hidden_state, rtol=0.02, atol=0.02)


def test_zeros_of_a_hybrid_are_noticed(described: Target, behaviour: Behaviour, tmp_path: Path) -> None:
    behaviour.broken = "zeros"
    settings = ExtractSettings(layer_ids=LAYERS, scratch=str(tmp_path))
    corpus, store = MemoryCorpus(shards=1, samples=2, seed=2), Store.open(str(tmp_path / "store"))
    with vllm_server(behaviour) as url:
        taps = _taps(described, url, behaviour.storage)
        with pytest.raises(StatesError, match="is all zeros"):
            run_worker(store, "run", corpus, taps, settings)


def test_a_server_without_its_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.storage is missing"):
        validate(ExtractSettings, {"engine": {"kind": "vllm"}}, "run.yml")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_on_the_command_line(run: Path, behaviour: Behaviour, kind: str) -> None:
    """A finished run is found finished, and no server is asked."""
    engine = json.dumps({"kind": kind, "url": "http://127.0.0.1:9", "storage": str(behaviour.storage)})
    outcome = drafthouse("states", "extract", "--out", str(run), "--set", f"extract.engine={engine}", "--json")
    assert outcome.code == 0, outcome
    assert json.loads(outcome.out)["shards"] == 0
