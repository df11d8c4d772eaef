"""Does our plug-in tap SGLang's own model where we think it does? Runs in the engine's interpreter, without a GPU.

SGLang's body of Qwen3.5, with its layers, norms, residuals and its own noting of states; only what mixes tokens, which
needs a GPU, is replaced by a product with a fixed matrix. The plug-in is found by its entry point and hooked in as a
server does it. What it writes is compared with what goes into each layer and into the final norm.

usage: tapping.py LAUNCH_LINE.json SERVED_TARGET FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.utils.multi_platform import MultiPlatformOp
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models import qwen3_5
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args, set_global_server_args_for_scheduler

from sglang_gate.reading import on_cpu

RIDS = ["drafthouse-" + "0" * 32, "somebody", "drafthouse-" + "1" * 32]
LENGTHS, FIRSTS = [5, 2, 7], [0, 0, 4]


class Batch(SimpleNamespace):
    """A ForwardBatch of which only what is said here is set."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def body_of(folder: Path, arguments: Any) -> Any:
    """SGLang's body with random weights, its mixers replaced."""
    model = ModelConfig.from_server_args(arguments, model_path=str(folder))
    initialize_dp_attention(arguments, model)
    config = model.hf_text_config
    qwen3_5.get_stream = lambda _: None
    body = qwen3_5.Qwen3_5ForCausalLM(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for parameter in body.parameters():
        parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    for module in body.modules():
        if isinstance(module, MultiPlatformOp):
            module._forward_method = module.forward_native
    for layer in body.layers:
        matrix = 0.2 * torch.randn(config.hidden_size, config.hidden_size, generator=generator).bfloat16()
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.forward = lambda hidden, _, matrix=matrix: hidden @ matrix
        else:
            layer.self_attention = lambda positions, hidden_states, forward_batch, matrix=matrix: hidden_states @ matrix
    return body


def main() -> None:
    line, folder, storage = map(Path, sys.argv[1:])
    arguments = prepare_server_args(json.loads(line.read_text(encoding="utf-8")))
    set_global_server_args_for_scheduler(arguments)
    for name in ("ones", "zeros", "empty", "full", "tensor", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    init_distributed_environment(1, 0, f"file://{line.with_name('rendezvous').resolve()}", 0, "gloo")
    initialize_model_parallel()
    body = body_of(folder, arguments)
    count = len(body.layers)
    layers = [0, count - 2]
    os.environ |= {"DRAFTHOUSE_STATES": str(storage), "DRAFTHOUSE_LAYERS": ",".join(map(str, layers))}
    ModelRunner.init_attention_backends = lambda self: None
    load_plugins()
    ModelRunner.init_attention_backends(SimpleNamespace(model=torch.nn.ModuleList([body]), server_args=arguments))

    outputs: list[torch.Tensor] = []
    for layer in body.layers:
        layer.register_forward_hook(lambda _, given, found: outputs.append(found[0] + found[1]))
    total = sum(LENGTHS)
    ids = torch.arange(10, 10 + total)
    batch = Batch(
        forward_mode=ForwardMode.EXTEND, rids=RIDS, input_ids=ids, extend_seq_lens_cpu=LENGTHS,
        extend_prefix_lens_cpu=FIRSTS, positions=torch.arange(total), batch_size=len(RIDS),
    )  # fmt: skip
    hidden = body(ids, batch.positions, batch)
    assert isinstance(hidden, torch.Tensor), "what is around the body was not told of taps"
    expected = torch.stack([*(outputs[layer] for layer in layers), outputs[-1]], dim=1)

    worst, rows, equal = 0.0, 0, 0
    for number, rid in enumerate(RIDS):
        begin = sum(LENGTHS[:number])
        path = storage / f"{rid}.{FIRSTS[number]}.safetensors"
        end = time.monotonic() + 20
        while rid != "somebody" and not path.exists():
            assert time.monotonic() < end, f"{path.name} was not written"
            time.sleep(0.01)
        if path.exists():
            written = load_file(path)
            assert torch.equal(written["token_ids"], ids[begin : begin + LENGTHS[number]])
            off = (written["hidden_states"] - expected[begin : begin + LENGTHS[number]]).float().abs().amax((1, 2))
            worst, rows, equal = max(worst, float(off.max())), rows + len(off), equal + int((off == 0).sum())
    neighbours = [float((outputs[i] - outputs[i + 1]).float().abs().max()) for i in range(count - 1)]
    found = {"tokens": rows, "equal": equal, "worst": worst, "nearest_other_layer": min(neighbours), "layers": layers}
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
