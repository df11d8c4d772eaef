"""Decoding: autoregressive, chain and tree are one loop around one kind of target pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from drafthouse.config import Settings
from drafthouse.decode import proposal
from drafthouse.decode.draft import DraftContext
from drafthouse.decode.forward import Stepper
from drafthouse.drafter.model import DFlashDrafter
from drafthouse.errors import DrafterError, TargetError
from drafthouse.memory import fits
from drafthouse.progress import Progress, Silent

Mode = Literal["autoregressive", "chain", "tree"]
# Finished rows are dropped from the batch when at least this share of it has finished: dropping copies the
# caches of the others.
COMPACT_SHARE = 0.25


class DecodeSettings(Settings):
    """How to decode."""

    mode: Mode = Field("chain", description="autoregressive, chain (DFlash) or tree (DDTree)")
    budget: int = Field(16, ge=1, description="drafts of a tree, the argmax spine included")
    max_new_tokens: int = Field(96, ge=1, description="tokens after which a text is cut")
    temperature: float = Field(0.0, ge=0.0, description="0 = greedy; else sampling from softmax(logits / T)")
    seed: int = Field(0, description="of the sampling")
    rows: int = Field(32, ge=1, description="prompts decoded side by side")


@dataclass
class Generation:
    """One decoded text.

    Attributes:
        tokens: emitted token ids, the end-of-turn token included when reached.
        rounds: for each target pass after prefill, the tokens that it emitted (accepted drafts + its own).
        drafted: how many of them were drafts; one less, or all when a draft ended the turn.
        top1: probability of the target's most likely token at each emitted token.
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)

    @property
    def target_passes(self) -> int:
        """Passes after prefill. Prefill yields the first token whatever the mode."""
        return len(self.rounds)

    def sources(self) -> list[tuple[str, int]]:
        """For each token ("draft" | "target", round), round 0 being the prefill."""
        marks = [("target", 0)] if self.tokens else []
        for number, (emitted, drafts) in enumerate(zip(self.rounds, self.drafted, strict=True), start=1):
            marks += [("draft", number)] * drafts + [("target", number)] * (emitted - drafts)
        return marks


