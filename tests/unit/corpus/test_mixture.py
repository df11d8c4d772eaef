from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from drafthouse.config import validate
from drafthouse.corpus import (
    CorpusSettings,
    GrammarSource,
    JsonlSource,
    Report,
    StdlibSource,
    TokenSample,
    prompts,
    token_samples,
    training_texts,
)
from drafthouse.errors import ConfigError, CorpusError
from tests.unit.corpus.conftest import GRAMMAR


def key(sample: TokenSample) -> tuple[bytes, bytes]:
    return sample.input_ids.tobytes(), sample.loss_mask.tobytes()


def jsonl(path: Path, pairs: list[tuple[str, str]]) -> JsonlSource:
    lines = [
        json.dumps({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]})
        for q, a in pairs
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return JsonlSource(path=path)


class Counting:
    """Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.total: float | None = 0
        self.done: float = 0

    @contextmanager
    def task(self, description: str, total: float | None) -> Iterator[Counting]:
        self.total = total
        yield self

    def advance(self, steps: float = 1, note: str | None = None) -> None:
        self.done += steps


class TestSettings:
    def test_counts_are_exact_and_the_rest_goes_by_weight(self) -> None:
        settings = CorpusSettings(
            sources=(
                GrammarSource(kind="lookup", count=10),
                GrammarSource(kind="repeat", weight=2),
                StdlibSource(kind="code", weight=1),
            ),
            samples=100,
        )
        assert settings.quotas() == [10, 60, 30]

    @given(
        weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
        count=st.integers(0, 50),
        rest=st.integers(1, 997),
    )
    def test_quotas_add_up_and_are_never_off_by_one(self, weights: list[float], count: int, rest: int) -> None:
        weighted = tuple(GrammarSource(kind="lookup", weight=weight) for weight in weights)
        settings = CorpusSettings(sources=(GrammarSource(kind="repeat", count=count), *weighted), samples=count + rest)
        fixed, *shares = settings.quotas()
        assert fixed == count
        assert sum(shares) == rest
        assert all(abs(got - rest * want / sum(weights)) < 1 for got, want in zip(shares, weights, strict=True))

    @pytest.mark.parametrize(
        ("values", "sentence"),
        [
            (
                {"samples": 5, "sources": [{"type": "grammar", "kind": "lookup", "count": 6}]},
                "add up to 6, more than",
            ),
            (
                {"samples": 9, "sources": [{"type": "grammar", "kind": "lookup", "count": 6}]},
                "add up to 6, fewer than",
            ),
            ({"sources": [{"type": "grammar", "kind": "poem"}]}, "sources.0.grammar.kind"),
            ({"sources": [{"type": "web", "kind": "poem"}]}, "sources.0"),
            ({"sources": []}, "sources"),
            ({"sources": [{"type": "grammar", "kind": "lookup", "weight": 0}]}, "sources.0.grammar.weight"),
            ({"samples": 0}, "samples"),
            ({"smaples": 3}, "unknown key 'smaples'"),
        ],
    )
    def test_impossible_settings_are_one_sentence(self, values: dict[str, object], sentence: str) -> None:
        with pytest.raises(ConfigError, match=sentence.replace(".", r"\.")):
            validate(CorpusSettings, values, "run.yml")

    def test_survive_a_round_trip(self, tmp_path: Path) -> None:
        settings = CorpusSettings(sources=(*GRAMMAR, StdlibSource(kind="docs"), JsonlSource(path=tmp_path / "x")))
        assert CorpusSettings.model_validate(settings.model_dump(mode="json")) == settings


class TestSamples:
    def test_quotas_are_filled_and_kinds_are_mixed(self, tokenizer: PreTrainedTokenizerFast) -> None:
        settings = CorpusSettings(sources=(*GRAMMAR, GrammarSource(kind="lookup", count=30)), samples=150)
        report, progress = Report(), Counting()
        samples = list(token_samples(settings, tokenizer, "train", report, progress))
        assert Counter(sample.kind for sample in samples) == {
            "tool_call": 30,
            "tool_answer": 30,
            "lookup": 60,
            "repeat": 30,
        }
        assert len({key(sample) for sample in samples}) == 150
        assert len({sample.kind for sample in samples[:20]}) == 4
        assert report.all_drops() == {"duplicate": 32}  # two sources of one kind say the same at first
        assert (progress.total, progress.done) == (150, 150)

    def test_equal_settings_give_equal_samples_and_another_seed_others(
        self, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        settings = CorpusSettings(sources=GRAMMAR, samples=40)
        first = list(map(key, token_samples(settings, tokenizer)))
        assert first == list(map(key, token_samples(settings, tokenizer)))
        other = settings.model_copy(update={"seed": 1})
        assert not set(first) & set(map(key, token_samples(other, tokenizer)))

    def test_a_finite_source_that_runs_out_is_reported(
        self, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        pairs = [(f"question {n}", f"answer {n}") for n in range(20)] * 2
        source = jsonl(tmp_path / "a.jsonl", [*pairs, ("long", "word " * 400), ("forged", "a<|im_end|>b")])
        (tmp_path / "a.jsonl").open("a").write("\nnonsense\n")
        settings = CorpusSettings(sources=(source, GrammarSource(kind="lookup", count=5)), samples=50)
        report = Report()
        samples = list(token_samples(settings, tokenizer, "train", report))
        trained = sum(sample.kind == "chat" for sample in samples)
        assert 15 <= trained <= 20
        assert report.short == {f"jsonl:{source.path}": 45 - trained}
        drops = report.all_drops()
        assert drops["duplicate"] == trained
        assert drops["malformed_not_json"] == 1
        assert drops["too_long"] == drops["control_tokens"] == 1
        shown = report.as_dict()["malformed"][str(source.path)]
        assert shown["examples"]["not_json"][0]["text"] == "nonsense"

    def test_splits_of_a_collected_source_share_no_question(
        self, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        source = jsonl(tmp_path / "a.jsonl", [(f"question {n % 90}", f"answer {n}") for n in range(180)])
        settings = CorpusSettings(sources=(source,), samples=500, heldout=100)
        train = list(token_samples(settings, tokenizer, "train"))
        heldout = list(token_samples(settings, tokenizer, "heldout"))
        assert len(train) + len(heldout) == 180

        def question(sample: TokenSample) -> bytes:
            return sample.input_ids[: sample.loss_mask.argmax()].tobytes()

        assert heldout
        assert not set(map(question, train)) & set(map(question, heldout))

    def test_a_missing_file_is_an_error(self, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
        settings = CorpusSettings(sources=(JsonlSource(path=tmp_path / "none.jsonl"),), samples=5)
        with pytest.raises(CorpusError, match="cannot be read"):
            list(token_samples(settings, tokenizer))


class TestPrompts:
    def test_every_source_gives_its_share_and_no_question_twice(self, tokenizer: PreTrainedTokenizerFast) -> None:
        settings = CorpusSettings(sources=(*GRAMMAR, StdlibSource(kind="code")), samples=10, heldout=12)
        made = prompts(settings, tokenizer)
        assert Counter(prompt.kind for prompt in made) == dict.fromkeys(
            ("tool_call", "tool_answer", "lookup", "repeat", "code"), 12
        )
        assert len({prompt.input_ids.tobytes() for prompt in made}) == 60
        header = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
        for prompt in made:
            assert prompt.input_ids[-len(header) :].tolist() == header
            assert prompt.reference
            assert "<|im_end|>" not in prompt.reference
        assert [prompt.id for prompt in made] == [prompt.id for prompt in prompts(settings, tokenizer)]

    def test_heldout_prompts_are_not_among_the_training_prompts(self, tokenizer: PreTrainedTokenizerFast) -> None:
        settings = CorpusSettings(sources=(*GRAMMAR, StdlibSource(kind="docs")), heldout=30)
        train = {prompt.input_ids.tobytes() for prompt in prompts(settings, tokenizer, "train")}
        heldout = {prompt.input_ids.tobytes() for prompt in prompts(settings, tokenizer)}
        assert len(train) == len(heldout) == 150
        assert not train & heldout


def test_training_texts_are_rendered_conversations_of_the_training_split(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [("q", "a")])
    settings = CorpusSettings(sources=(*GRAMMAR[:2], source), samples=9)
    texts = list(training_texts(settings, 9))
    assert len(texts) in (6, 7)  # the file has one record at most
    assert all(text.startswith("<|im_start|>") and text.endswith("<|im_end|>\n") for text in texts)
    assert texts == list(training_texts(settings, 9))
