"""Chat template to tokens and loss mask, proven sample by sample.

The assistant's text is found by rendering, not by searching for markers. The conversation is rendered as it
is (T) and with every assistant turn replaced by a sentinel (S). A template is a function of the turns, so T
and S agree outside the answers: what S has before, between and behind its sentinels frames the answers in T.
Where an answer repeats what stands between two answers, each answer is probed alone: prefix and suffix are
then exact whatever it contains. No marker of any template has to be known, a template that strips earlier
thinking or refuses partial conversations is served, and one that cannot be framed is an error instead of an
empty mask.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from drafthouse.corpus.frames import Filled, Frames
from drafthouse.corpus.masking import masked
from drafthouse.corpus.records import Conversation, Ids, Mask, Prompt, TokenSample
from drafthouse.corpus.token_bytes import TokenBytes, token_bytes
from drafthouse.errors import CorpusError

# Private-use characters: they have no meaning in Unicode, so text that holds them is rare (and checked for).
_SENTINEL = "\ue0f1\uf0d8{0}\uf0d8\ue0f2"
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*\Z")
_OPEN_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
# End-of-turn tokens that are not the tokenizer's eos_token in every release of their models.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "</s>", "<|end_of_text|>")


class TemplateRefusedError(CorpusError):
    """The chat template itself refuses the conversation, e.g. because roles do not alternate."""


@dataclass(frozen=True)
class Span:
    """An assistant turn in the rendered text: [start, end), with its end-of-turn token from `stop` on."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True)
class Rendered:
    """A conversation as one text with its assistant spans in order."""

    text: str
    spans: tuple[Span, ...]

    def answers(self) -> list[str]:
        """The assistant turns, each with its end-of-turn token."""
        return [self.text[span.start : span.end] for span in self.spans]


@dataclass(frozen=True)
class Dropped:
    """A conversation that gives no sample, and the reason as it is counted in the manifest."""

    id: str
    kind: str
    reason: str


