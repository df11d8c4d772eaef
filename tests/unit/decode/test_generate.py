"""Three modes, one text: greedy decoding must say what transformers says, whatever the drafter proposes."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import numpy as np
import pytest
import torch

from drafthouse.corpus import CorpusSettings, prompts
from drafthouse.decode import Generation, Stepper, decode, generate, proposal
from drafthouse.decode.draft import DraftContext
from drafthouse.decode.generate import Mode
from drafthouse.drafter.model import DFlashDrafter
from drafthouse.errors import DrafterError, OutOfMemoryError, TargetError
from drafthouse.target import Target
from tests.unit.decode.foreseeing import chain_passes, foresee
from tests.unit.decode.pairs import (
    BLOCK,
    CLEAR_MARGIN,
    MODES,
    NEW_TOKENS,
    TAPS,
    Pair,
    drafter_config,
    greedy_by_transformers,
    smallest_margin,
)
from tests.unit.target.short_run import EMBEDDED

each_mode = pytest.mark.parametrize(("mode", "budget"), MODES, ids=lambda value: str(value))


def run(pair: Pair, mode: Mode, budget: int, **changes: Any) -> list[Generation]:
    return decode(pair.stepper, pair.drafter, pair.prompts, pair.settings(mode, budget, **changes))


def texts(generations: list[Generation]) -> list[list[int]]:
    return [generation.tokens for generation in generations]


@each_mode
def test_greedy_text_is_the_one_of_transformers(pair: Pair, mode: Mode, budget: int) -> None:
    assert texts(run(pair, mode, budget)) == pair.references


def test_the_fitted_drafters_are_accepted_in_part(pair: Pair) -> None:
    """Or the tests of this file would show nothing: every number of drafts from none to all occurs."""
    chain, small, large = run(pair, "chain", 1), run(pair, "tree", BLOCK - 1), run(pair, "tree", 14)
    assert {0, 1, 2, BLOCK - 1} <= {count for generation in chain for count in generation.drafted}
    passes = [sum(g.target_passes for g in mode) for mode in (chain, small, large)]
    assert passes[2] < passes[0] < 0.7 * (NEW_TOKENS - 1) * len(pair.prompts)
    # A tree of the spine alone is the chain.
    assert [(g.tokens, g.rounds, g.drafted) for g in small] == [(g.tokens, g.rounds, g.drafted) for g in chain]


@each_mode
def test_what_a_generation_says_of_itself_fits_together(pair: Pair, mode: Mode, budget: int) -> None:
    for generation, prompt in zip(run(pair, mode, budget), pair.prompts, strict=True):
        sources = generation.sources()
        assert len(sources) == len(generation.tokens) == len(generation.top1) == NEW_TOKENS
        assert sum(generation.rounds) == NEW_TOKENS - 1
        assert generation.target_passes == len(generation.rounds) == len(generation.drafted)
        assert sources[0] == ("target", 0)
        for number, (emitted, drafted) in enumerate(zip(generation.rounds, generation.drafted, strict=True), start=1):
            assert 0 <= drafted <= min(emitted, BLOCK - 1 if mode != "autoregressive" else 0)
            # Only where the text was cut may the target's own token be missing.
            assert emitted - drafted == 1 or number == generation.target_passes
            own = [source for source, place in sources if place == number]
            assert own == ["draft"] * drafted + ["target"] * (emitted - drafted)
        ids = torch.tensor([[*prompt.tolist(), *generation.tokens]])
        logits = cast(Any, pair.target.model)(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        expected = logits.softmax(-1).amax(-1)
        torch.testing.assert_close(torch.tensor(generation.top1), expected, rtol=1e-3, atol=1e-3)


@each_mode
@pytest.mark.parametrize("limit", [1, 7])
def test_max_new_tokens_cuts_every_text(pair: Pair, mode: Mode, budget: int, limit: int) -> None:
    generations = run(pair, mode, budget, max_new_tokens=limit)
    assert texts(generations) == [reference[:limit] for reference in pair.references]
    assert all(sum(generation.rounds) == limit - 1 for generation in generations)


def end_tokens(pair: Pair) -> list[int]:
    """Two tokens at which many of the references end early, at different lengths."""
    places: dict[int, int] = {}
    for reference in pair.references:
        for token in set(reference[3:20]) - set(reference[:3]):
            places[token] = places.get(token, 0) + 1
    return sorted(places, key=lambda token: (-places[token], token))[:2]


def cut(reference: list[int], ends: list[int]) -> list[int]:
    stop = next((place for place, token in enumerate(reference) if token in ends), len(reference) - 1)
    return reference[: stop + 1]


@each_mode
def test_a_text_ends_with_its_end_of_turn_token(
    pair: Pair, mode: Mode, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = end_tokens(pair)
    monkeypatch.setattr(pair.target.config, "eos_token_id", ends)
    assert set(pair.target.eos_ids) == set(ends)
    expected = [cut(reference, ends) for reference in pair.references]
    assert len({len(text) for text in expected}) >= 4
    generations = run(pair, mode, budget)
    assert texts(generations) == expected
    assert expected[0] == greedy_by_transformers(pair.target, pair.prompts[0], NEW_TOKENS, ends)
    ended_by_draft = [g for g in generations if g.rounds and g.drafted[-1] == g.rounds[-1]]
    assert bool(ended_by_draft) == (mode != "autoregressive")
    assert any(g.tokens[-1] in ends and g.drafted[-1:] != g.rounds[-1:] for g in generations)
    for generation in generations:
        assert len(generation.sources()) == len(generation.tokens) == len(generation.top1)


def test_a_text_may_end_in_its_prefill(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.target.config, "eos_token_id", [r[0] for r in pair.references])
    for mode, budget in MODES:
        for generation, reference in zip(run(pair, mode, budget), pair.references, strict=True):
            assert generation.tokens == reference[:1]
            assert generation.target_passes == 0
            assert generation.sources() == [("target", 0)]


@each_mode
def test_neither_batching_nor_compaction_changes_anything(
    pair: Pair, mode: Mode, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows leave the batch at once, by the quarter, or never; batches of one and all."""
    monkeypatch.setattr(pair.target.config, "eos_token_id", end_tokens(pair))
    expected = run(pair, mode, budget)
    variants = [run(pair, mode, budget, rows=1)]
    for share in (0.001, 2.0):
        monkeypatch.setattr(generate, "COMPACT_SHARE", share)
        variants.append(run(pair, mode, budget))
    for variant in variants:
        for ours, theirs in zip(variant, expected, strict=True):
            assert (ours.tokens, ours.rounds, ours.drafted) == (theirs.tokens, theirs.rounds, theirs.drafted)
            assert ours.top1 == pytest.approx(theirs.top1, abs=1e-3)


