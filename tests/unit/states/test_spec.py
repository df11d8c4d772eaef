from __future__ import annotations

import pytest

from drafthouse.config import validate
from drafthouse.errors import ConfigError, StatesError
from drafthouse.states import ExtractSettings, spec_of
from drafthouse.states.spec import parse_spec
from tests.doubles.extraction import MemoryCorpus, TinyTaps


def test_spec_holds_what_decides_the_content(target: TinyTaps, corpus: MemoryCorpus) -> None:
    spec = spec_of(target, corpus, ExtractSettings(layer_ids=(0, 3), rows=4))
    assert spec.model_dump() == {
        "schema_version": 1,
        "target": target.identity,
        "layer_ids": (0, 3),
        "num_layers": 4,
        "hidden_size": 16,
        "dtype": "bf16",
        "corpus": corpus.manifest.digest,
        "shards": 3,
        "max_tokens": 4096,
    }
    faster = spec_of(target, corpus, ExtractSettings(layer_ids=(0, 3), rows=8, ttl_s=5))
    assert faster.digest() == spec.digest()
    shorter = spec_of(target, corpus, ExtractSettings(layer_ids=(0, 3), max_tokens=100))
    assert shorter.digest() != spec.digest()


def test_a_spec_survives_json(target: TinyTaps, corpus: MemoryCorpus) -> None:
    spec = spec_of(target, corpus, ExtractSettings(layer_ids=(0, 3)))
    again = parse_spec(spec.model_dump(mode="json"), "x")
    assert again == spec
    assert again.digest() == spec.digest()


def test_a_layer_that_is_not_there_names_the_range(target: TinyTaps, corpus: MemoryCorpus) -> None:
    with pytest.raises(StatesError, match="layer id 4 is out of range: this target has decoder layers 0 to 3"):
        spec_of(target, corpus, ExtractSettings(layer_ids=(0, 4)))


def test_no_layer(target: TinyTaps, corpus: MemoryCorpus) -> None:
    with pytest.raises(StatesError, match="no layer is asked for; name decoder layers from 0 to 3"):
        spec_of(target, corpus, ExtractSettings())


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"layer_ids": [2, 1]}, "must rise strictly"),
        ({"layer_ids": [1, 1]}, "must rise strictly"),
        ({"layer_ids": [-1, 1]}, "from 0 or more"),
        ({"rows": 0}, "rows"),
        ({"dtype": "fp4"}, "dtype"),
        ({"disk_low": 0.95}, "must not be above disk_high"),
        ({"shm_low": 0.95}, "must not be above shm_high"),
        ({"max_tokens": 4096, "batch_tokens": 1000}, "cannot hold one sample"),
        ({"batch": 3}, "unknown key 'batch'"),
    ],
)
def test_wrong_settings(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        validate(ExtractSettings, values, "run.yml")


def test_a_spec_of_another_version(target: TinyTaps, corpus: MemoryCorpus) -> None:
    values = spec_of(target, corpus, ExtractSettings(layer_ids=(0,))).model_dump(mode="json")
    with pytest.raises(StatesError, match="schema 2 instead of 1"):
        parse_spec({**values, "schema_version": 2}, "spec.json")
    with pytest.raises(StatesError, match="'hidden_size'"):
        parse_spec({**values, "hidden_size": "wide"}, "spec.json")