class ChatTemplate:
    """A tokenizer's own chat template, rendered, tokenised and masked.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        variables: further template variables, e.g. `{"enable_thinking": False}`, for every rendering.

    Raises:
        CorpusError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, variables: Mapping[str, Any] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise CorpusError(
                "the tokenizer has no chat template",
                where=str(tokenizer.name_or_path or "tokenizer"),
                fix="give one in chat_template.jinja beside tokenizer.json",
            )
        self.tokenizer = tokenizer
        self.variables = dict(variables or {})
        self._backend = tokenizer.backend_tokenizer
        self._normalizer = self._backend.normalizer
        ends = dict.fromkeys((tokenizer.eos_token, *_TURN_ENDS))
        self._turn_ends = tuple(end for end in ends if end)
        self._control = tuple(
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content
        )
        self._supplied = self._supplied_thought()
        self._says_space = self._space_is_said()

    @cached_property
    def _table(self) -> TokenBytes | None:
        # Only where samples are made: a large vocabulary costs a second.
        return token_bytes(self._backend)

    @cached_property
    def _is_control(self) -> npt.NDArray[np.bool_]:
        size = 0 if self._table is None else len(self._table.pieces)
        flags = np.zeros(size, dtype=bool)
        special = self.tokenizer.added_tokens_decoder.items()
        flags[[number for number, token in special if token.content in self._control]] = True
        return flags

    @cached_property
    def _frames(self) -> Frames | None:
        if self._table is None:
            return None
        # apply_chat_template hands over the special tokens (bos_token, …) as well.
        return Frames(str(self.tokenizer.chat_template), {**self.tokenizer.special_tokens_map, **self.variables})

    def render(self, conversation: Conversation) -> Rendered:
        """Render one conversation and frame its assistant turns.

        Raises:
            TemplateRefusedError: the template raised.
            CorpusError: a turn cannot be framed, or there is no assistant turn.
        """
        turns = [place for place, message in enumerate(conversation.messages) if message.role == "assistant"]
        if not turns:
            raise CorpusError(
                "no assistant tokens: the conversation has no assistant turn",
                where=conversation.id,
                fix="drop the record or add its answer",
            )
        messages = [message.as_template_dict() for message in conversation.messages]
        sentinel = _unused_sentinel(conversation)
        probe = {"role": "assistant", "content": sentinel}
        marked = [probe if message["role"] == "assistant" else message for message in messages]
        try:
            text, all_marked = self._texts([messages, marked], conversation)
            spans = self._frame_all(text, all_marked.split(sentinel), len(turns))
            if spans is None:
                # One answer at a time: exact whatever the answers contain, at the cost of a rendering each.
                probes = [[*messages[:turn], probe, *messages[turn + 1 :]] for turn in turns]
                parts = [one.split(sentinel) for one in self._texts(probes, conversation)]
                framed = [self._frame_all(text, halves, 1) for halves in parts]
                spans = [span for one in framed for span in one or ()]
                if len(spans) != len(turns) and all(len(halves) == 2 for halves in parts):
                    # A call may end in another token than a text, so that no text can stand in its place.
                    spans = self._frame_by_prefix(text, messages, turns, conversation)
        except TemplateRefusedError:
            # Some templates refuse a tool's answer behind a turn that calls no tool. If the conversation
            # itself is refused as well, this raises again.
            (text,) = self._texts([messages], conversation)
            spans = self._frame_by_prefix(text, messages, turns, conversation)
        if len(spans) != len(turns) or any(a.end > b.start for a, b in itertools.pairwise(spans)):
            raise CorpusError(
                "the chat template does not frame an assistant turn, so its mask cannot be derived",
                where=conversation.id,
                fix="use a template that renders the content of every assistant turn exactly once",
            )
        if self._says_space:
            spans = [Span(one.start - text.endswith(" ", 0, one.start), one.stop, one.end) for one in spans]
        return Rendered(text, tuple(spans))

    def samples(
        self, conversations: Sequence[Conversation], max_tokens: int | None = None
    ) -> list[TokenSample | Dropped]:
        """Render, tokenise, mask and prove a batch; the result has one entry a conversation, in order.

        Drop reasons: `template_refused`, `control_tokens` (a turn's text holds a control token, so a reader
        of tokens would see turns that were never written), `straddles` (a token crosses the border of an
        answer), `too_long`.

        Raises:
            CorpusError: a template that cannot be framed, an empty mask, or one that does not decode to the
                answers.
        """
        out: list[TokenSample | Dropped | None] = [None] * len(conversations)
        rest: list[tuple[int, Rendered | Dropped]] = []
        filled: list[tuple[int, Filled]] = []
        for place, conversation in enumerate(conversations):
            fast = self._fill(conversation)
            if fast is None:
                rest.append((place, self._render_and_learn(conversation)))
            else:
                filled.append((place, fast))
        for (place, _), made in zip(filled, self._masked([one for _, one in filled]), strict=True):
            conversation = conversations[place]
            if made is None:
                rest.append((place, self._render_and_learn(conversation)))
            elif max_tokens is not None and len(made[0]) > max_tokens:
                out[place] = Dropped(conversation.id, conversation.kind, "too_long")
            else:
                out[place] = TokenSample(conversation.id, conversation.kind, *made)
        slow = self._samples_by_offsets([(conversations[place], one) for place, one in rest], max_tokens)
        for (place, _), sample in zip(rest, slow, strict=True):
            out[place] = sample
        return [one for one in out if one is not None]

    def _fill(self, conversation: Conversation) -> Filled | None:
        """The rendering by a frame, None where there is none that is proven to apply."""
        if self._frames is None or self._table is None:
            return None
        found = self._frames.find(conversation)
        if found is None:
            return None
        frame, changed = found
        if frame.unprinted and self._holds_control_tokens(conversation):
            return None  # counting tokens would not find it
        try:
            return frame.fill(changed)
        except UnicodeEncodeError:
            return None

    def _masked(self, filled: list[Filled]) -> list[tuple[Ids, Mask] | None]:
        if not filled or self._table is None:
            return []
        encodings = self._backend.encode_batch_fast([one.text for one in filled], add_special_tokens=False)
        return masked(encodings, filled, self._table, self._is_control)

    def _render_and_learn(self, conversation: Conversation) -> Rendered | Dropped:
        if self._holds_control_tokens(conversation):
            return Dropped(conversation.id, conversation.kind, "control_tokens")
        try:
            rendered = self.render(conversation)
        except TemplateRefusedError:
            return Dropped(conversation.id, conversation.kind, "template_refused")
        if self._frames is not None and self._table is not None:
            spans = [(span.start, span.end) for span in rendered.spans]
            self._frames.learn(conversation, rendered.text, spans, self._count_controls, self._supplied)
        return rendered

    def _count_controls(self, text: str) -> int:
        return int(self._is_control[self._backend.encode(text, add_special_tokens=False).ids].sum())

    def _samples_by_offsets(
        self, rendered: Sequence[tuple[Conversation, Rendered | Dropped]], max_tokens: int | None
    ) -> list[TokenSample | Dropped]:
        out: list[TokenSample | Dropped] = []
        texts = [one.text for _, one in rendered if isinstance(one, Rendered)]
        encodings = iter(self._backend.encode_batch(texts, add_special_tokens=False))
        proofs: list[tuple[TokenSample, Rendered]] = []
        for conversation, one in rendered:
            if isinstance(one, Dropped):
                out.append(one)
                continue
            encoding = next(encodings)
            if max_tokens is not None and len(encoding) > max_tokens:
                out.append(Dropped(conversation.id, conversation.kind, "too_long"))
                continue
            mask = _mask(encoding.offsets, one.spans)
            if mask is None:
                out.append(Dropped(conversation.id, conversation.kind, "straddles"))
                continue
            if not mask.any():
                raise CorpusError(
                    "no assistant tokens: the mask of this conversation is empty",
                    where=conversation.id,
                    fix="the chat template renders its assistant turns as nothing; use another template",
                )
            sample = TokenSample(conversation.id, conversation.kind, np.array(encoding.ids, dtype=np.int32), mask)
            proofs.append((sample, one))
            out.append(sample)
        self._prove([sample for sample, _ in proofs], [one for _, one in proofs])
        return out

    def prove(self, sample: TokenSample, conversation: Conversation) -> None:
        """Check that the masked tokens decode to exactly the assistant turns of `conversation`.

        Raises:
            CorpusError: they do not.
        """
        self._prove([sample], [self.render(conversation)])

    def prompt(self, conversation: Conversation, sample: TokenSample | None = None) -> Prompt | Dropped:
        """The prompt of the last assistant turn, and the answer it should get.

        `sample` may be given where it has been made already.

        The prompt is what a server sends to the model: the turns before the last answer, rendered with
        `add_generation_prompt`. It must be the beginning of the whole rendering, or training and serving
        would see different texts.

        Raises:
            CorpusError: the rendered prompt is not the beginning of the rendered conversation.
        """
        if sample is None:
            (made,) = self.samples([conversation])
            if isinstance(made, Dropped):
                return made
            sample = made
        rendered = self.render(conversation)
        span = rendered.spans[-1]
        last = max(place for place, message in enumerate(conversation.messages) if message.role == "assistant")
        messages = [message.as_template_dict() for message in conversation.messages[:last]]
        (text,) = self._texts([messages], conversation, generation=True)
        encoded = self._backend.encode(text, add_special_tokens=False).ids
        ids = np.array(encoded, dtype=np.int32)
        answer = rendered.text[span.start : span.stop]
        opened = text[span.start :]
        if rendered.text.startswith(text) and len(text) >= span.start and not _OPEN_THOUGHT.sub("", opened):
            if not np.array_equal(ids, sample.input_ids[: len(ids)]):
                return Dropped(conversation.id, conversation.kind, "straddles")
            answer = answer[len(opened) :]
        elif _OPEN_THOUGHT.sub("", text) != rendered.text[: span.start]:
            # All that may differ is a thinking block that the prompt opens and this answer does not have.
            raise CorpusError(
                "the generation prompt is not the beginning of the rendered conversation",
                where=conversation.id,
                fix="training on it would not be what is served; use another chat template",
            )
        return Prompt(conversation.id, conversation.kind, ids, answer)

    def _texts(
        self, chats: list[list[dict[str, Any]]], conversation: Conversation, *, generation: bool = False
    ) -> list[str]:
        try:
            texts: list[str] = self.tokenizer.apply_chat_template(
                chats,
                tools=conversation.tools or None,
                tokenize=False,
                add_generation_prompt=generation,
                **self.variables,
            )
        except jinja2.TemplateError as error:
            raise TemplateRefusedError(
                f"the chat template refuses this conversation ({error})",
                where=conversation.id,
                fix="correct the record or use another template",
            ) from error
        return texts

    def _frame_all(self, text: str, between: list[str], turns: int) -> list[Span] | None:
        """Spans of `turns` answers in `text`, given what lies before, between and behind them.

        None when the text is not framed so, or when an answer repeats what lies between two answers.
        """
        if len(between) != turns + 1:
            return None
        # An empty thinking block before the sentinel is scaffolding of an answer without thinking; where the
        # answer has thinking, the same place holds it.
        *heads, tail = [*(_EMPTY_THOUGHT.sub("", part) for part in between[:-1]), between[-1]]
        last = len(text) - len(tail)
        if not text.startswith(heads[0]) or not text.endswith(tail) or last < len(heads[0]):
            return None
        starts, stops = [len(heads[0])], []
        for head in heads[1:]:
            stop = text.find(head, starts[0], last)
            if not head or stop < starts[-1] or text.rfind(head, starts[0], last) != stop:
                return None
            stops.append(stop)
            starts.append(stop + len(head))
        stops.append(last)
        return [
            self._span(text, start, stop, behind)
            for start, stop, behind in zip(starts, stops, between[1:], strict=True)
        ]

    def _frame_by_prefix(
        self, text: str, messages: list[dict[str, Any]], turns: list[int], conversation: Conversation
    ) -> list[Span]:
        """Spans between the generation prompt before a turn and the rendering up to that turn.

        Shorter than `turns` when one of these is not a beginning of `text`.
        """
        spans: list[Span] = []
        for turn in turns:
            (prompt,) = self._texts([messages[:turn]], conversation, generation=True)
            (until,) = self._texts([messages[: turn + 1]], conversation)
            if not (until.startswith(prompt) and text.startswith(until)):
                break
            ends = [(at, token) for token in self._turn_ends if (at := until.rfind(token, len(prompt))) >= 0]
            stop, token = max(ends, default=(len(until), ""))
            spans.append(Span(len(prompt), stop, stop + len(token)))
        return spans

    def _span(self, text: str, start: int, stop: int, behind: str) -> Span:
        if self._supplied and text.startswith(self._supplied, start, stop):
            start += len(self._supplied)
        ending = next((token for token in self._turn_ends if behind.startswith(token)), "")
        return Span(start, stop, stop + len(ending))

    def _supplied_thought(self) -> str:
        """The thinking scaffold that the generation prompt writes: no model has to produce it."""
        probe = Conversation.model_validate(
            {"id": "probe", "kind": "probe", "messages": [{"role": "user", "content": "a"}]}
        )
        try:
            (text,) = self._texts([[probe.messages[0].as_template_dict()]], probe, generation=True)
        except TemplateRefusedError:
            return ""
        opened = _OPEN_THOUGHT.search(text)
        return opened.group() if opened else ""

    def _space_is_said(self) -> bool:
        """Whether the model has to say the space before an answer.

        Mistral's templates print "[/INST] answer" and prompt with "[/INST]". The space and the first word are one
        token, so that a mask from the word on would cut it.
        """
        asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        probe = Conversation.model_validate({"id": "probe", "kind": "probe", "messages": [asked, said]})
        try:
            (text,) = self._texts([[asked, said]], probe)
            (prompt,) = self._texts([[asked]], probe, generation=True)
        except TemplateRefusedError:
            return False
        return text.startswith(f"{prompt} b")

    def _holds_control_tokens(self, conversation: Conversation) -> bool:
        said = conversation.model_dump_json()
        return any(token in said for token in self._control)

    def _prove(self, samples: Sequence[TokenSample], rendered: Sequence[Rendered]) -> None:
        masked = [sample.input_ids[sample.loss_mask.astype(bool)].tolist() for sample in samples]
        decoded = self._backend.decode_batch(masked, skip_special_tokens=False)
        for sample, text, one in zip(samples, decoded, rendered, strict=True):
            expected = "".join(one.answers())
            if self._normalizer is not None:
                expected = self._normalizer.normalize_str(expected)
            if text != expected:
                raise CorpusError(
                    f"the masked tokens decode to {text[:80]!r} where the assistant says {expected[:80]!r}",
                    where=sample.id,
                    fix="the tokenizer does not give back this text; use another one or drop the record",
                )


def render_text(conversation: Conversation, chat_template: str) -> str:
    """Render a conversation with a template and no tokenizer (to train one).

    Raises:
        TemplateRefusedError: the template raised.
    """
    messages = [message.as_template_dict() for message in conversation.messages]
    try:
        texts, _ = render_jinja_template([messages], tools=conversation.tools or None, chat_template=chat_template)
    except jinja2.TemplateError as error:
        raise TemplateRefusedError(
            f"the chat template refuses this conversation ({error})",
            where=conversation.id,
            fix="correct the record",
        ) from error
    return str(texts[0])


def _mask(offsets: list[tuple[int, int]], spans: Sequence[Span]) -> Mask | None:
    """uint8 [T] with ones on tokens inside a span; None when a token crosses a border."""
    borders = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    starts, ends = borders[:, 0], borders[:, 1]
    mask = np.zeros(len(offsets), dtype=np.uint8)
    for span in spans:
        first, last = np.searchsorted(starts, (span.start, span.end), side="left")
        if first > 0 and ends[first - 1] > span.start:
            return None
        if last > first and ends[last - 1] > span.end:
            return None
        mask[first:last] = 1
    return mask


def _unused_sentinel(conversation: Conversation) -> str:
    everything = conversation.model_dump_json()
    number = 0
    while (sentinel := _SENTINEL.format(number)) in everything:
        number += 1
    return sentinel
