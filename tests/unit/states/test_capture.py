from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drafthouse.errors import OutOfMemoryError, StatesError
from drafthouse.states import Capture, ExtractSettings, spec_of
from drafthouse.states.capture import Batch, plan
from drafthouse.states.shard import ShardSample, cut
from tests.doubles.extraction import MemoryCorpus, TinyTaps


@pytest.fixture
def shard(corpus: MemoryCorpus) -> list[ShardSample]:
    return cut(corpus.shard(corpus.shard_names[0]), 64, "shard")


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40),
    rows=st.integers(1, 9),
    extra=st.integers(0, 200),
    multiple=st.integers(1, 70),
)
def test_a_plan_holds_every_sample_once_and_keeps_its_limits(
    lengths: list[int], rows: int, extra: int, multiple: int
) -> None:
    settings = ExtractSettings(max_tokens=64, batch_tokens=64 + extra, rows=rows, pad_multiple=multiple)
    batches = plan(lengths, settings)
    assert sorted(i for batch in batches for i in batch.samples) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch.samples) <= rows
        assert max(lengths[i] for i in batch.samples) <= batch.length <= 64
        assert len(batch.samples) * batch.length <= settings.batch_tokens
    sizes = [batch.length for batch in batches]
    assert sizes == sorted(sizes, reverse=True), "the largest batch comes first, so that it fails first"


def test_batches_of_similar_length_waste_little() -> None:
    lengths = [int(n) for n in np.random.RandomState(0).randint(1, 1000, 200)]
    settings = ExtractSettings(max_tokens=1024, batch_tokens=8192, rows=16, pad_multiple=64)
    padded = sum(len(batch.samples) * batch.length for batch in plan(lengths, settings))
    assert padded < 1.2 * sum(lengths)


def test_short_samples_are_padded_more_finely_than_long_ones() -> None:
    settings = ExtractSettings(max_tokens=2048, batch_tokens=4096, rows=16, pad_multiple=64)
    assert [batch.length for batch in plan([5], settings)] == [8]
    assert [batch.length for batch in plan([65], settings)] == [80]
    assert [batch.length for batch in plan([1001], settings)] == [1024]
    lengths = [int(n) for n in np.random.RandomState(0).randint(16, 33, 200)]
    padded = sum(len(batch.samples) * batch.length for batch in plan(lengths, settings))
    assert padded < 1.2 * sum(lengths)


def test_captured_states_are_those_of_each_sample_alone(
    target: TinyTaps, corpus: MemoryCorpus, settings: ExtractSettings, shard: list[ShardSample]
) -> None:
    capture = Capture(target, spec_of(target, corpus, settings))
    for batch in plan([len(sample.input_ids) for sample in shard], settings):
        hidden, last = capture.run(shard, batch).wait("shard")
        assert hidden.dtype == last.dtype == torch.bfloat16
        assert hidden.is_contiguous()
        assert last.is_contiguous()
        row = 0
        for index in batch.samples:
            ids = torch.from_numpy(shard[index].input_ids).long()[None]
            alone = target.capture(ids, torch.tensor([ids.shape[1]]), (0, 2))[0].bfloat16()
            end = row + ids.shape[1]
            torch.testing.assert_close(hidden[row:end], alone[:, :2], rtol=0.01, atol=1e-3)
            torch.testing.assert_close(last[row:end], alone[:, 2], rtol=0.01, atol=1e-3)
            row = end
        assert row == hidden.shape[0]


def test_a_smaller_batch_after_a_larger_one_is_not_stale(
    target: TinyTaps, corpus: MemoryCorpus, settings: ExtractSettings, shard: list[ShardSample]
) -> None:
    spec = spec_of(target, corpus, settings)
    used, fresh = Capture(target, spec), Capture(target, spec)
    used.run(shard, Batch((0, 1, 2, 3, 4), 64))
    again = used.run(shard, Batch((2,), 40)).wait("shard")
    alone = fresh.run(shard, Batch((2,), 40)).wait("shard")
    assert torch.equal(again[0], alone[0])
    assert torch.equal(again[1], alone[1])


def _nan(out: Tensor) -> None:
    out[1, 0, 1, 3] = float("nan")


def _infinity(out: Tensor) -> None:
    out[0, 1, 2, 0] = float("inf")


def _zero(out: Tensor) -> None:
    out[0, 1, 0] = 0


def _one_slot_never_filled(out: Tensor) -> None:
    out[:, :, 1] = 0


