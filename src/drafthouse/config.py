"""One YAML run file, typed: unknown key, wrong type and impossible combination become one sentence.

Rooms derive their settings from `Settings`; `loop.py` composes them into the run file's root. The resolved
settings are kept with every run together with their digest, so that a result can always say what made it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from drafthouse.errors import ConfigError


class Settings(BaseModel):
    """Base of every settings class: unknown keys are refused, values cannot change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    def digest(self) -> str:
        """sha256 (hex) of the resolved settings as canonical JSON."""
        return digest_of(self.model_dump(mode="json"))


S = TypeVar("S", bound=Settings)
_ABSENT = "(absent)"


def digest_of(value: Any) -> str:
    """sha256 (hex) of a JSON-able value in canonical form (sorted keys, no white space)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


class _OnceLoader(yaml.SafeLoader):
    """YAML as usual, but a key that stands twice in one mapping is refused: the first would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for name, _ in node.value:
            if name.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(name, deep=True)
            if isinstance(key, str | int | float) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key '{key}' stands twice", name.start_mark)
            seen.add(key if isinstance(key, str | int | float) else id(name))
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """The one YAML document in `text`.

    Raises:
        yaml.YAMLError: it is none, or a key stands twice in a mapping.
        ValueError: an impossible date.
    """
    return yaml.load(text, Loader=_OnceLoader)


def load(model: type[S], path: Path | None, overrides: Sequence[str] = ()) -> S:
    """Read `path` (YAML; None = defaults), apply `--set key.path=value` overrides, validate.

    Raises:
        ConfigError: one sentence that names the file and the path of the key.
    """
    where = str(path) if path else "the default settings"
    values: Any = {}
    if path is not None:
        try:
            values = read_yaml(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError("there is no such run file", where=where, fix="check the path") from None
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ConfigError(f"cannot be read ({reason})", where=where, fix="check the path") from None
        except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or an impossible date
            line = " ".join(str(error).split())
            raise ConfigError(f"not valid YAML ({line})", where=where, fix="correct the file") from error
        values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError("a run file is a mapping of keys", where=where, fix="see docs/architecture.md")
    for override in overrides:
        _apply(values, override)
    return validate(model, values, where if not overrides else f"{where} with --set")


def validate(model: type[S], values: Any, where: str) -> S:
    """Validate `values` as `model`; the first problem becomes one sentence with the path of its key."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_sentence(error, model), where=where, fix="correct that key") from None


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"'{override}' is not of the form key.path=value", where="--set", fix="write it so")
    try:
        value = read_yaml(text)
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"the value of '{key}' is not YAML", where="--set", fix="quote it") from None
    node = values
    for part in parts[:-1]:
        below = node.setdefault(part, {})
        if not isinstance(below, dict):
            raise ConfigError(f"'{key}' goes through '{part}', which holds a value", where="--set")
        node = below
    node[parts[-1]] = value


def _sentence(error: ValidationError, model: type[BaseModel]) -> str:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"]) or "(the whole file)"
    if first["type"] == "extra_forbidden":
        known = _fields_at(model, first["loc"][:-1])
        hint = f" (known here: {', '.join(known)})" if known else ""
        return f"unknown key '{path}'{hint}"
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"'{path}': {message[:1].lower()}{message[1:]}"


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    here: Any = model
    for part in path:
        here = _without_none(_below(here, part))
    return sorted(getattr(here, "model_fields", {}))


def _below(kind: Any, part: int | str) -> Any:
    """The type that `part` of an error's path has inside `kind`; None where it cannot be told."""
    fields = getattr(kind, "model_fields", None)
    if fields is not None:
        return fields[part].annotation if part in fields else None
    origin, inner = get_origin(kind), get_args(kind)
    if origin is dict:
        return inner[1]
    if origin in (list, tuple):
        return inner[0]
    if origin is Annotated:
        return _below(inner[0], part)
    # Of a tagged union pydantic puts the tag into the path.
    tagged = [one for one in inner if any(f.default == part for f in getattr(one, "model_fields", {}).values())]
    return tagged[0] if tagged else None


def _without_none(kind: Any) -> Any:
    """`X` of an optional `X | None`."""
    inner = [one for one in get_args(kind) if one is not type(None)]
    return inner[0] if len(inner) == 1 and type(None) in get_args(kind) else kind


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Every leaf in which two JSON-like values differ, as `a.b: old → new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(old.keys() | new.keys()):
            below = f"{path}.{key}" if path else key
            found += differences(old.get(key, _ABSENT), new.get(key, _ABSENT), below)
        return found
    return [] if old == new else [f"{path}: {_short(old)} → {_short(new)}"]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"
