"""Training throughput at the shape of Qwen3.6-27B's drafter: ours, speculators 0.9.0 and SpecForge 0.2.0.

Random weights and random states: only time and memory are measured. All train the same drafter shape with AdamW on the
same documents, one document and one optimiser step at a time, each as its own program. They compile and warm up beside
one another, wait at a gate, and are timed one after the other while the device does nothing else. A step's time is the
median.

python benchmarks/gpu_training.py --folder /dev/shm      # leaves benchmarks/results/gpu_training.json
python benchmarks/gpu_training.py --small --only ours --device cpu --folder /tmp --out /tmp/rows.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from contenders import contend
from peer_trainers import steps_of
from rows import Rows
from shape27b import SHAPE_27B, SHAPE_SMALL, TAPS_27B, RandomCorpus

from drafthouse.drafter import DrafterShape
from drafthouse.drafter.config import DrafterConfig
from drafthouse.drafter.work import peak_of
from drafthouse.states import ExtractSettings, run_worker
from drafthouse.store import Store

SEED = 0
EMBEDDED = Path(__file__).parents[1] / "src" / "drafthouse" / "target" / "embedded"


class FrozenHead:
    """Embedding, final norm and lm_head of a target folder, nothing else of it."""

    def __init__(self, folder: Path, device: str) -> None:
        tensors = load_file(folder / "model.safetensors", device=device)
        self.embedding = tensors["model.embed_tokens.weight"]
        self.output = tensors["lm_head.weight"]
        self.scale = tensors["model.norm.weight"]
        self.dtype, self.device = self.output.dtype, self.output.device

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden.float(), self.scale.shape, 1 + self.scale.float(), 1e-6).to(hidden.dtype)

    def lm_head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.output)


class RandomTaps:
    """In the place of a target: states without a forward pass."""

    identity = ""

    def __init__(self, hidden_size: int, layers: int, device: str) -> None:
        self.hidden_size, self.num_layers, self.device = hidden_size, layers, torch.device(device)

    def capture(
        self, input_ids: Tensor, lengths: Tensor, layer_ids: Sequence[int], *, out: Tensor | None = None
    ) -> Tensor:
        if out is None:
            out = torch.empty(
                *input_ids.shape, len(layer_ids) + 1, self.hidden_size, dtype=torch.bfloat16, device=self.device
            )
        return out.normal_()


def drafter(small: bool) -> DrafterConfig:
    """Five layers, four of them sliding, block 16: the published drafter of Qwen3.6-27B."""
    target = SHAPE_SMALL if small else SHAPE_27B
    shape = DrafterShape(
        num_hidden_layers=5,
        intermediate_size=target["intermediate_size"],
        num_attention_heads=4 if small else 32,
        num_key_value_heads=2 if small else 8,
        head_dim=16 if small else 128,
        block_size=16,
        target_layer_ids=TAPS_27B,
        layer_types=("sliding_attention",) * 4 + ("full_attention",),
        sliding_window=2048,
    )
    return shape.for_target(
        hidden_size=target["hidden_size"],
        vocab_size=target["vocab_size"],
        num_layers=64,
        mask_token_id=min(248_070, target["vocab_size"] - 1),
    )


def prepare(folder: Path, plan: dict[str, Any], config: DrafterConfig) -> None:
    """Target, states and the peers' copies of them."""
    device, small = plan["device"], plan["small"]
    shape = SHAPE_SMALL if small else SHAPE_27B
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(SEED)
    target, draft = folder / "target", folder / "draft"
    target.mkdir()
    draft.mkdir()
    vocabulary, hidden = shape["vocab_size"], shape["hidden_size"]
    save_file(
        {
            "model.embed_tokens.weight": (torch.randn(vocabulary, hidden, device=device) * 0.02).to(dtype).cpu(),
            "lm_head.weight": (torch.randn(vocabulary, hidden, device=device) * 0.02).to(dtype).cpu(),
            "model.norm.weight": torch.zeros(hidden, dtype=dtype),
        },
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    weights = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    from transformers import Qwen3_5TextConfig

    text = Qwen3_5TextConfig(**shape, num_hidden_layers=64, tie_word_embeddings=False).to_dict()
    (target / "config.json").write_text(json.dumps(text | {"architectures": ["Qwen3_5ForCausalLM"]}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (EMBEDDED / name).exists():
            shutil.copy(EMBEDDED / name, target)
    as_dict = config.to_hf_dict()
    (draft / "config.json").write_text(json.dumps(as_dict))
    decoder = {key: as_dict[key] for key in as_dict if key not in ("dflash_config", "num_target_layers", "block_size")}
    (folder / "decoder.json").write_text(json.dumps(decoder | {"architectures": ["Qwen3ForCausalLM"]}))

    corpus = RandomCorpus([[plan["length"]]] * plan["documents"], min(vocabulary, 248_000))
    store = Store.open(str(folder / "store"))
    extract = ExtractSettings(
        layer_ids=config.target_layer_ids, rows=1, batch_tokens=plan["length"], max_tokens=plan["length"]
    )
    run_worker(store, "run", corpus, RandomTaps(hidden, 64, device), extract, "bench")
    copies(folder, plan)


def copies(folder: Path, plan: dict[str, Any]) -> None:
    """The same documents in the peers' formats; later epochs are links to the same files."""
    if not plan["peers"]:
        return
    from datasets import Dataset

    from drafthouse.states import StatesReader

    reader = StatesReader(Store.open(str(folder / "store")), "run", in_memory_bytes=64 << 30)
    wanted = steps_of(plan) + 8
    hidden, forge = folder / "speculators" / "hidden_states", folder / "specforge"
    hidden.mkdir(parents=True)
    forge.mkdir()
    rows: list[list[int]] = []
    for number in range(plan["documents"]):
        sample = reader.sample(number)
        ids = sample.input_ids.long()
        rows.append(ids.tolist())
        states = torch.cat([sample.hidden_states, sample.last_hidden_state[:, None]], dim=1)
        save_file({"hidden_states": states.contiguous(), "token_ids": ids}, hidden / f"hs_{number}.safetensors")
        torch.save(
            {
                "input_ids": ids.clone(),
                "loss_mask": torch.ones_like(ids),
                "hidden_states": sample.hidden_states.flatten(1).clone(),
            },
            forge / f"hs_{number:03d}.ckpt",
        )
    for number in range(plan["documents"], wanted):
        os.link(hidden / f"hs_{number % plan['documents']}.safetensors", hidden / f"hs_{number}.safetensors")
        os.link(forge / f"hs_{number % plan['documents']:03d}.ckpt", forge / f"hs_{number:03d}.ckpt")
    tokens = [rows[number % plan["documents"]] for number in range(wanted)]
    Dataset.from_dict(
        {"input_ids": tokens, "loss_mask": [[1] * len(row) for row in tokens], "seq_len": [len(row) for row in tokens]}
    ).with_format("torch").save_to_disk(str(folder / "speculators"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a small shape, to try the script")
    parser.add_argument("--only", nargs="*", default=["ours", "ours-kl", "speculators", "specforge"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--documents", type=int, default=8, help="different documents; they come again after that")
    parser.add_argument("--attention", default="flex")
    parser.add_argument("--specforge-attention", default="flex_attention")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds until all have warmed up")
    parser.add_argument("--folder", type=Path, help="needs 20 GB; in memory the disk is not what is measured")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_training.json")
    args = parser.parse_args()

    rows, config = Rows(SEED), drafter(args.small)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        plan = {
            "device": args.device,
            "small": args.small,
            "steps": args.steps,
            "warmup": args.warmup,
            "length": args.length,
            "documents": args.documents,
            "anchors": args.anchors,
            "attention": args.attention,
            "specforge_attention": args.specforge_attention,
            "chunk_blocks": 128,
            "peers": any(one in args.only for one in ("speculators", "specforge")),
            "losses": {
                "ours": {"weights": "decay", "soft_weight": 0.0},
                "ours-kl": {"weights": "streak", "soft_weight": 1.0},
            },
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        prepare(folder, plan, config)
        print("prepared", flush=True)
        found: dict[str, dict[str, Any]] = {}
        # The second recipe of ours finds the first one's kernels compiled.
        waves = [one for one in args.only if one != "ours-kl"], [one for one in args.only if one == "ours-kl"]
        for one, result in itertools.chain.from_iterable(contend(wave, folder, args.limit) for wave in waves if wave):
            found[one] = result
            flops = folder / "ours.flops"
            rows.rows.clear()
            report(rows, found, args, float(flops.read_text()) if flops.exists() else 0.0)
            rows.write(args.out)


def report(rows: Rows, found: dict[str, dict[str, Any]], args: argparse.Namespace, work: float) -> None:
    """Rates against each peer. MFU counts for everybody what the CE loss needs (see drafthouse.drafter.work)."""
    seconds = {one: statistics.median(result["step_seconds"]) for one, result in found.items()}
    rates = {one: args.length / took for one, took in seconds.items()}
    peak = peak_of(torch.device(args.device))
    label = f"{args.length} tokens, {args.anchors} blocks of 16{', small shape' if args.small else ''}"
    own = found.get("ours")
    for one, rate in rates.items():
        others = [other for other in rates if other in ("speculators", "specforge")] if one == "ours" else []
        for other in others or ["-"]:
            rows.add(
                f"training: {one}, {label}",
                rate,
                "tokens/s",
                peer=other,
                ratio=rate / rates[other] if other in rates else 1.0,
                bar=1.3 if other in rates else None,
            )
    for one, result in found.items():
        if peak and work and one != "ours-kl":
            share = work / seconds[one] / peak
            rows.add(f"training: MFU of {one}", share, "of the bf16 peak", peer="data sheet", ratio=share)
        if own is not None and result["peak_bytes"]:
            ratio = result["peak_bytes"] / own["peak_bytes"]
            bar = 1.0 if one in ("speculators", "specforge") else None
            rows.add(
                f"training: peak device memory of {one}",
                result["peak_bytes"] / 2**30,
                "GiB",
                peer="times ours",
                ratio=ratio,
                bar=bar,
            )
        rows.add(f"training: parameters of {one}", result["parameters"], "trained", peer="-", ratio=1.0)


if __name__ == "__main__":
    main()
