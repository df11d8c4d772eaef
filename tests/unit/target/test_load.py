"""Loading a model folder: what it finds, how it names what it found, and every way a folder can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from drafthouse.errors import TargetError
from drafthouse.target import Target, adapter
from drafthouse.target.adapter import identity_of
from tests.unit.target.tiny_models import dense, hybrid, wrapped

MakeFolder = Callable[..., Path]


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")


@pytest.mark.parametrize("make", [hybrid, dense, wrapped])
def test_a_folder_loads_as_the_model_that_was_saved(model_folder: MakeFolder, make: Any) -> None:
    model = make()
    target = Target.load(model_folder(model))
    ids = torch.arange(6, 40)[None]
    lengths = torch.tensor([34])
    own = Target(model).capture(ids, lengths, (0, 3))
    assert torch.equal(target.capture(ids, lengths, (0, 3)), own)
    assert target.dtype == torch.float32
    assert target.device.type == "cpu"
    assert target.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert len(target.identity) == 64


def test_the_weights_come_in_the_dtype_that_is_asked_for(model_folder: MakeFolder) -> None:
    folder = model_folder()
    target = Target.load(str(folder), dtype=torch.bfloat16)
    assert target.dtype == torch.bfloat16
    assert target.capture(torch.arange(9)[None], torch.tensor([9]), (0,)).dtype == torch.bfloat16
    assert target.identity == Target.load(folder).identity


def test_a_turn_may_end_with_the_tokens_of_tokenizer_and_config(model_folder: MakeFolder) -> None:
    assert Target.load(model_folder(hybrid(eos_token_id=5))).eos_ids == (1, 5)
    assert Target.load(model_folder(hybrid(eos_token_id=[7, 1]), "several")).eos_ids == (1, 7)
    assert Target(hybrid(eos_token_id=5)).eos_ids == (5,)
    assert Target(hybrid(eos_token_id=None)).eos_ids == ()


def test_the_mask_token_is_the_tokenizers_or_the_published_one(
    word_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hybrid()
    with pytest.raises(TargetError, match="the tokenizer has no mask token"):
        _ = Target(model, word_tokenizer).mask_token_id
    monkeypatch.setitem(adapter.PUBLISHED_MASK_ID, 97, 93)
    assert Target(model, word_tokenizer).mask_token_id == 93
    vocabulary = word_tokenizer.backend_tokenizer
    masked = PreTrainedTokenizerFast(tokenizer_object=vocabulary, mask_token="w4", eos_token="<end>")
    assert Target(model, masked).mask_token_id == 4


def test_identity_follows_the_weights_and_the_settings_alone(model_folder: MakeFolder) -> None:
    folder = model_folder()
    identity = identity_of(folder)
    assert identity == identity_of(model_folder(name="copy"))
    edit_config(folder, transformers_version="99.0")
    assert identity_of(folder) == identity
    edit_config(folder, rms_norm_eps=2e-6)
    assert identity_of(folder) != identity


def test_one_bit_of_one_weight_is_another_target(model_folder: MakeFolder) -> None:
    folder = model_folder()
    identity = identity_of(folder)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert identity_of(folder) != identity
    data[-3] ^= 1
    file.write_bytes(data)
    assert identity_of(folder) == identity


def test_of_a_large_file_size_header_and_blocks_are_named(
    model_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder()
    whole = identity_of(folder)
    monkeypatch.setattr(adapter, "WHOLE_HASH_BYTES", 8 << 10)
    monkeypatch.setattr(adapter, "BLOCK_BYTES", 64)
    sampled = identity_of(folder)
    assert sampled not in (whole, "")
    file = folder / "model.safetensors"
    data = file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for place in (40, header - 2, len(data) - 1):  # a tensor's name, the end of the header, the last block
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert identity_of(folder) != sampled
    file.write_bytes(data[: len(data) // 2] + bytes(4) + data[len(data) // 2 :])
    assert identity_of(folder) != sampled
    file.write_bytes(data)
    assert identity_of(folder) == sampled


def test_a_folder_without_weights_has_no_identity(model_folder: MakeFolder) -> None:
    folder = model_folder()
    (folder / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="no safetensors weights here; fetch the weights"):
        identity_of(folder)


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def missing_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def other_shape(folder: Path) -> None:
    edit_config(folder, intermediate_size=64)


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": [', encoding="utf-8")


def not_text(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")


def a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]", encoding="utf-8")


def no_architecture(folder: Path) -> None:
    edit_config(folder, architectures=[])


def null_architecture(folder: Path) -> None:
    edit_config(folder, architectures=None)


def foreign_architecture(folder: Path) -> None:
    edit_config(folder, architectures=["LlamaForCausalLM"])


def no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (no_config, "no config.json here; give a model folder"),
        (broken_json, "config.json names no architecture; fetch it again"),
        (not_text, "config.json names no architecture"),
        (a_list, "config.json names no architecture"),
        (no_architecture, "config.json names no architecture"),
        (null_architecture, "config.json names no architecture"),
        (foreign_architecture, "architecture LlamaForCausalLM is not supported; use Qwen3_5ForCausalLM"),
        (no_weights, r"cannot be loaded \("),
        (cut_weights, r"cannot be loaded \("),
        (other_shape, r"cannot be loaded \("),
        (no_tokenizer, "no tokenizer files here; fetch tokenizer.json"),
        (missing_tensor, "1 weight tensors are missing, first model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_wrong_folder_is_told_in_one_sentence(
    model_folder: MakeFolder, damage: Callable[[Path], None], problem: str
) -> None:
    folder = model_folder()
    damage(folder)
    with pytest.raises(TargetError, match=problem) as caught:
        Target.load(folder)
    assert str(caught.value).startswith(f"{folder}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250 + len(str(folder))


def test_a_folder_that_is_not_there_or_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    for path in (tmp_path / "missing", file):
        with pytest.raises(TargetError, match=r"no config\.json here"):
            Target.load(path)
