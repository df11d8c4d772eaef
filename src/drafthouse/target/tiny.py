"""Train the embedded small target: a real Gated-DeltaNet hybrid of about a million parameters.

It exists so that the whole loop can be seen and tested where no 27B model fits. It is trained on conversations
whose answers are functions of their prompts, with the loss on assistant tokens (other tokens count a tenth):
without that weighting and without copy tasks, copying never appears at this size and a drafter would only learn
the target's favourite constants.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from pydantic import Field, model_validator
from torch import Tensor, nn

from drafthouse.config import Settings, digest_of
from drafthouse.errors import TargetError
from drafthouse.memory import fits
from drafthouse.muon import Muon
from drafthouse.progress import Progress, Silent

# Rows are padded to a multiple of this: the chunk of the GDN fallback, so that padding costs nothing extra.
PAD_MULTIPLE = 64


class Sample(Protocol):
    """One training text: token ids int32 `[length]` and the assistant mask uint8 `[length]`."""

    @property
    def input_ids(self) -> np.ndarray: ...

    @property
    def loss_mask(self) -> np.ndarray: ...


class TinyShape(Settings):
    """Sizes of the small hybrid; three linear layers to one full-attention layer, as in Qwen3.5."""

    hidden_size: int = Field(128, ge=16)
    intermediate_size: int = Field(384, ge=16)
    num_hidden_layers: int = Field(4, ge=4, description="a multiple of 4 keeps the 3:1 pattern")
    num_attention_heads: int = Field(4, ge=1)
    num_key_value_heads: int = Field(2, ge=1)
    head_dim: int = Field(32, ge=8)
    linear_num_key_heads: int = Field(2, ge=1)
    linear_num_value_heads: int = Field(2, ge=1)
    linear_head_dim: int = Field(64, ge=8, description="key and value dimension of a linear head")
    max_position_embeddings: int = Field(4096, ge=64)

    @model_validator(mode="after")
    def _check(self) -> TinyShape:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError("linear_num_value_heads must be a multiple of linear_num_key_heads")
        return self

    def to_config(self, vocab_size: int, eos_token_id: int, pad_token_id: int) -> Any:
        """The transformers config of this shape."""
        return transformers.Qwen3_5TextConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            linear_num_key_heads=self.linear_num_key_heads,
            linear_num_value_heads=self.linear_num_value_heads,
            linear_key_head_dim=self.linear_head_dim,
            linear_value_head_dim=self.linear_head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            tie_word_embeddings=False,
        )


class TinyTraining(Settings):
    """How the small target is trained."""

    steps: int = Field(1500, ge=1)
    rows: int = Field(8, ge=1, description="conversations a step")
    muon_lr: float = Field(0.005, gt=0, description="hidden matrices (Muon)")
    adam_lr: float = Field(0.004, gt=0, description="embeddings, head, norms, convolutions (AdamW)")
    warmup_steps: int = Field(100, ge=0)
    decay_fraction: float = Field(0.3, ge=0, le=1, description="share of the steps in which the rate falls to 0")
    clip_norm: float = Field(1.0, gt=0)
    other_token_weight: float = Field(0.1, ge=0, description="loss weight of tokens outside assistant turns")
    autocast: Literal["off", "bfloat16"] = Field("off", description="bfloat16 pays on a GPU or an AMX CPU")
    seed: int = 0
    log_every: int = Field(25, ge=1)


def learning_rate(step: int, training: TinyTraining) -> float:
    """Warm-up, constant, linear to zero (WSD), as a factor of the peak; a pure function of the step."""
    warm = min(1.0, (step + 1) / max(1, training.warmup_steps))
    decay_steps = math.ceil(training.steps * training.decay_fraction)
    left = training.steps - step
    return warm * (min(1.0, left / decay_steps) if decay_steps else 1.0)


def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter from one CPU generator in name order: the same weights under any library version."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            value = torch.empty(parameter.shape)
            if name.endswith("A_log"):
                value.uniform_(0.01, 16.0, generator=generator).log_()
            elif name.endswith("conv1d.weight"):
                bound = parameter.shape[-1] ** -0.5
                value.uniform_(-bound, bound, generator=generator)
            elif parameter.ndim >= 2:
                value.normal_(0.0, 0.02, generator=generator)
            elif name.endswith(("linear_attn.norm.weight", "dt_bias")):
                value.fill_(1.0)
            else:
                value.zero_()  # Qwen3.5 norms scale by (1 + weight)
            parameter.copy_(value)


def batches(samples: Sequence[Sample], rows: int, seed: int, pad_id: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (input_ids `[rows, seq]` int64, assistant mask `[rows, seq]` float32), reshuffled every epoch.

    Samples are bucketed by length inside windows of 32 batches: little padding, and still a new mix each epoch.
    What does not fill a batch is left out by chance, before the bucketing, which would always leave out the
    longest.
    """
    random = np.random.default_rng(seed)
    lengths = np.array([len(sample.input_ids) for sample in samples])
    while True:
        order = random.permutation(len(samples))[: len(samples) // rows * rows]
        for start in range(0, len(order), rows * 32):
            window = order[start : start + rows * 32]
            window = window[np.argsort(lengths[window], kind="stable")]
            groups = [window[i : i + rows] for i in range(0, len(window), rows)]
            for index in random.permutation(len(groups)):
                yield collate([samples[i] for i in groups[index]], pad_id)


def collate(samples: Sequence[Sample], pad_id: int) -> tuple[Tensor, Tensor]:
    """Right-pad to a multiple of `PAD_MULTIPLE`: ids `[rows, seq]` int64 and assistant mask float32."""
    longest = max(len(sample.input_ids) for sample in samples)
    width = -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE
    ids = np.full((len(samples), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(samples), width), dtype=np.float32)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.input_ids)] = sample.input_ids
        mask[row, : len(sample.input_ids)] = sample.loss_mask
    return torch.from_numpy(ids), torch.from_numpy(mask)


