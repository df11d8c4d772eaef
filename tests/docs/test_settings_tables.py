"""Tables of settings name keys that exist, with the defaults that they have."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import BaseModel

from drafthouse.decode.evaluate import EvaluateSettings
from drafthouse.drafter.trainer import TrainSettings
from drafthouse.states.settings import ExtractSettings
from tests.docs.blocks import ROOT

TABLES: dict[str, type[BaseModel]] = {
    "extraction.md": ExtractSettings,
    "training.md": TrainSettings,
    "decoding.md": EvaluateSettings,
}
_HEAD = re.compile(r"^\| key[^|]*\| default \|", re.MULTILINE)
_ROW = re.compile(r"^\| ((?:`[\w.]+`(?:, )?)+) \| ([^|]*) \|", re.MULTILINE)
_NUMBERS = re.compile(r"[\d.]+(?:, [\d.]+)*")


def rows(page: str) -> list[tuple[list[str], str]]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = _HEAD.search(text)
    assert found, f"{page} has no table of settings"
    table = text[found.start() :].partition("\n\n")[0]
    return [(re.findall(r"`([\w.]+)`", keys), default.strip()) for keys, default in _ROW.findall(table)]


def default_of(settings: type[BaseModel], key: str) -> Any:
    """The default at a path of keys; KeyError when there is no such key."""
    model: Any = settings()
    for part in key.split("."):
        if part not in type(model).model_fields:
            raise KeyError(key)
        model = getattr(model, part)
    return model


@pytest.mark.parametrize("page", TABLES)
def test_keys_exist_and_defaults_are_theirs(page: str) -> None:
    wrong = {}
    for keys, shown in rows(page):
        values = [default_of(TABLES[page], key) for key in keys]
        flat = [one for value in values for one in (value if isinstance(value, tuple) else (value,))]
        if _NUMBERS.fullmatch(shown):
            same = [float(number) for number in shown.split(", ")] == [float(one) for one in flat]
        elif re.fullmatch(r"`[\w-]+`|true|false", shown):
            same = flat == [{"true": True, "false": False}.get(shown, shown.strip("`"))]
        else:
            continue  # in words
        if not same:
            wrong[", ".join(keys)] = (shown, flat)
    assert not wrong


def test_a_key_that_is_gone_is_found() -> None:
    with pytest.raises(KeyError):
        default_of(TrainSettings, "loss.softness")


def test_the_tables_are_read() -> None:
    assert sum(len(rows(page)) for page in TABLES) > 25
