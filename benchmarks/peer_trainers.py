"""One training run of one contender, timed step by step: the child process of gpu_training.py.

Each contender is its own program with its own loader, optimiser and kernels. Only its optimiser step is wrapped, to
wait for its turn on the device and to read the clock after the device has finished; what it does is not changed.

python benchmarks/peer_trainers.py {ours|ours-kl|speculators|specforge} FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch


class Clock:
    """Counts optimiser steps. After the warm-up the process waits at a gate until the device is its own, and after the
    last step the result is written and the process ends, checkpoints unwritten."""

    def __init__(self, folder: Path, name: str, plan: dict[str, Any]) -> None:
        self.folder, self.name, self.plan = folder, name, plan
        self.warmed = 0
        self.marks: list[float] = []
        self.parameters = 0
        self.began = time.perf_counter()

    def mark(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.warmed < self.plan["warmup"]:
            self.warmed += 1
            print(f"warm-up step {self.warmed} at {now - self.began:.3f} s", flush=True)
            if self.warmed == self.plan["warmup"]:
                self.gate()
            return
        # The step after the gate fills the allocator's cache again: its end is where the clock starts.
        self.marks.append(now)
        print(f"step {len(self.marks)} at {now - self.began:.3f} s", flush=True)
        if len(self.marks) > 1:
            self.write()

    def gate(self) -> None:
        """Leave the device to the others' warm-up until the parent says go."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        (self.folder / f"{self.name}.ready").touch()
        while not (self.folder / f"{self.name}.go").exists():
            time.sleep(0.05)

    @property
    def done(self) -> bool:
        return len(self.marks) > self.plan["steps"]

    def tick(self) -> None:
        self.mark()
        if self.done:
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


def steps_of(plan: dict[str, Any]) -> int:
    """Optimiser steps of a contender: warm-up, the one after the gate, the timed ones."""
    return int(plan["warmup"]) + 1 + int(plan["steps"])


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
            "steps": steps_of(plan),
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
        if clock.done:
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


def without_video() -> None:
    """datasets 4.5 looks for a video reader that torchvision 0.26 no longer has, in every process that reads a set."""
    import datasets

    datasets.config.TORCHVISION_AVAILABLE = False


def tell_where(every_s: float = 30.0) -> None:
    """A thread that says what the main one is at: of a start that takes minutes the log should say why."""
    main_thread = threading.main_thread().ident

    def watch() -> None:
        while True:
            time.sleep(every_s)
            frame = sys._current_frames().get(main_thread or 0)
            inner = traceback.extract_stack(frame)[-4:] if frame is not None else []
            print("at " + " < ".join(f"{one.name}:{one.lineno}" for one in reversed(inner)), flush=True)

    threading.Thread(target=watch, daemon=True).start()


def speculators(folder: Path, plan: dict[str, Any], clock: Clock) -> None:
    """speculators' own command line, its defaults except for the shape, the loss and what stops it here."""
    import speculators.train.trainer as trainer
    import torch._dynamo.config as dynamo_config
    import torch._inductor.config as inductor_config
    from speculators.__main__ import app

    without_video()
    tell_where()
    # Two things keep its compiled step from ever starting under torch 2.11. Its mask is built by one reduction over
    # tiles of 16,384 pairs, whose compilation takes over four minutes; and its fused loss cannot be traced (dynamo:
    # "already tracked for mutation"), so that part runs as it is written.
    inductor_config.triton.persistent_reductions = False
    dynamo_config.suppress_errors = True
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


if __name__ == "__mp_main__":  # a loader that speculators has spawned
    without_video()
if __name__ == "__main__":
    main()
