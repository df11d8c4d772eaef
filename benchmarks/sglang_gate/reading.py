"""What SGLang makes of a drafter's folder, by its own config and model classes; runs in the engine's interpreter.

Config, weights, norms, projections, rotation and the order of taps are SGLang's code. Only the attention product is
done here, with the visibility that SGLang read from the config, so that no GPU is needed: a query of a `DECODER` layer
sees keys at and before its own position, at most `sliding_window_size` back; one of an `ENCODER_ONLY` layer sees all.

usage: reading.py LAUNCH_LINE.json DRAFTER REFERENCE.safetensors [DRAFTER REFERENCE.safetensors …]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sglang.srt.models.dflash as dflash
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.layers.utils.multi_platform import MultiPlatformOp
from sglang.srt.server_args import prepare_server_args, set_global_server_args_for_scheduler
from torch import Tensor, nn


class Attention(nn.Module):
    """Stands where SGLang's paged attention does; keys and values of the context come with the call."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs = theirs

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: Any) -> Tensor:
        dim, heads = self.theirs.head_dim, self.theirs.tp_k_head_num
        before_key, before_value, before = batch.context[self.theirs.layer_id]
        keys = torch.cat([before_key, key.view(-1, heads, dim)]).transpose(0, 1)
        values = torch.cat([before_value, value.view(-1, heads, dim)]).transpose(0, 1)
        behind = batch.positions[:, None] - torch.cat([before, batch.positions])
        seen = torch.ones_like(behind, dtype=torch.bool)
        if self.theirs.attn_type == AttentionType.DECODER:
            seen &= behind >= 0
        if self.theirs.sliding_window_size is not None and self.theirs.sliding_window_size >= 0:
            seen &= behind <= self.theirs.sliding_window_size
        queries = query.view(len(query), -1, dim).transpose(0, 1)
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=self.theirs.scaling, enable_gqa=True
        )
        return out.transpose(0, 1).reshape(len(query), -1)


def on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`make` without CUDA devices, which the process groups ask for by name."""

    def made(*words: Any, **more: Any) -> Tensor:
        if "cuda" in str(more.get("device", "")):
            more["device"] = "cpu"
        return make(*words, **more)

    return made


def norm_heads(query: Tensor, key: Tensor, query_norm: nn.Module, key_norm: nn.Module, dim: int, *_: Any) -> Any:
    """`apply_qk_norm` without its fused CUDA kernel."""
    return query_norm(query.reshape(-1, dim)).view_as(query), key_norm(key.reshape(-1, dim)).view_as(key)


def load(folder: Path, arguments: Any) -> Any:
    """SGLang's draft model, read from a folder as a server reads it."""
    config = ModelConfig.from_server_args(arguments, model_path=str(folder), is_draft_model=True).hf_config
    model = dflash.DFlashDraftModel(config)
    with safe_open(folder / "model.safetensors", "pt") as file:
        model.load_weights((name, file.get_tensor(name)) for name in list(file.keys()))
    for module in model.modules():
        if isinstance(module, MultiPlatformOp):
            module._forward_method = module.forward_native
    for layer in model.layers:
        layer.self_attn.attn = Attention(layer.self_attn.attn)
    return model.eval()


@torch.no_grad()
def draft(model: Any, states: Tensor, block: Tensor) -> Tensor:
    """Normed states `[B, H]` of a block of embeddings behind `states` `[a, K·H]`, computed as by the DFLASH worker."""
    positions = torch.arange(len(states))
    context, projected = {}, model.project_target_hidden(states)
    for number, layer in enumerate(model.layers):
        mixer = layer.self_attn
        key, value = mixer.kv_proj_only(projected)
        key = mixer.apply_k_rope(positions, mixer.apply_k_norm(key))
        shape = (-1, mixer.num_kv_heads, mixer.head_dim)
        context[number] = (key.view(shape), value.view(shape), positions)
    batch = SimpleNamespace(context=context, positions=torch.arange(len(states), len(states) + len(block)))
    found: Tensor = model(None, batch.positions, batch, input_embeds=block).hidden_states
    return found


def compare(model: Any, reference: dict[str, Tensor], key: str) -> tuple[float, int, int]:
    """Greatest total variation from our distributions, slots with the same first token, and slots."""
    worst, same, slots = 0.0, 0, 0
    for name in (name.removesuffix(".ours") for name in reference if name.endswith(".ours")):
        hidden = draft(model, reference[f"{name}.{key}"], reference[f"{name}.block"])[1:]
        theirs, ours = (hidden @ reference["lm_head"].T).softmax(-1), reference[f"{name}.ours"].softmax(-1)
        worst = max(worst, float((theirs - ours).abs().sum(-1).max()) / 2)
        same += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
        slots += len(ours)
    return worst, same, slots


def main() -> None:
    line, *pairs = sys.argv[1:]
    arguments = prepare_server_args(json.loads(Path(line).read_text(encoding="utf-8")))
    set_global_server_args_for_scheduler(arguments)
    for name in ("ones", "zeros", "empty", "full", "tensor", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    rendezvous = f"file://{Path(line).with_name('rendezvous').resolve()}"
    init_distributed_environment(1, 0, rendezvous, 0, "gloo")
    initialize_model_parallel()
    dflash.apply_qk_norm = norm_heads
    torch.set_default_dtype(torch.float32)
    for folder, path in zip(pairs[::2], pairs[1::2], strict=True):
        model, reference = load(Path(folder), arguments), load_file(path)
        worst, same, slots = compare(model, reference, "states")
        mixers = [layer.self_attn.attn.theirs for layer in model.layers]
        found = {
            "total_variation": worst,
            "same": same,
            "slots": slots,
            "other_taps": compare(model, reference, "other")[0],
            "attention": [(str(mixer.attn_type.value), mixer.sliding_window_size) for mixer in mixers],
            "rotary_base": model.layers[0].self_attn.rotary_emb.base,
            "block_size": model.block_size,
        }
        print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
