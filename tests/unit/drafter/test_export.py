"""Exported drafters: read back and compared, refused in one sentence when they are not what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from drafthouse.drafter import export
from drafthouse.drafter.config import FULL, SLIDING, DrafterConfig
from drafthouse.drafter.export import CONFIG, WEIGHTS, compare_config, load_drafter, read_config, save_drafter
from drafthouse.drafter.model import DFlashDrafter
from drafthouse.errors import DrafterError
from tests.unit.drafter.doubles import tiny_config

IDENTITY = "ab" * 32


def drafter(**changes: object) -> DFlashDrafter:
    values: dict[str, object] = {
        "layer_types": (SLIDING, FULL),
        "sliding_window": 8,
        "target_identity": IDENTITY,
    }
    return DFlashDrafter(tiny_config(**values | changes))


def sentence(caught: pytest.ExceptionInfo[DrafterError]) -> str:
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    model = drafter()
    path = save_drafter(tmp_path / "d", model, dtype=dtype, trained={"steps": 3})
    assert sorted(p.name for p in path.iterdir()) == [CONFIG, WEIGHTS]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    raw = read_config(path)
    assert raw["dtype"] == str(dtype).removeprefix("torch.")
    assert raw["drafthouse"] == {"target_identity": IDENTITY, "trained": {"steps": 3}}
    loaded = load_drafter(path, target_identity=IDENTITY, num_layers=4, hidden_size=16, vocab_size=20)
    assert loaded.config == model.config
    assert not loaded.training
    for (name, a), (other, b) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other
        assert b.dtype == torch.float32
        assert torch.equal(a.to(dtype).float(), b)
    assert {t.dtype for t in load_file(path / WEIGHTS).values()} == {dtype}


def test_whoever_reads_the_config_reads_the_weights(tmp_path: Path) -> None:
    folder = save_drafter(tmp_path / "drafter", DFlashDrafter(tiny_config()))
    config, weights = (folder / name for name in ("config.json", "model.safetensors"))
    assert weights.stat().st_mode == config.stat().st_mode


def test_nothing_but_a_drafter_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "models" / "other").mkdir(parents=True)
    with pytest.raises(DrafterError, match="this folder holds 'other'"):
        save_drafter(tmp_path / "models", DFlashDrafter(tiny_config()))
    assert (tmp_path / "models" / "other").is_dir()


def test_saving_again_replaces_the_drafter(tmp_path: Path) -> None:
    save_drafter(tmp_path / "d", drafter())
    save_drafter(tmp_path / "d", drafter(block_size=6))
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == [CONFIG, WEIGHTS]
    assert load_drafter(tmp_path / "d").config.block_size == 6


def test_a_full_disk_leaves_the_old_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_drafter(tmp_path / "d", drafter())

    def full(tensors: object, path: Path, **rest: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(DrafterError, match="No space left on device") as caught:
        save_drafter(tmp_path / "d", drafter(block_size=6))
    sentence(caught)
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    assert load_drafter(tmp_path / "d").config.block_size == 4


@pytest.mark.parametrize("state", ["absent", "false"])
def test_the_silent_rewrite_by_transformers_is_caught(tmp_path: Path, state: str) -> None:
    """Qwen3Config nulls sliding_window when use_sliding_window is absent or false, and says nothing."""
    intended = drafter().config.to_hf_dict()
    handed = dict(intended)
    if state == "absent":
        del handed["use_sliding_window"]
    else:
        handed["use_sliding_window"] = False
    rewritten = Qwen3Config(**handed).to_dict()
    assert rewritten["sliding_window"] is None
    assert rewritten["layer_types"] == intended["layer_types"]
    with pytest.raises(DrafterError, match=r"sliding_window: 8 → null") as caught:
        compare_config(intended, rewritten, where="config.json")
    assert "use_sliding_window: true → false" in sentence(caught)
    with pytest.raises(DrafterError, match="sliding_window is null"):
        DrafterConfig.from_hf_dict(rewritten | {"architectures": ["DFlashDraftModel"]})


def test_the_silent_rewrite_of_layer_types_is_caught() -> None:
    """Without layer_types, Qwen3Config derives them from max_window_layers: a sliding drafter becomes all
    full."""
    intended = drafter().config.to_hf_dict()
    handed = {k: v for k, v in intended.items() if k not in ("layer_types", "max_window_layers")}
    rewritten = Qwen3Config(**handed).to_dict()
    assert rewritten["layer_types"] == [FULL, FULL]
    with pytest.raises(DrafterError, match=r"layer_types: .*sliding_attention.* → .*full_attention"):
        compare_config(intended, rewritten, where="config.json")


def test_our_explicit_config_survives_transformers() -> None:
    """What an engine builds from our file still has the window and the layer types."""
    written = drafter().config.to_hf_dict()
    read = Qwen3Config(**written)
    assert read.sliding_window == 8
    assert list(read.layer_types) == [SLIDING, FULL]
    assert read.rope_parameters["rope_theta"] == 1e7
    assert (read.block_size, read.num_target_layers, read.head_dim) == (4, 4, 8)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"target_identity": "cd" * 32}, "its identity is abababababab, this target's is cdcdcdcdcdcd"),
        ({"num_layers": 8}, "its decoder layers is 4, this target's is 8"),
        ({"hidden_size": 32}, "its hidden size is 16, this target's is 32"),
        ({"vocab_size": 1000}, "its vocabulary is 20, this target's is 1000"),
    ],
)
def test_a_drafter_of_another_target_is_refused(tmp_path: Path, facts: dict[str, Any], words: str) -> None:
    save_drafter(tmp_path / "d", drafter())
    with pytest.raises(DrafterError, match=f"drafter of another target: {words}") as caught:
        load_drafter(tmp_path / "d", **facts)
    sentence(caught)


def test_a_drafter_that_names_no_target_is_judged_by_its_shape(tmp_path: Path) -> None:
    save_drafter(tmp_path / "d", drafter(target_identity=""))
    load_drafter(tmp_path / "d", target_identity=IDENTITY, num_layers=4)
    with pytest.raises(DrafterError, match="another target"):
        load_drafter(tmp_path / "d", target_identity=IDENTITY, num_layers=5)


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        tensors = {k: v.clone() for k, v in load_file(path / WEIGHTS).items()}
        change(tensors)
        save_file(tensors, path / WEIGHTS)

    return damage


def _cut(path: Path) -> None:
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, "the weights are damaged or cut short"),
        (lambda p: (p / WEIGHTS).write_bytes(b""), "the weights are damaged or cut short"),
        (lambda p: (p / WEIGHTS).unlink(), "the weights are missing"),
        (lambda p: (p / CONFIG).unlink(), "there is no drafter here"),
        (lambda p: (p / CONFIG).write_text("{"), "not valid JSON"),
        (lambda p: (p / CONFIG).write_text("[1]"), "not a JSON object"),
        (_tensors(lambda t: t.pop("norm.weight")), "lacks norm.weight"),
        (_tensors(lambda t: t.update(extra=t["norm.weight"].clone())), "has unknown extra"),
        (
            _tensors(lambda t: t.update({"model.fc.weight": t.pop("fc.weight")})),
            "lacks fc.weight and has unknown model.fc.weight",
        ),
        (
            _tensors(lambda t: t.update({"fc.weight": t["fc.weight"][:, :16].contiguous()})),
            r"fc.weight has shape \[16, 16\], the config says \[16, 32\]",
        ),
        (
            _tensors(lambda t: t["norm.weight"][:1].fill_(float("nan"))),
            r"no numbers .* in 1 of \d+ tensors: norm.weight",
        ),
        (_tensors(lambda t: t["fc.weight"][:1].fill_(float("-inf"))), r"no numbers .* in 1 of \d+ tensors: fc.weight"),
    ],
)
def test_damaged_drafters_are_refused(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    path = save_drafter(tmp_path / "d", drafter())
    damage(path)
    with pytest.raises(DrafterError, match=words) as caught:
        load_drafter(path)
    assert str(path) in sentence(caught)


def test_a_changed_key_is_refused_on_loading(tmp_path: Path) -> None:
    path = save_drafter(tmp_path / "d", drafter())
    config = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps(config | {"use_sliding_window": False}))
    with pytest.raises(DrafterError, match="use_sliding_window is not true"):
        load_drafter(path)


def test_a_large_drafter_of_the_published_shape_has_its_58_tensors() -> None:
    config = tiny_config(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_target_layers=64,
        target_layer_ids=(),
        layer_types=(),
    )
    with torch.device("meta"):
        state = DFlashDrafter(config).state_dict()
    assert len(state) == 58
    assert sum(t.numel() for t in state.values()) == 1_730_213_120