def decode(
    stepper: Stepper,
    drafter: DFlashDrafter | None,
    prompts: Sequence[np.ndarray],
    settings: DecodeSettings,
    *,
    progress: Progress | None = None,
) -> list[Generation]:
    """Decode every prompt (token ids `[length]`); results come in the order of the prompts.

    Raises:
        TargetError: a prompt is empty or holds a token that the target does not know.
        DrafterError: chain or tree without a drafter, with one of another target, with one that reads other
            layers than the stepper taps, or with a tree budget below its block.
        OutOfMemoryError: the rows asked for do not fit.
    """
    _check(stepper, drafter, settings)
    _check_prompts(prompts, stepper.target.vocab_size)
    results: list[Generation] = [Generation() for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    generator = torch.Generator(device=stepper.target.device).manual_seed(settings.seed)
    with (progress or Silent()).task(f"decode ({settings.mode})", len(prompts)) as task:
        for start in range(0, len(order), settings.rows):
            batch = order[start : start + settings.rows]
            with fits(
                f"decoding {len(batch)} prompts of up to {len(prompts[batch[0]])} tokens does not fit the device",
                where="rows",
                fix="decode fewer prompts side by side",
            ):
                _decode_batch(
                    stepper,
                    drafter,
                    [prompts[i] for i in batch],
                    [results[i] for i in batch],
                    settings,
                    generator,
                )
            task.advance(len(batch))
    return results


def _check(stepper: Stepper, drafter: DFlashDrafter | None, settings: DecodeSettings) -> None:
    if settings.mode == "autoregressive":
        return
    if drafter is None:
        raise DrafterError(f"{settings.mode} decoding needs a drafter", where="decode.mode", fix="give one")
    target, config = stepper.target, drafter.config
    facts = {
        "decoder layers": (config.num_target_layers, target.num_layers),
        "hidden size": (config.hidden_size, target.hidden_size),
        "vocabulary": (config.vocab_size, target.vocab_size),
        "identity": (config.target_identity, target.identity),
    }
    for fact, (own, wanted) in facts.items():
        if own and wanted and own != wanted:  # an identity that one side does not know cannot differ
            raise DrafterError(
                f"drafter of another target: its {fact} is {str(own)[:12]}, this target's is {str(wanted)[:12]}",
                fix="train or fetch the drafter of this target",
            )
    if tuple(drafter.config.target_layer_ids) != stepper.layer_ids:
        raise DrafterError(
            f"the drafter reads layers {list(drafter.config.target_layer_ids)} but {list(stepper.layer_ids)} are"
            " tapped",
            where="target_layer_ids",
            fix="build the stepper with the drafter's ids",
        )
    if settings.mode == "tree" and settings.budget < drafter.config.block_size - 1:
        raise DrafterError(
            f"a tree of {settings.budget} drafts cannot hold the spine of a block of {drafter.config.block_size}",
            where="decode.budget",
            fix=f"use at least {drafter.config.block_size - 1}",
        )


def _check_prompts(prompts: Sequence[np.ndarray], vocab_size: int) -> None:
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise TargetError("an empty prompt cannot be continued", where=f"prompt {index}", fix="drop it")
        if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
            bad = int(prompt.min()) if int(prompt.min()) < 0 else int(prompt.max())
            raise TargetError(
                f"token {bad} is outside the target's vocabulary of {vocab_size}",
                where=f"prompt {index}",
                fix="use the target's own tokenizer",
            )


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One token for each node: `[..., vocab]` -> `[...]`."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    flat = (logits / temperature).softmax(dim=-1).flatten(0, -2)
    return torch.multinomial(flat, 1, generator=generator).view(logits.shape[:-1])


def _decode_batch(
    stepper: Stepper,
    drafter: DFlashDrafter | None,
    prompts: list[np.ndarray],
    results: list[Generation],
    settings: DecodeSettings,
    generator: torch.Generator,
) -> None:
    target, eos = stepper.target, set(stepper.target.eos_ids)
    rows, longest = len(prompts), max(len(prompt) for prompt in prompts)
    capacity = longest + settings.max_new_tokens
    tokens = torch.zeros(rows, longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
    tokens = tokens.to(target.device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)

    state = stepper.new_state(rows, capacity)
    hidden, taps = stepper.prefill(state, tokens, lengths)
    context = None
    if drafter is not None and settings.mode != "autoregressive":
        context = DraftContext(drafter, target, rows, capacity)
        context.extend(taps, torch.arange(longest, device=target.device).expand(rows, longest), lengths)
    logits = stepper.logits(hidden)
    last = _draw(logits, settings.temperature, generator)
    live = list(range(rows))
    finished = torch.zeros(rows, dtype=torch.bool, device=target.device)
    for row, (token, best) in enumerate(zip(last.tolist(), _top1(logits).tolist(), strict=True)):
        results[row].tokens.append(token)
        results[row].top1.append(best)
        finished[row] = token in eos or settings.max_new_tokens == 1

    while not bool(finished.all()):
        if float(finished.float().mean()) >= COMPACT_SHARE:
            keep = (~finished).nonzero().squeeze(1)
            state, last, finished = state.select(keep), last[keep], finished[keep]
            if context is not None:
                context.select(keep)
            live = [live[i] for i in keep.tolist()]
        if context is None:
            offer = proposal.alone(last)
        elif settings.mode == "chain":
            offer = proposal.chain(last, context.propose(last))
        else:
            offer = proposal.tree(last, context.propose(last), settings.budget)
        passed = stepper.forward(state, offer.tokens, offer.topology)
        logits = stepper.logits(passed.hidden)
        path, counts, last = proposal.walk(offer, _draw(logits, settings.temperature, generator))
        room = torch.tensor([settings.max_new_tokens - len(results[i].tokens) for i in live], device=target.device)
        was_finished = finished.clone()
        _emit(offer, path, counts, last, room, logits, [results[i] for i in live], finished, eos)
        # The caches have no room past max_new_tokens, and ended texts need none.
        counts = torch.where(was_finished, 0, torch.minimum(counts, room))
        stepper.commit(state, passed, path, counts)
        if context is not None:
            context.extend(passed.taps, path, counts)


def _emit(
    offer: proposal.Proposal,
    path: Tensor,
    counts: Tensor,
    bonus: Tensor,
    room: Tensor,
    logits: Tensor,
    results: list[Generation],
    finished: Tensor,
    eos: set[int],
) -> None:
    """Append what one pass emitted to each text, up to its end-of-turn token, and mark the ended ones."""
    row_index = torch.arange(path.shape[0], device=path.device).unsqueeze(1)
    on_path = offer.tokens[row_index, path]
    best = _top1(logits[row_index, path]).tolist()
    rows = zip(
        results,
        on_path.tolist(),
        counts.tolist(),
        bonus.tolist(),
        room.tolist(),
        finished.tolist(),
        best,
        strict=True,
    )
    for row, (result, nodes, count, own, left, done, tops) in enumerate(rows):
        if done:
            continue
        # nodes[0] was emitted by the pass before; the accepted drafts and the target's own token are new.
        emitted = [*nodes[1:count], own][:left]
        for position, token in enumerate(emitted):
            if token in eos:
                emitted = emitted[: position + 1]
                break
        result.tokens += emitted
        result.top1 += tops[: len(emitted)]
        result.rounds.append(len(emitted))
        result.drafted.append(min(count - 1, len(emitted)))
        finished[row] = emitted[-1] in eos or len(emitted) >= left


def _top1(logits: Tensor) -> Tensor:
    """Probability of the most likely token, `[..., vocab]` -> `[...]`."""
    return (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp()
