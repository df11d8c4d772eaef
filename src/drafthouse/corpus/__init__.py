"""Sources, mixture, chat template: from conversations to token samples with a proven loss mask.

What needs a tokenizer is imported when it is first asked for: the command line lists its verbs without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from drafthouse.corpus.records import Conversation, Message, Prompt, Split, TokenSample, ToolCall
from drafthouse.corpus.settings import CorpusSettings, GrammarSource, JsonlSource, StdlibSource

if TYPE_CHECKING:
    from drafthouse.corpus.builder import build
    from drafthouse.corpus.mixture import Report, prompts, token_samples, training_texts
    from drafthouse.corpus.shards import CorpusReader, CorpusWriter, Manifest
    from drafthouse.corpus.template import ChatTemplate, Dropped, TemplateRefusedError
    from drafthouse.corpus.tokenizer import load_tokenizer, save_tokenizer, tokenizer_sha256, train_tokenizer

__all__ = [
    "ChatTemplate",
    "Conversation",
    "CorpusReader",
    "CorpusSettings",
    "CorpusWriter",
    "Dropped",
    "GrammarSource",
    "JsonlSource",
    "Manifest",
    "Message",
    "Prompt",
    "Report",
    "Split",
    "StdlibSource",
    "TemplateRefusedError",
    "TokenSample",
    "ToolCall",
    "build",
    "load_tokenizer",
    "prompts",
    "save_tokenizer",
    "token_samples",
    "tokenizer_sha256",
    "train_tokenizer",
    "training_texts",
]

_LATER = {
    "builder": ("build",),
    "mixture": ("Report", "prompts", "token_samples", "training_texts"),
    "shards": ("CorpusReader", "CorpusWriter", "Manifest"),
    "template": ("ChatTemplate", "Dropped", "TemplateRefusedError"),
    "tokenizer": ("load_tokenizer", "save_tokenizer", "tokenizer_sha256", "train_tokenizer"),
}
_HOMES = {name: module for module, names in _LATER.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