def weighted_loss(
    logits: Tensor, ids: Tensor, mask: Tensor, pad_id: int, other_weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Next-token loss with assistant tokens at weight 1 and other real tokens at `other_weight`.

    Returns:
        The loss that is minimised, and mean loss and accuracy over assistant tokens only (both detached).
    """
    labels, on = ids[:, 1:], mask[:, 1:]
    losses = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels.flatten(), reduction="none")
    losses = losses.view_as(on)
    weights = torch.where(on > 0, 1.0, other_weight) * (labels != pad_id)
    count = on.sum().clamp_min(1)
    right = (logits[:, :-1].argmax(-1) == labels) * on
    return (
        # Weights may all be zero: no assistant token in the batch, and the others do not count.
        (losses * weights).sum() / weights.sum().clamp_min(1e-6),
        ((losses * on).sum() / count).detach(),
        (right.sum() / count).detach(),
    )


def train_tiny(
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
    tokenizer: Any,
    out: Path,
    shape: TinyShape,
    training: TinyTraining,
    *,
    device: str | torch.device = "cpu",
    provenance: dict[str, Any] | None = None,
    progress: Progress | None = None,
    on_log: Callable[[dict[str, Any]], None] | None = None,
    finish: Callable[[nn.Module, Any], Any] | None = None,
) -> dict[str, Any]:
    """Train from random weights and write a model folder that `Target.load` reads.

    Args:
        samples, held_out: training texts, and texts that only the printed held-out loss sees.
        tokenizer: a fast tokenizer with eos and pad tokens; saved beside the weights.
        out: folder to write; the weights appear last and at once.
        provenance: what else to keep in training.json (data hash, command).
        finish: called with the finished model and tokenizer; its answer is kept as "guard".

    Returns:
        The content of training.json: settings, loss curve, held-out loss and accuracy, seconds, versions.

    Raises:
        TargetError: fewer samples than one batch, or `out` holds something that is no trained small target.
        OutOfMemoryError: the batch does not fit the device.
    """
    if len(samples) < training.rows:
        raise TargetError(
            f"{len(samples)} samples do not fill one batch of {training.rows}",
            where="target.training.rows",
            fix="build a larger corpus or lower it",
        )
    check_replaceable(out)
    pad_id = int(tokenizer.pad_token_id)
    config = shape.to_config(len(tokenizer), int(tokenizer.eos_token_id), pad_id)
    model = transformers.Qwen3_5ForCausalLM(config)
    initialise(model, training.seed)
    model.to(device).train()
    optimizers = build_optimizers(model, training.muon_lr, training.adam_lr)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    curve: list[dict[str, Any]] = []
    tokens, began = 0, time.perf_counter()
    source = batches(samples, training.rows, training.seed, pad_id)
    with (
        fits(f"a batch of {training.rows} rows does not fit {device}", where="target.training.rows", fix="lower it"),
        (progress or Silent()).task("train the small target", training.steps) as task,
    ):
        for step in range(training.steps):
            ids, mask = next(source)
            tokens += int((ids != pad_id).sum())
            ids, mask = ids.to(device), mask.to(device)
            factor = learning_rate(step, training)
            for optimizer, peak in zip(optimizers, peaks, strict=True):
                optimizer.param_groups[0]["lr"] = peak * factor
                optimizer.zero_grad(set_to_none=True)
            loss, assistant_loss, accuracy = _step_loss(model, ids, mask, pad_id, training)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
            for optimizer in optimizers:
                optimizer.step()
            if step % training.log_every == 0 or step == training.steps - 1:
                entry = {
                    "step": step,
                    "tokens": tokens,
                    "loss": round(loss.item(), 5),
                    "assistant_loss": round(float(assistant_loss), 5),
                    "assistant_accuracy": round(float(accuracy), 4),
                    "seconds": round(time.perf_counter() - began, 2),
                }
                curve.append(entry)
                if on_log is not None:
                    on_log(entry)
            task.advance(1, None if step % 10 else f"loss {loss.item():.3f}")
    seconds = time.perf_counter() - began
    # What is stored is what is judged. Parameters only: rounded rotary frequencies would be another model.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    held = held_out_accuracy(model, held_out, pad_id, device) if held_out else None
    report = {
        "shape": shape.model_dump(),
        "training": training.model_dump(),
        "settings_digest": digest_of({"shape": shape.model_dump(), "training": training.model_dump()}),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "samples": len(samples),
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "device": str(device),
        "held_out": held,
        "guard": finish(model.eval(), tokenizer) if finish is not None else None,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "curve": curve,
        **(provenance or {}),
    }
    write_target(model, tokenizer, out, report)
    return report


def build_optimizers(
    model: nn.Module, muon_lr: float, adam_lr: float, muon: Callable[..., torch.optim.Optimizer] = Muon
) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices, AdamW for embeddings, head, norms and convolutions."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
        (matrices if hidden else others).append(parameter)
    return [
        muon(matrices, lr=muon_lr),
        torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _step_loss(
    model: nn.Module, ids: Tensor, mask: Tensor, pad_id: int, training: TinyTraining
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=training.autocast == "bfloat16"):
        logits = model(input_ids=ids, use_cache=False).logits
    return weighted_loss(logits, ids, mask, pad_id, training.other_token_weight)


@torch.no_grad()
def held_out_accuracy(
    model: nn.Module, samples: Sequence[Sample], pad_id: int, device: str | torch.device
) -> dict[str, float]:
    """Mean loss and next-token accuracy over assistant tokens; puts the model into eval mode."""
    model.eval()
    losses, rights, counts = 0.0, 0.0, 0.0
    for start in range(0, len(samples), 32):
        ids, mask = (x.to(device) for x in collate(samples[start : start + 32], pad_id))
        _, loss, accuracy = weighted_loss(model(input_ids=ids, use_cache=False).logits, ids, mask, pad_id, 0.0)
        count = float(mask[:, 1:].sum())
        losses, rights, counts = (
            losses + float(loss) * count,
            rights + float(accuracy) * count,
            counts + count,
        )
    counts = max(counts, 1.0)
    return {"assistant_loss": round(losses / counts, 5), "assistant_accuracy": round(rights / counts, 5)}


def check_replaceable(folder: Path) -> None:
    """Raise TargetError when writing a target to `folder` would replace something that is not one."""
    if folder.exists() and not (folder.is_dir() and ((folder / "training.json").exists() or not any(folder.iterdir()))):
        raise TargetError(
            "this is no trained small target and would be replaced", where=str(folder), fix="give a new folder"
        )


def write_target(model: Any, tokenizer: Any, out: Path, report: dict[str, Any]) -> None:
    """A model folder with its tokenizer and training.json, at once; one that `check_replaceable` allows is replaced."""
    staging, old = out.with_name(out.name + ".partial"), out.with_name(out.name + ".old")
    for leftover in (staging, old):  # of a run that was killed while it wrote
        shutil.rmtree(leftover, ignore_errors=True)
    staging.mkdir(parents=True)
    model.cpu().to(torch.bfloat16).save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    (staging / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if out.exists():
        out.rename(old)
    staging.rename(out)
    shutil.rmtree(old, ignore_errors=True)