def test_from_every_state_the_tree_emits_at_least_the_chain(pair: Pair) -> None:
    """At every position of the text with most rejections: what is emitted, and how much of it."""
    hardest = int(np.argmax([generation.target_passes for generation in run(pair, "chain", 1)]))
    stepper, prompt, reference = pair.stepper, pair.prompts[hardest], pair.references[hardest]
    prefixes = [[*prompt.tolist(), *reference[:count]] for count in range(NEW_TOKENS - BLOCK)]
    lengths = torch.tensor([len(prefix) for prefix in prefixes])
    ids = torch.zeros(len(prefixes), int(lengths.max()), dtype=torch.int64)
    for row, prefix in enumerate(prefixes):
        ids[row, : len(prefix)] = torch.tensor(prefix)
    state = stepper.new_state(len(prefixes), ids.shape[1])
    _, taps = stepper.prefill(state, ids, lengths)
    context = DraftContext(pair.drafter, pair.target, len(prefixes), ids.shape[1])
    context.extend(taps, torch.arange(ids.shape[1]).expand(ids.shape), lengths)
    last = torch.tensor(reference[: len(prefixes)])
    log_probs = context.propose(last)
    emitted = []
    for offer in (proposal.chain(last, log_probs), *(proposal.tree(last, log_probs, b) for b in (5, 9, 20))):
        logits = stepper.logits(stepper.forward(state, offer.tokens, offer.topology).hidden)
        path, counts, bonus = proposal.walk(offer, logits.argmax(-1))
        for row in range(len(prefixes)):
            new = [*offer.tokens[row, path[row, 1 : counts[row]]].tolist(), int(bonus[row])]
            assert new == reference[row + 1 : row + 1 + len(new)]
        emitted.append(counts)
    chain, spine, small, large = emitted
    assert torch.equal(chain, spine)
    assert bool((small >= chain).all())
    assert bool((large >= small).all())
    assert int(large.sum()) > int(chain.sum())


