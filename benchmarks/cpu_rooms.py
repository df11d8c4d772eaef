"""What the rooms cost on a CPU, as ratios against named peers in one run (CPU seconds, best of N).

python benchmarks/cpu_rooms.py                  # leaves benchmarks/results/cpu_rooms.json
python benchmarks/cpu_rooms.py --quick --out /tmp/rows.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from rows import Rows, race

from drafthouse.corpus import CorpusReader, CorpusSettings, GrammarSource, build
from drafthouse.decode import DecodeSettings, Stepper, decode, gdn
from drafthouse.decode.topology import Topology
from drafthouse.drafter import DFlashDrafter, DrafterConfig
from drafthouse.loop.answers import prompt_of
from drafthouse.loop.tiny import embedded_target
from drafthouse.muon import Muon
from drafthouse.states import ExtractSettings, run_worker
from drafthouse.store import Store
from drafthouse.target import Target

SEED = 0
TAPS = (0, 1, 2)


def extraction(rows: Rows, target: Target, repeats: int, samples: int) -> None:
    """Capture and write against the bare forward of the same rows, and against one forward and file a sample."""
    sources = tuple(GrammarSource(kind=kind) for kind in ("tool_call", "lookup", "repeat"))
    settings = CorpusSettings(sources=sources, samples=samples, samples_per_shard=32, seed=SEED)
    extract = ExtractSettings(layer_ids=TAPS, rows=16, max_tokens=256, batch_tokens=4096)
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(folder)
        build(settings, target.tokenizer, store, "corpus")
        corpus = CorpusReader(store, "corpus")
        shards = [corpus.shard(name) for name in corpus.shard_names]
        runs = iter(range(1000))

        def captured() -> None:
            run_worker(store, f"run-{next(runs)}", corpus, target, extract, "bench")

        @torch.no_grad()
        def bare() -> None:
            for shard in shards:
                ordered = sorted(shard, key=lambda sample: -len(sample.input_ids))
                for start in range(0, len(ordered), 16):
                    group = ordered[start : start + 16]
                    width = -(-len(group[0].input_ids) // 64) * 64
                    ids = np.zeros((len(group), width), dtype=np.int64)
                    for row, sample in enumerate(group):
                        ids[row, : len(sample.input_ids)] = sample.input_ids
                    target.decoder(input_ids=torch.from_numpy(ids), use_cache=False)

        def naive() -> None:
            for shard in shards:
                for sample in shard:
                    ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
                    states = target.capture(ids, torch.tensor([ids.shape[1]]), TAPS)[0]
                    tensors = {str(k): states[:, k].to(torch.bfloat16).clone() for k in range(len(TAPS) + 1)}
                    save_file(tensors, Path(folder) / f"{sample.id}.safetensors")

        tokens = corpus.manifest.tokens
        ours, forward, single = race(repeats, captured, bare, naive)
    rows.add("states: capture and write", tokens / ours, "tokens/CPU-s", peer="bare forward", ratio=forward / ours)
    rows.add("states: capture and write", tokens / ours, "tokens/CPU-s", peer="file a sample", ratio=single / ours)


def decoding(rows: Rows, target: Target, repeats: int, prompts: list[np.ndarray]) -> None:
    """Our pass over forests, as plain greedy decoding, against transformers' cached generate."""
    for batch in (1, len(prompts)):
        asked = prompts[:batch]
        width = max(map(len, asked))
        ids = torch.zeros(batch, width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(asked):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, width - len(prompt) :] = 1
        plan = DecodeSettings(mode="autoregressive", rows=batch, max_new_tokens=48)

        def ours(asked: list[np.ndarray] = asked, plan: DecodeSettings = plan) -> int:
            return sum(len(g.tokens) for g in decode(Stepper(target), None, asked, plan))

        def theirs(ids: torch.Tensor = ids, mask: torch.Tensor = mask) -> None:
            target.model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=48, pad_token_id=0
            )

        tokens = ours()
        mine, peer = race(repeats, ours, theirs)
        rows.add(
            f"decode: greedy, batch {batch}",
            tokens / mine,
            "tokens/CPU-s",
            peer="transformers generate",
            ratio=peer / mine,
        )