def _repeated_row(out: Tensor) -> None:
    out[:, :, 1] = out[0, 0, 1]


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_nan, r"the state of layer 2 is not finite \(NaN or infinity\) at token 0 of sample '0/1'"),
        (_infinity, "the state of layer 3 before the final norm is not finite .* at token 1 of sample '0/0'"),
        (_zero, "the state of layer 0 is all zeros at token 1 of sample '0/0'"),
        (_one_slot_never_filled, "the state of layer 2 is all zeros at token 0 of sample '0/0'"),
        (_repeated_row, "samples '0/0' and '0/1' differ at token 0 and have the same state of layer 2 there"),
    ],
)
def test_wrong_states_are_named(
    target: TinyTaps,
    corpus: MemoryCorpus,
    settings: ExtractSettings,
    shard: list[ShardSample],
    spoil: Callable[[Tensor], None],
    sentence: str,
    dtype: str,
) -> None:
    target.spoil = spoil
    capture = Capture(target, spec_of(target, corpus, settings.model_copy(update={"dtype": dtype})))
    with pytest.raises(StatesError, match=f"shard 7: {sentence}"):
        capture.run(shard, Batch((0, 1, 2), 64)).wait("shard 7")


def test_wrong_states_of_padding_do_not_matter(
    target: TinyTaps, corpus: MemoryCorpus, settings: ExtractSettings, shard: list[ShardSample]
) -> None:
    def spoil(out: Tensor) -> None:
        out[0, len(shard[0].input_ids) :] = float("nan")

    target.spoil = spoil
    capture = Capture(target, spec_of(target, corpus, settings))
    hidden, _ = capture.run(shard, Batch((0,), 64)).wait("shard")
    assert torch.isfinite(hidden).all()


def test_one_end_after_different_beginnings_may_have_one_state(
    target: TinyTaps, corpus: MemoryCorpus, settings: ExtractSettings, shard: list[ShardSample]
) -> None:
    """A layer that forgets fast gives equal ends to texts with equal endings; that is no fault."""

    def forget(out: Tensor) -> None:
        ends = [len(sample.input_ids) - 1 for sample in shard[:2]]
        out[1, ends[1]] = out[0, ends[0]]

    target.spoil = forget
    capture = Capture(target, spec_of(target, corpus, settings))
    hidden, _ = capture.run(shard, Batch((0, 1), 64)).wait("shard")
    first, second = (len(sample.input_ids) for sample in shard[:2])
    assert torch.equal(hidden[first - 1], hidden[first + second - 1])


def test_equal_samples_may_have_equal_states(
    target: TinyTaps, corpus: MemoryCorpus, settings: ExtractSettings, shard: list[ShardSample]
) -> None:
    capture = Capture(target, spec_of(target, corpus, settings))
    capture.run([shard[0], shard[0]], Batch((0, 1), 64)).wait("shard")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("not enough memory: you tried to allocate 8 bytes"),
    ],
)
def test_out_of_memory_names_the_batch_and_the_settings(
    target: TinyTaps,
    corpus: MemoryCorpus,
    settings: ExtractSettings,
    shard: list[ShardSample],
    error: Exception,
) -> None:
    def fail(_: Tensor) -> None:
        raise error

    target.before = fail
    capture = Capture(target, spec_of(target, corpus, settings))
    with pytest.raises(
        OutOfMemoryError, match=r"a batch of 2 rows × 48 tokens does not fit cpu; lower extract.batch_tokens"
    ):
        capture.run(shard, Batch((0, 1), 48))


def test_memory_that_the_machine_does_not_have(corpus: MemoryCorpus, shard: list[ShardSample]) -> None:
    target = TinyTaps(hidden=16)
    settings = ExtractSettings(layer_ids=(0,), max_tokens=64)
    spec = spec_of(target, corpus, settings).model_copy(update={"hidden_size": 2**45})
    with pytest.raises(OutOfMemoryError, match="a batch of 1 rows × 64 tokens"):
        Capture(target, spec).run(shard, Batch((0,), 64))


def test_other_errors_stay_what_they_are(
    target: TinyTaps, corpus: MemoryCorpus, settings: ExtractSettings, shard: list[ShardSample]
) -> None:
    def fail(_: Tensor) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    target.before = fail
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        Capture(target, spec_of(target, corpus, settings)).run(shard, Batch((0,), 64))


@pytest.mark.gpu
def test_cuda_copies_are_complete_while_the_next_batch_computes(
    corpus: MemoryCorpus, settings: ExtractSettings, shard: list[ShardSample]
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    on_cpu = TinyTaps(hidden=256)
    on_gpu = TinyTaps(hidden=256).cuda()
    spec = spec_of(on_cpu, corpus, settings)
    expected, capture = Capture(on_cpu, spec), Capture(on_gpu, spec)
    batches = plan([len(sample.input_ids) for sample in shard], settings) * 20
    running = [capture.run(shard, batch) for batch in batches]
    for batch, captured in zip(batches, running, strict=True):
        hidden, last = captured.wait("shard")
        assert hidden.is_pinned()
        wanted, wanted_last = expected.run(shard, batch).wait("shard")
        torch.testing.assert_close(hidden, wanted, atol=0.05, rtol=0.05)
        torch.testing.assert_close(last, wanted_last, atol=0.05, rtol=0.05)
