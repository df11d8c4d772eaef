"""Sources, mixture, chat template: from conversations to token samples with a proven loss mask."""

from drafthouse.corpus.build import build
from drafthouse.corpus.mixture import Report, prompts, token_samples, training_texts
from drafthouse.corpus.records import Conversation, Message, Prompt, Split, TokenSample, ToolCall
from drafthouse.corpus.settings import CorpusSettings, GrammarSource, JsonlSource, StdlibSource
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
