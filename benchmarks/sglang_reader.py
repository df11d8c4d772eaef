"""Does SGLang read our export as it was trained? Its own config and draft model against ours, without a GPU.

Drafters of every pattern of layers (full, sliding, both) are exported for the target of the package and read by
SGLang 0.5.17's classes. Compared: the distributions of all slots of blocks behind held-out texts, in float32. The same
with states of other layers shows what a wrong tap would cost. And: does our plug-in, hooked into SGLang's model as a
server does it, write the states of the layers that it is told? gpu_sglang.py does the whole on a GPU, served.

python benchmarks/sglang_gate/bundle.py WHEELS SITE site.tar.xz
python benchmarks/sglang_reader.py --site SITE --python ENGINE_PYTHON   # Python 3.12 that has torch 2.11 and numpy
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from rows import Rows
from sglang_gate.folders import serveable
from sglang_gate.no_gpu import stand_ins
from sglang_gate.servers import profile_of

from drafthouse.corpus import CorpusSettings, prompts
from drafthouse.decode.draft import DraftContext
from drafthouse.drafter import DFlashDrafter, DrafterConfig, DrafterShape, load_drafter, save_drafter
from drafthouse.loop.tiny import embedded_target
from drafthouse.serve.launch import launch_line
from drafthouse.target import Target

LARGEST_VARIATION, SMALLEST_CONTROL = 1e-3, 0.1
TAPS, OTHER_TAPS, WINDOW = (0, 1, 2), (1, 2, 3), 16
PATTERNS: dict[str, tuple[str, ...]] = {
    "full layers": ("full_attention",) * 2,
    "sliding and full layers": ("sliding_attention", "full_attention"),
    "sliding layers": ("sliding_attention",) * 2,
}


def exported(folder: Path, target: Target, layers: tuple[str, ...]) -> DFlashDrafter:
    """A drafter with random weights, large enough that every part of it shows in its distributions."""
    shape = DrafterShape.model_validate(
        {"head_dim": 64, "target_layer_ids": TAPS, "layer_types": layers, "sliding_window": WINDOW}
    )
    config: DrafterConfig = shape.for_target(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        mask_token_id=target.mask_token_id,
        identity=target.identity,
    )
    generator = torch.Generator().manual_seed(0)
    drafter = DFlashDrafter(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            spread, mean = (0.08, 0.0) if parameter.ndim == 2 else (0.2, 1.0)
            parameter.normal_(mean, spread, generator=generator)
    save_drafter(folder, drafter)
    return load_drafter(folder, target_identity=target.identity)


@torch.no_grad()
def reference(target: Target, drafter: DFlashDrafter, texts: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """For blocks behind texts: states of the taps (and of other layers), embeddings, and our slots' logits."""
    config, found = drafter.config, {"lm_head": target.model.get_parameter("lm_head.weight").detach().clone()}
    for number, text in enumerate(texts):
        ids = torch.from_numpy(text.astype(np.int64)).unsqueeze(0)
        length = torch.tensor([len(text)])
        for anchor in (len(text) // 3, len(text) - 1):
            states = target.capture(ids, length, TAPS)[:, :, :-1]
            context = DraftContext(drafter, target, 1, len(text) + config.block_size)
            context.extend(states, torch.arange(anchor).unsqueeze(0), torch.tensor([anchor]))
            block = torch.full((1, config.block_size), config.mask_token_id)
            block[0, 0] = ids[0, anchor]
            key = f"{number}-{anchor}"
            other = target.capture(ids, length, OTHER_TAPS)[0, :anchor, :-1]
            found |= {
                f"{key}.states": states[0, :anchor].flatten(1).clone(),
                f"{key}.other": other.flatten(1).clone(),
                f"{key}.block": target.embed(block)[0].clone(),
                f"{key}.ours": context.propose(ids[:, anchor])[0].clone(),
            }
    return found


def read_by_engine(
    work: Path, args: argparse.Namespace, pairs: list[Path]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What SGLang's classes made of drafters and references, which follow each other in `pairs`; what our plug-in
    tapped of its target model."""
    served = serveable(embedded_target(), work / "served", "wrapper")
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | stand_ins(work / "stand-ins", args.site)
    folder = Path(__file__).parent
    environment["PYTHONPATH"] += f":{folder}:{folder.parent / 'src'}"

    def run(script: str, answers: int, *words: Path, **server: Any) -> list[dict[str, Any]]:
        profile = profile_of("reader", served, 31_000, python="python3", **server)
        line = work / f"{script}.json"
        line.write_text(json.dumps(launch_line(profile).argv[3:]), encoding="utf-8")
        command = [args.python, str(folder / "sglang_gate" / script), str(line), *map(str, words)]
        done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, check=False)
        found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        if done.returncode or len(found) != answers:
            raise SystemExit(f"SGLang's classes did not come through {script}:\n{done.stderr[-2000:]}")
        return found

    read = run("reading.py", len(pairs) // 2, *pairs, draft=pairs[0])
    return read, run("tapping.py", 1, served, work / "states", states=True)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, required=True, help="the engine's packages, as bundle.py lays them out")
    parser.add_argument("--python", required=True, help="an interpreter for them")
    parser.add_argument(
        "--drafter", type=Path, nargs="*", default=[], help="exports for the package's target, also read"
    )
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sglang_reader.json")
    args = parser.parse_args()
    args.site = args.site.resolve()
    torch.set_num_threads(1)
    target = Target.load(embedded_target())
    texts = [one.input_ids for one in prompts(CorpusSettings(heldout=1, seed=11), target.tokenizer)][: args.texts]
    rows = Rows(0)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        drafters: dict[str, tuple[Path, DFlashDrafter]] = {}
        for number, (pattern, layers) in enumerate(PATTERNS.items()):
            folder = work / f"drafter-{number}"
            drafters[pattern] = (folder, exported(folder, target, layers))
        for folder in args.drafter:
            drafters[folder.name] = (folder.resolve(), load_drafter(folder, target_identity=target.identity))
        pairs: list[Path] = []
        for number, (folder, drafter) in enumerate(drafters.values()):
            save_file(reference(target, drafter, texts), work / f"{number}.safetensors")
            pairs += [folder, work / f"{number}.safetensors"]
        read, tapped = read_by_engine(work, args, pairs)
        for (pattern, (_, drafter)), found in zip(drafters.items(), read, strict=True):
            if found["other_taps"] < SMALLEST_CONTROL:
                raise SystemExit(f"{pattern}: states of other layers change nothing, so that equality shows nothing")
            rows.add(
                f"sglang reader: {pattern}",
                found["total_variation"],
                "total variation",
                peer="ours, float32",
                ratio=LARGEST_VARIATION / max(1e-12, found["total_variation"]),
                bar=1.0,
                details=found | {"layer_types": list(drafter.config.layer_types)},
            )
    if not tapped["equal"]:
        raise SystemExit(f"our plug-in writes no state that SGLang's model has: off by up to {tapped['worst']:g}")
    rows.add(
        "sglang reader: states that our plug-in writes",
        tapped["equal"],
        "tokens to the bit",
        peer="what enters SGLang's layers and its last norm",
        ratio=tapped["equal"] / tapped["tokens"],
        bar=1.0,
        details=tapped,
    )
    rows.write(args.out)
    if not all(row["met"] for row in rows.rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
