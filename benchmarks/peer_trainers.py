"""One training run of one contender, timed step by step: the child process of gpu_training.py.

Each contender is its own program with its own loader, optimiser and kernels. Only its optimiser step is wrapped, to
read the clock after the device has finished; what it does is not changed.

python benchmarks/peer_trainers.py {ours|ours-kl|speculators|specforge} FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch


class Clock:
    """Counts steps; after the last one the result is written and the process ends, checkpoints unwritten."""

    def __init__(self, folder: Path, name: str, plan: dict[str, Any]) -> None:
        self.folder, self.name, self.plan = folder, name, plan
        self.marks: list[float] = []
        self.parameters = 0

    def mark(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())
        print(f"step {len(self.marks)} at {self.marks[-1]:.3f} s", flush=True)
        if len(self.marks) > 2:
            self.write()

    def tick(self) -> None:
        self.mark()
        if len(self.marks) > self.plan["steps"]:
            self.finish()

    def finish(self) -> None:
        self.write()
        sys.stdout.flush()
        os._exit(0)

    def write(self) -> None:
        """After every step: a contender that is cut off leaves what it has measured."""
        cuda = torch.cuda.is_available()
        result = {
            "step_seconds": [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)],
            "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
            "parameters": self.parameters,
        }
        (self.folder / f"{self.name}.json").write_text(json.dumps(result))


def trainable(model: Any) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def ours(folder: Path, plan: dict[str, Any], clock: Clock) -> None:
    """Our trainer on the states run, CE with decay or the soft-label recipe."""
    from gpu_training import FrozenHead

    from drafthouse.drafter import DrafterConfig, TrainSettings, train
    from drafthouse.drafter.metrics import read_metrics
    from drafthouse.drafter.trainer import Observer
    from drafthouse.states import StatesReader
    from drafthouse.store import Store

    class Watch(Observer):
        def stepped(self, row: Any) -> None:
            clock.mark()

    config = DrafterConfig.from_hf_dict(json.loads((folder / "draft" / "config.json").read_text()))
    head = FrozenHead(folder / "target", plan["device"])
    reader = StatesReader(Store.open(str(folder / "store")), "run", in_memory_bytes=64 << 30)
    settings = TrainSettings.model_validate(
        {
            "steps": plan["steps"] + 1,
            "rows": 1,
            "anchors": plan["anchors"],
            "optimizer": {"lr": 6e-4},
            "loss": plan["losses"][clock.name] | {"chunk_blocks": plan["chunk_blocks"]},
            "autocast": "bf16",
            "attention": plan["attention"],
            "compile": True,
            "log_every": 10**6,
            "checkpoint_every": 10**6,
        }
    )
    clock.parameters = sum(p.numel() for p in _built(config).parameters())

    def enough() -> bool:
        if len(clock.marks) > plan["steps"]:
            row = read_metrics(folder / clock.name / "metrics.jsonl")[-1]
            print(json.dumps({key: row.get(key) for key in ("loss", "flops", "tokens_per_s", "mfu", "gpu_power_w")}))
            (folder / f"{clock.name}.flops").write_text(str(row["flops"]))
            clock.finish()
        return False

    train(reader, head, config, settings, folder / clock.name, stop=enough, observer=Watch())


def _built(config: Any) -> Any:
    from drafthouse.drafter import DFlashDrafter

    with torch.device("meta"):
        return DFlashDrafter(config)


def speculators(folder: Path, plan: dict[str, Any], clock: Clock) -> None:
    """speculators' own command line, its defaults except for the shape and the loss."""
    import datasets
    import speculators.train.trainer as trainer
    from speculators.__main__ import app

    datasets.config.TORCHVISION_AVAILABLE = False  # it looks for a video reader that this torchvision no longer has

    step = trainer.Trainer._optimizers_step

    def timed(self: Any) -> None:
        clock.parameters = clock.parameters or trainable(self.model)
        step(self)
        clock.tick()

    trainer.Trainer._optimizers_step = timed
    config = json.loads((folder / "draft" / "config.json").read_text())
    sys.argv = [
        "speculators", "train",
        "--speculator-type", "dflash",
        "--verifier-name-or-path", str(folder / "target"),
        "--draft-config", str(folder / "decoder.json"),
        "--data-path", str(folder / "speculators"),
        "--on-missing", "raise",
        "--block-size", str(config["block_size"]),
        "--max-anchors", str(plan["anchors"]),
        # It counts the embedding as id 0.
        "--target-layer-ids", *[str(i + 1) for i in config["dflash_config"]["target_layer_ids"]],
        "--mask-token-id", str(config["dflash_config"]["mask_token_id"]),
        "--hidden-states-dtype", "bfloat16",
        "--total-seq-len", str(plan["length"]),
        "--train-data-ratio", "0.9",
        "--epochs", "2",
        "--num-workers", "4",
        "--optimizer", "adamw",
        "--lr", "6e-4",
        "--loss-fn", "ce",
        "--per-position-loss-weight", "fixed-exp-decay",
        "--log-freq", "1000",
        "--save-path", str(folder / "speculators-checkpoints"),
    ]  # fmt: skip
    app()


def specforge(folder: Path, plan: dict[str, Any], clock: Clock) -> None:
    """SpecForge's own command line, its defaults except for the shape."""
    import specforge.optimizer as optimizer
    import yaml
    from specforge.cli import main

    step = optimizer.BF16Optimizer.step

    def timed(self: Any, *arguments: Any, **named: Any) -> Any:
        clock.parameters = clock.parameters or sum(p.numel() for p in self.model_params)
        result = step(self, *arguments, **named)
        clock.tick()
        return result

    optimizer.BF16Optimizer.step = timed
    run = {
        "model": {
            "target_model_path": str(folder / "target"),
            "draft_model_config": str(folder / "draft"),
            "mask_token_id": json.loads((folder / "draft" / "config.json").read_text())["dflash_config"][
                "mask_token_id"
            ],
            "torch_dtype": "bfloat16",
        },
        "data": {
            "hidden_states_path": str(folder / "specforge"),
            "max_length": plan["length"],
            "dataloader_num_workers": 4,
        },
        "training": {
            "strategy": "dflash",
            "num_epochs": 2,
            "batch_size": 1,
            "learning_rate": 6e-4,
            "max_grad_norm": 1.0,
            "attention_backend": plan["specforge_attention"],
            "fsdp_sharding": "NO_SHARD",
            "num_anchors": plan["anchors"],
            "loss_decay_gamma": 7.0,
            "log_interval": 1000,
        },
        "output_dir": str(folder / "specforge-output"),
    }
    (folder / "specforge.yaml").write_text(yaml.safe_dump(run))
    main(["train", "-c", str(folder / "specforge.yaml")])


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    plan = json.loads((folder / "plan.json").read_text())
    sys.path.insert(0, str(Path(__file__).parent))
    contenders = {"speculators": speculators, "specforge": specforge}
    contenders.get(name, ours)(folder, plan, Clock(folder, name, plan))
    raise SystemExit(f"{name} ended before it had made {plan['steps']} steps")


if __name__ == "__main__":
    main()
