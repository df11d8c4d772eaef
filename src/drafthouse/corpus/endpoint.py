"""Answers of a served model over its OpenAI-compatible endpoint, however badly the way there behaves.

A request is repeated for as long as others are answered: what fails for everybody ends the run (and loses nothing),
what fails for one conversation alone is given up after a number of tries and counted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2
from pydantic import Field

from drafthouse.config import Settings
from drafthouse.corpus.formats import RecordError, check_nested, openai_messages
from drafthouse.corpus.records import Conversation, Message
from drafthouse.errors import CorpusError

KEY_VARIABLE = "DRAFTHOUSE_API_KEY"
_LONGEST_PAUSE_S = 30.0
_BUSY = {408, 409, 425, 429}


class SamplingSettings(Settings):
    """How the target answers; kept with what it said."""

    model: str = Field(min_length=1, description="Name under which the endpoint serves the target.")
    temperature: float = Field(default=0.0, ge=0.0, description="0 = greedy; as it will be served")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=1, description="Only engines' own extension: vLLM and SGLang know it.")
    max_tokens: int = Field(default=2048, ge=1, description="Tokens after which an answer is cut.")
    seed: int | None = Field(default=0, ge=0)
    template_variables: dict[str, Any] = Field(
        default_factory=dict, description="Of the chat template, e.g. enable_thinking: false."
    )


class EndpointSettings(Settings):
    """Where the target answers, and how patient we are."""

    urls: tuple[str, ...] = Field(min_length=1, description="Base URLs (http://host:port); taken in turn.")
    concurrency: int = Field(default=64, ge=1, description="Requests in flight.")
    timeout_s: float = Field(default=600.0, gt=0.0, description="Of one answer.")
    tries: int = Field(default=12, ge=1, description="Of one conversation, while others are answered.")
    pause_s: float = Field(default=0.5, gt=0.0, description="Before the second try; doubles with every further one.")
    patience_s: float = Field(default=120.0, gt=0.0, description="Without any answer, after which the run ends.")


@dataclass(frozen=True)
class Answer:
    """The assistant turn; `cut` when the model was stopped by `max_tokens`; `tokens` as the endpoint counts."""

    message: Message
    tokens: int
    cut: bool


@dataclass
class Tally:
    """What happened on the way, by reason."""

    requests: int = 0
    failures: Counter[str] = field(default_factory=Counter)


class Endpoint:
    """A bounded client; an asynchronous context manager.

    Args:
        settings: where and how patiently.
        sampling: what is asked for.
    """

    def __init__(self, settings: EndpointSettings, sampling: SamplingSettings) -> None:
        self._settings, self._sampling = settings, sampling
        self._urls = itertools.cycle(url.rstrip("/").removesuffix("/v1") for url in settings.urls)
        self._slots = asyncio.Semaphore(settings.concurrency)
        key = os.environ.get(KEY_VARIABLE)
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(settings.timeout_s, connect=10.0, pool=None),
            limits=httpx2.Limits(max_connections=settings.concurrency),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            trust_env=False,
        )
        self._last_answer = time.monotonic()
        self._draw = random.Random()
        self.tally = Tally()

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def check(self) -> None:
        """Ask every URL for its models.

        Raises:
            CorpusError: one does not answer, or does not serve the model.
        """
        for url in dict.fromkeys(self._settings.urls):
            where = f"{url.rstrip('/').removesuffix('/v1')}/v1/models"
            try:
                response = await self._client.get(where, timeout=30.0)
                served = [str(model["id"]) for model in response.json()["data"]]
            except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError) as error:
                raise CorpusError(
                    f"no OpenAI-compatible server answers ({type(error).__name__})", where=where, fix="start it first"
                ) from error
            if self._sampling.model not in served:
                raise CorpusError(
                    f"'{self._sampling.model}' is not served there, but {', '.join(served) or 'nothing'}",
                    where=where,
                    fix="name a model that is",
                )

    async def answer(self, conversation: Conversation) -> Answer | str:
        """The target's answer in place of the last turn, or the reason why there is none.

        Reasons: `refused` (the endpoint will never take it), `given_up` (too many tries), `empty`, or what
        `formats.openai_messages` says of a malformed one (`bad_tool_call`, `not_text`, `too_deep`, …).

        Raises:
            CorpusError: nobody has been answered for `patience_s`.
        """
        body = json.dumps(request_body(conversation, self._sampling)).encode()
        async with self._slots:
            for attempt in range(self._settings.tries):
                if attempt:
                    await self._pause(attempt)
                self.tally.requests += 1
                try:
                    response = await self._client.post(
                        f"{next(self._urls)}/v1/chat/completions",
                        content=body,
                        headers={"Content-Type": "application/json"},
                    )
                except httpx2.HTTPError as error:
                    self._failed(type(error).__name__)
                    continue
                if 400 <= response.status_code < 500 and response.status_code not in _BUSY:
                    if response.status_code in {401, 403}:
                        raise CorpusError(
                            f"the endpoint refuses the key ({response.status_code})",
                            where=str(response.url),
                            fix=f"set {KEY_VARIABLE}",
                        )
                    self.tally.failures[f"status {response.status_code}"] += 1
                    return "refused"
                if response.status_code != 200:
                    self._failed(f"status {response.status_code}")
                    continue
                try:
                    choice = response.json()["choices"][0]
                    said, tokens = (
                        choice["message"],
                        int((response.json().get("usage") or {}).get("completion_tokens", 0)),
                    )
                    if not isinstance(said, dict):
                        raise TypeError("no message")
                except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
                    self._failed("not an answer")  # cut off on the way, or a proxy's page
                    continue
                self._last_answer = time.monotonic()
                return _read(said, tokens, choice.get("finish_reason") == "length")
            return "given_up"

    def _failed(self, reason: str) -> None:
        self.tally.failures[reason] += 1
        silent = time.monotonic() - self._last_answer
        if silent > self._settings.patience_s:
            raise CorpusError(
                f"nobody has been answered for {silent:.0f} s (last: {reason})",
                where=", ".join(self._settings.urls),
                fix="look after the endpoint and run it again: what was answered is kept",
            )

    async def _pause(self, attempt: int) -> None:
        longest = min(_LONGEST_PAUSE_S, self._settings.pause_s * 2 ** (attempt - 1))
        await asyncio.sleep(longest * self._draw.uniform(0.5, 1.0))


def request_body(conversation: Conversation, sampling: SamplingSettings) -> dict[str, Any]:
    """The chat completion that asks for the last turn of `conversation`."""
    body: dict[str, Any] = {
        "model": sampling.model,
        "messages": [_as_sent(message, place) for place, message in enumerate(conversation.messages[:-1])],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "stream": False,
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.top_k is not None:
        body["top_k"] = sampling.top_k
    if sampling.template_variables:
        body["chat_template_kwargs"] = sampling.template_variables
    if conversation.tools:
        body["tools"] = [
            tool if "function" in tool else {"type": "function", "function": tool} for tool in conversation.tools
        ]
    return body


def _as_sent(message: Message, place: int) -> dict[str, Any]:
    """A message as the API wants it: arguments as JSON text, calls and their results tied by an id."""
    sent = message.as_template_dict()
    if message.tool_calls:
        sent["tool_calls"] = [
            {
                "id": f"call_{place}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for number, call in enumerate(message.tool_calls)
        ]
    if message.role == "tool":
        sent["tool_call_id"] = f"call_{place - 1}_0"
    return sent


def _read(said: dict[str, Any], tokens: int, cut: bool) -> Answer | str:
    reasoning = said.get("reasoning_content") or said.get("reasoning")
    turn = {
        "role": "assistant",
        "content": "" if said.get("content") is None else said["content"],
        "tool_calls": said.get("tool_calls"),
        "reasoning_content": reasoning if isinstance(reasoning, str) and reasoning.strip() else None,
    }
    try:
        (message,), _ = openai_messages({"messages": [turn]})
        check_nested([message], [])
    except RecordError as error:
        return error.reason
    if not (message.content.strip() or message.tool_calls):
        return "empty"
    return Answer(message, tokens, cut)