@pytest.mark.parametrize(("mode", "budget"), MODES[1:])
def test_a_perfect_drafter_fills_every_block(
    pair: Pair, mode: Mode, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    foresee(monkeypatch, pair.prompts, [[*r, *[7] * BLOCK] for r in pair.references])
    generations = run(pair, mode, budget)
    assert texts(generations) == pair.references
    full, rest = divmod(NEW_TOKENS - 1, BLOCK)
    for generation in generations:
        assert generation.rounds == [BLOCK] * full + [rest] * (rest > 0)
        assert generation.drafted == [BLOCK - 1] * full + [rest] * (rest > 0)


def draft_ranks(pair: Pair, seed: int) -> list[list[int]]:
    """How far down the right token stands among the drafts of each place: mostly first, sometimes third."""
    random = np.random.default_rng(seed)
    return [random.choice(3, NEW_TOKENS, p=[0.7, 0.2, 0.1]).tolist() for _ in pair.references]


def test_passes_are_those_that_the_drafts_ranks_allow(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain stops at the first draft that is not ranked first; trees may go on, and never need more passes."""
    ranks = draft_ranks(pair, seed=0)
    foresee(monkeypatch, pair.prompts, pair.references, ranks)
    chain, *trees = (run(pair, mode, budget) for mode, budget in (*MODES[1:], ("tree", 60)))
    passes = [generation.target_passes for generation in chain]
    assert texts(chain) == pair.references
    assert passes == [chain_passes(own, NEW_TOKENS, BLOCK) for own in ranks]
    for tree in trees:
        assert texts(tree) == pair.references
        assert all(g.target_passes <= most for g, most in zip(tree, passes, strict=True))
    assert sum(g.target_passes for g in trees[-1]) < 0.8 * sum(passes)


def test_sampling_depends_on_the_seed(pair: Pair) -> None:
    first, again, other = (run(pair, "tree", 9, temperature=1.0, seed=s, max_new_tokens=9) for s in (1, 1, 2))
    assert texts(first) == texts(again)
    assert texts(first) != texts(other)
    assert all(len(g.tokens) == 9 == len(g.sources()) for g in first)


def test_a_very_low_temperature_is_greedy(pair: Pair) -> None:
    assert texts(run(pair, "tree", 14, temperature=1e-4)) == pair.references


def test_the_learned_target_says_the_same_in_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded target, one prompt of each kind, with a drafter that is right seven times of ten."""
    target = Target.load(EMBEDDED)
    questions = prompts(CorpusSettings(heldout=1, seed=5), target.tokenizer)
    asked = [question.input_ids for question in questions]
    references = [greedy_by_transformers(target, prompt, 40, list(target.eos_ids)) for prompt in asked]
    assert min(smallest_margin(target, p, r) for p, r in zip(asked, references, strict=True)) > CLEAR_MARGIN
    assert all(reference[-1] in target.eos_ids for reference in references)
    drafter = DFlashDrafter(drafter_config(target, target_layer_ids=(0, 1, 3), block_size=8))
    pair = Pair(target, drafter, asked, references)
    stepper = Stepper(target, (0, 1, 3))
    plans = [pair.settings(mode, 16, max_new_tokens=40) for mode in ("autoregressive", "chain", "tree")]
    random = np.random.default_rng(0)
    ranks = [random.choice(2, len(reference), p=[0.7, 0.3]).tolist() for reference in references]
    unaided = [decode(stepper, drafter, asked, plan) for plan in plans]
    foresee(monkeypatch, asked, references, ranks)
    aided = [decode(stepper, drafter, asked, plan) for plan in plans[1:]]
    for generations in (*unaided, *aided):
        assert texts(generations) == references
    passes = [sum(g.target_passes for g in generations) for generations in aided]
    assert passes[0] == sum(chain_passes(r, len(t), 8) for r, t in zip(ranks, references, strict=True))
    assert passes[1] < passes[0] < sum(map(len, references)) / 2


class Recorder:
    """A progress double that adds up what it is told."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, float | None]] = []
        self.steps = 0.0

    def task(self, description: str, total: float | None) -> AbstractContextManager[Any]:
        self.opened.append((description, total))

        @contextmanager
        def opened() -> Any:
            yield self

        return opened()

    def advance(self, steps: float = 1, note: str | None = None) -> None:
        self.steps += steps


def test_progress_counts_prompts(pair: Pair) -> None:
    recorder = Recorder()
    plan = pair.settings("chain", rows=5, max_new_tokens=2)
    decode(pair.stepper, pair.drafter, pair.prompts, plan, progress=recorder)
    assert recorder.opened == [("decode (chain)", len(pair.prompts))]
    assert recorder.steps == len(pair.prompts)


def test_no_prompts_give_no_texts(pair: Pair) -> None:
    assert decode(pair.stepper, pair.drafter, [], pair.settings("chain")) == []


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_drafting_without_a_drafter_is_refused(pair: Pair, mode: Mode) -> None:
    with pytest.raises(DrafterError, match=f"decode.mode: {mode} decoding needs a drafter; give one"):
        decode(pair.stepper, None, pair.prompts, pair.settings(mode))


def test_a_drafter_of_other_layers_is_refused(pair: Pair) -> None:
    with pytest.raises(DrafterError) as caught:
        decode(Stepper(pair.target, (0, 3)), pair.drafter, pair.prompts, pair.settings("chain"))
    assert str(caught.value) == (
        "target_layer_ids: the drafter reads layers [0, 1, 2] but [0, 3] are tapped; build the stepper with the"
        " drafter's ids"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"target_identity": "a" * 64}, "its identity is aaaaaaaaaaaa, this target's is bbbbbbbbbbbb"),
        ({"hidden_size": 16}, "its hidden size is 16, this target's is 32"),
        ({"vocab_size": 98}, "its vocabulary is 98, this target's is 97"),
        ({"num_target_layers": 8}, "its decoder layers is 8, this target's is 4"),
    ],
)
def test_a_drafter_of_another_target_is_refused(pair: Pair, changes: dict[str, Any], problem: str) -> None:
    target = copy.copy(pair.target)
    target.identity = "b" * 64
    drafter = DFlashDrafter(drafter_config(target, **changes))
    with pytest.raises(DrafterError, match=f"drafter of another target: {problem}"):
        decode(Stepper(target, TAPS), drafter, pair.prompts, pair.settings("chain"))


def test_a_budget_below_the_block_is_refused(pair: Pair) -> None:
    with pytest.raises(DrafterError) as caught:
        run(pair, "tree", BLOCK - 2)
    assert str(caught.value) == (
        f"decode.budget: a tree of {BLOCK - 2} drafts cannot hold the spine of a block of {BLOCK}; use at least"
        f" {BLOCK - 1}"
    )


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "prompt 1: an empty prompt cannot be continued"),
        ([3, 97], "prompt 1: token 97 is outside the target's vocabulary of 97"),
        ([3, -1, 200], "prompt 1: token -1 is outside the target's vocabulary of 97"),
    ],
)
def test_a_prompt_that_the_target_cannot_read_is_refused(pair: Pair, prompt: list[int], problem: str) -> None:
    asked = [pair.prompts[0], np.array(prompt, dtype=np.int32)]
    with pytest.raises(TargetError, match=problem):
        decode(pair.stepper, None, asked, pair.settings("autoregressive"))


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError, MemoryError])
def test_rows_that_do_not_fit_are_told_in_one_sentence(
    pair: Pair, failure: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise failure("CUDA out of memory.\nTried to allocate 9 GiB")

    monkeypatch.setattr(Stepper, "new_state", full)
    longest = max(len(prompt) for prompt in pair.prompts)
    with pytest.raises(OutOfMemoryError) as caught:
        run(pair, "chain", 5)
    assert str(caught.value) == (
        f"rows: decoding {len(pair.prompts)} prompts of up to {longest} tokens does not fit the device; decode"
        " fewer prompts side by side"
    )
