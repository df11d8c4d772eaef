"""What a corpus is made of: conversations as people write them, samples as a model reads them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "heldout"]
Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ToolCall(_Record):
    """One call that an assistant turn makes; `arguments` is the parsed JSON object."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Message(_Record):
    """One turn. `reasoning_content` and `tool_calls` belong to assistant turns, `name` to tool turns."""

    role: Role
    content: str = ""
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    name: str | None = None

    def as_template_dict(self) -> dict[str, Any]:
        """The message as Hugging Face chat templates read it: OpenAI's form, arguments as a mapping."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        if self.name is not None:
            message["name"] = self.name
        return message


class Conversation(_Record):
    """A whole exchange; `tools` are OpenAI function schemas offered to the assistant."""

    id: str
    kind: str
    messages: list[Message]
    tools: list[dict[str, Any]] = Field(default_factory=list)

    def content_hash(self) -> str:
        """sha256 (hex) of what is said, whatever the id and the kind: equal hashes are duplicates."""
        return _digest({"messages": [_said(message) for message in self.messages], "tools": self.tools})

    def question_hash(self) -> str:
        """sha256 (hex) of all turns before the first answer: it decides the split of a collected corpus.

        Hashing the question and not the answer keeps two answers to one question on the same side.
        """
        asked: list[Any] = []
        for message in self.messages:
            if message.role == "assistant":
                break
            asked.append(_said(message))
        return _digest({"messages": asked, "tools": self.tools})


@dataclass(frozen=True)
class TokenSample:
    """A tokenised conversation: input_ids int32 [T]; loss_mask uint8 [T], 1 where the model must answer."""

    id: str
    kind: str
    input_ids: Ids
    loss_mask: Mask


@dataclass(frozen=True)
class Prompt:
    """Tokens up to and including the generation prompt of the last assistant turn, int32 [T].

    `reference` is the text that turn should be, without the end-of-turn token.
    """

    id: str
    kind: str
    input_ids: Ids
    reference: str


def _said(message: Message) -> dict[str, Any]:
    return message.model_dump(mode="json", exclude_defaults=True)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
