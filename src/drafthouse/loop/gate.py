"""The export gate: what a drafter has to show before an engine gets it.

The written checkpoint is read back (config, tensor names, shapes: `drafter.export`). Then two things that no look at
files can show: that the pass that trained it and the pass that decodes with it, which share no code for context and
cache, mean the same; and that a drafter of this shape which has learned one text by heart, through the same
extraction, training and export, is accepted in whole blocks. A tap shifted by one layer, a norm applied twice,
positions off by one: each of them passes every check of names and shapes, and fails here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafthouse.corpus.records import Prompt, TokenSample
from drafthouse.decode import DecodeSettings, Stepper, decode
from drafthouse.decode.draft import DraftContext
from drafthouse.drafter import DrafterConfig, TrainSettings, load_drafter, train
from drafthouse.drafter.model import DFlashDrafter
from drafthouse.errors import DrafterError
from drafthouse.progress import Progress, Silent
from drafthouse.states import ExtractSettings, StatesReader, run_worker
from drafthouse.store import Store
from drafthouse.target import Target

# Total variation between two passes over the same weights: rounding, in the arithmetic of the target.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
_ANCHORS = 12
_BLOCKS = 4  # of the text that is learned by heart


@dataclass(frozen=True)
class Parity:
    """The training pass against the cached one on the same blocks.

    Attributes:
        blocks: that were compared.
        distance: greatest total variation (0 to 1) between the two distributions of a slot.
        agreement: share of slots whose most likely token is the same.
        tolerance: what `distance` may be.
    """

    blocks: int
    distance: float
    agreement: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.distance <= self.tolerance


@dataclass(frozen=True)
class ByHeart:
    """A drafter that has learned one text: tokens that each target pass emitted while decoding it.

    `passed`: every pass but the last emitted a whole block.
    """

    rounds: tuple[int, ...]
    block_size: int
    steps: int
    loss: float

    @property
    def passed(self) -> bool:
        return len(self.rounds) > 1 and all(count == self.block_size for count in self.rounds[:-1])


def parity(target: Target, drafter: DFlashDrafter, text: Sequence[int]) -> Parity:
    """Compare both passes on a text (token ids `[T]`, T >= 2).

    The states of the training pass come from the target's own forward (`Target.capture`), those of the other from the
    decoder's prefill; its context grows from anchor to anchor, as in decoding.
    """
    layers, block = drafter.config.target_layer_ids, drafter.config.block_size
    device, length = target.device, len(text)
    tokens = torch.tensor([list(text)], device=device)
    lengths = torch.tensor([length], device=device)
    chosen = sorted({round(place) for place in np.linspace(1, length - 1, _ANCHORS)})
    anchors = torch.tensor(chosen, device=device)
    with torch.inference_mode():
        trained = _training_pass(target, drafter, tokens, anchors)

        stepper = Stepper(target, layers)
        _, taps = stepper.prefill(stepper.new_state(1, length + block), tokens, lengths)
        context = DraftContext(drafter, target, 1, length)
        decoded, known = [], 0
        for anchor in anchors.tolist():
            path = torch.arange(known, anchor, device=device).unsqueeze(0)
            context.extend(taps, path, torch.tensor([anchor - known], device=device))
            decoded.append(context.propose(tokens[:, anchor])[0])
            known = anchor
        cached = torch.stack(decoded)
    distance = (trained.exp() - cached.exp()).abs().sum(-1).amax() / 2
    agreement = (trained.argmax(-1) == cached.argmax(-1)).float().mean()
    tolerance = TOLERANCE.get(target.dtype, TOLERANCE[torch.bfloat16])
    return Parity(len(anchors), float(distance), float(agreement), tolerance)


def _training_pass(target: Target, drafter: DFlashDrafter, tokens: Tensor, anchors: Tensor) -> Tensor:
    """Log-probabilities `[anchors, block - 1, vocab]` as the trainer computes them."""
    config, length = drafter.config, tokens.shape[1]
    lengths = torch.tensor([length], device=tokens.device)
    states = target.capture(tokens, lengths, config.target_layer_ids)[:, :, : config.num_taps]
    block = tokens.new_full((1, len(anchors), config.block_size), config.mask_token_id)
    block[0, :, 0] = tokens[0, anchors]
    positions = torch.arange(length, device=tokens.device).unsqueeze(0)
    embeddings = target.embed(block).to(drafter.fc.weight.dtype)
    hidden = drafter(states, embeddings, anchors.unsqueeze(0), positions)
    return target.lm_head(hidden[0, :, 1:].to(target.dtype)).float().log_softmax(-1)


def by_heart(
    target: Target,
    config: DrafterConfig,
    prompt: Prompt,
    *,
    steps: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> ByHeart:
    """Let a new drafter of `config` learn the target's greedy answer to `prompt`, export it, and decode with it.

    Raises:
        DrafterError: the answer is shorter than two blocks, so that it shows nothing.
    """
    progress, block = progress or Silent(), config.block_size
    plan = DecodeSettings(mode="autoregressive", budget=block, max_new_tokens=_BLOCKS * block + 1, rows=1)
    stepper = Stepper(target, config.target_layer_ids)
    answer = decode(stepper, None, [prompt.input_ids], plan)[0].tokens
    if len(answer) <= 2 * block:
        raise DrafterError(
            f"the target's answer to the prompt '{prompt.id}' has {len(answer)} tokens, two blocks have {2 * block}",
            where="export gate",
            fix="hold out a prompt with a longer answer",
        )
    text = np.concatenate([prompt.input_ids, np.array(answer, dtype=np.int32)])
    mask = np.zeros(len(text), dtype=np.uint8)
    mask[len(prompt.input_ids) :] = 1
    sample = TokenSample(id=prompt.id, kind=prompt.kind, input_ids=text, loss_mask=mask)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = Store.open(str(folder / "store"))
        extract = ExtractSettings(
            layer_ids=config.target_layer_ids, max_tokens=len(text), batch_tokens=max(64, len(text)), scratch=name
        )
        run_worker(store, "gate", _OneText(sample), target, extract)
        settings = TrainSettings.model_validate(
            {
                "steps": steps,
                "rows": 1,
                "anchors": len(answer),
                "seed": seed,
                "optimizer": {"kind": "muon", "lr": 2e-3, "muon_lr": 1e-2},
                "autocast": "off" if target.dtype == torch.float32 else "bf16",
                "checkpoint_every": steps,
                "log_every": max(1, steps // 10),
            }
        )
        result = train(StatesReader(store, "gate"), target, config, settings, folder / "run", progress=progress)
        drafter = load_drafter(_exported(result.drafter), device=target.device)
        chain = plan.model_copy(update={"mode": "chain", "max_new_tokens": len(answer)})
        rounds = decode(stepper, drafter, [prompt.input_ids], chain)[0].rounds
    return ByHeart(tuple(rounds), block, result.steps, result.loss)


def _exported(folder: Path | None) -> Path:
    assert folder is not None, "a training that was not stopped has exported its drafter"
    return folder


@dataclass(frozen=True)
class _Manifest:
    digest: str
    tokens: int


class _OneText:
    """A corpus of one shard of one sample."""

    def __init__(self, sample: TokenSample) -> None:
        self._sample = sample
        self.manifest = _Manifest("one-text", len(sample.input_ids))
        self.shard_names = ["text"]

    def shard(self, name: str) -> list[TokenSample]:
        return [self._sample]


def as_dict(found: Parity | ByHeart) -> dict[str, Any]:
    """For `--json` and the checkpoint's own record."""
    return {"passed": found.passed, **asdict(found)}