def delta_rule(rows: Rows, repeats: int, lengths: tuple[int, ...]) -> None:
    """Verification of a tree by one GDN layer of the 27B shape: the ancestor-masked form against a state a node."""
    generator = torch.Generator().manual_seed(SEED)
    heads, dim = 48, 128
    state = torch.randn(1, heads, dim, dim, generator=generator)
    for length in lengths:
        parents = torch.tensor([[-1, *((i - 1) // 2 for i in range(1, length))]])
        topology = Topology.forest(parents)
        query, key, value = (torch.randn(1, length, heads, dim, generator=generator) for _ in range(3))
        inputs = gdn.DeltaInputs(
            query=torch.nn.functional.normalize(query, dim=-1) * dim**-0.5,
            key=torch.nn.functional.normalize(key, dim=-1),
            value=value,
            g=-torch.rand(1, length, heads, generator=generator),
            beta=torch.rand(1, length, heads, generator=generator),
        )

        def forest(inputs: gdn.DeltaInputs = inputs, topology: Topology = topology) -> None:
            gdn.forest_forward(inputs, state, topology)

        def oracle(inputs: gdn.DeltaInputs = inputs, topology: Topology = topology) -> None:
            gdn.per_node(inputs, state, topology)

        ours, peer = race(repeats, forest, oracle)
        rows.add(
            f"decode: gated delta rule, T={length}",
            ours * 1e3,
            "CPU-ms/layer",
            peer="a state a node",
            ratio=peer / ours,
        )


def drafter_step(rows: Rows, repeats: int) -> None:
    """One forward and backward of the demo's drafter with each attention, and one step of each Muon."""
    generator = torch.Generator().manual_seed(SEED)
    config = DrafterConfig(
        hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, block_size=8, target_layer_ids=TAPS, num_target_layers=4, vocab_size=1024, mask_token_id=3,
    )  # fmt: skip
    taps = torch.randn(8, 192, 3 * 128, generator=generator)
    embeddings = torch.randn(8, 24, 8, 128, generator=generator)
    anchors = torch.randint(64, 184, (8, 24), generator=generator).sort(dim=1).values
    positions = torch.arange(192).expand(8, 192)

    def step(model: DFlashDrafter) -> Callable[[], None]:
        def work() -> None:
            model.zero_grad()
            model(taps, embeddings, anchors, positions).square().sum().backward()

        return work

    split, dense = (DFlashDrafter(config, attention=kind) for kind in ("split", "dense"))
    ours, peer = race(repeats, step(split), step(dense))
    rows.add("drafter: split attention step", ours * 1e3, "CPU-ms", peer="dense SDPA", ratio=peer / ours)
    matrices = [parameter for parameter in split.parameters() if parameter.ndim == 2]
    mine, library = race(repeats, Muon(matrices, lr=1e-4).step, torch.optim.Muon(matrices, lr=1e-4).step)
    rows.add("Muon in float32 on a CPU", mine * 1e3, "CPU-ms/step", peer="torch.optim.Muon", ratio=library / mine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; for tests")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu_rooms.json")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    repeats, samples = (1, 32) if chosen.quick else (5, 256)
    rows, target = Rows(SEED), Target.load(embedded_target())
    extraction(rows, target, repeats, samples)
    settings = CorpusSettings(samples=8 if chosen.quick else 32, seed=SEED, sources=(GrammarSource(kind="repeat"),))
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(folder)
        build(settings, target.tokenizer, store, "corpus")
        asked = [prompt_of(sample) for sample in CorpusReader(store, "corpus")]
    decoding(rows, target, repeats, asked)
    delta_rule(rows, repeats, (17,) if chosen.quick else (17, 33, 65))
    drafter_step(rows, repeats)
    rows.write(chosen.out)


if __name__ == "__main__":
    main()
