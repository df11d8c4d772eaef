"""Run files: every mistake becomes one sentence that names the key, and equal settings have equal digests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError, model_validator

from drafthouse.config import Settings, differences, digest_of, load, validate
from drafthouse.errors import ConfigError


class Inner(Settings):
    rate: float = Field(0.1, gt=0, description="a rate")
    kinds: tuple[str, ...] = ()
    mode: Literal["fast", "exact"] = "exact"


class Grammar(Settings):
    type: Literal["grammar"] = "grammar"
    kind: str = "chat"


class Lines(Settings):
    type: Literal["lines"] = "lines"
    path: str = ""


class Root(Settings):
    name: str = "run"
    steps: int = Field(10, ge=1)
    note: str | None = None
    inner: Inner = Field(default_factory=Inner)
    named: dict[str, Inner] = Field(default_factory=dict)
    maybe: Inner | None = None
    sources: tuple[Annotated[Grammar | Lines, Field(discriminator="type")], ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Root:
        if self.name == "long" and self.steps < 100:
            raise ValueError("a long run has at least 100 steps")
        return self


def run_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.yml"
    file.write_text(text, encoding="utf-8")
    return file


def sentence(*arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(Root, *arguments)
    told = str(caught.value)
    assert "\n" not in told
    assert caught.value.exit_code == 2
    return told


def test_a_file_is_read_over_the_defaults(tmp_path: Path) -> None:
    root = load(Root, run_file(tmp_path, "steps: 7\ninner:\n  rate: 1e-3\n  kinds: [a, b]\n"))
    assert (root.name, root.steps, root.inner) == ("run", 7, Inner(rate=0.001, kinds=("a", "b")))


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "---\n", "{}"])
def test_an_empty_file_gives_the_defaults(tmp_path: Path, text: str) -> None:
    assert load(Root, run_file(tmp_path, text)) == load(Root, None) == Root()


def test_an_unknown_key_is_named_with_those_that_are_known(tmp_path: Path) -> None:
    file = run_file(tmp_path, "stps: 7\n")
    assert sentence(file) == (
        f"{file}: unknown key 'stps' (known here: inner, maybe, name, named, note, sources, steps); correct that key"
    )
    file = run_file(tmp_path, "inner: {rat: 1}\n")
    assert sentence(file) == f"{file}: unknown key 'inner.rat' (known here: kinds, mode, rate); correct that key"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("named: {ours: {rat: 1}}", "unknown key 'named.ours.rat' (known here: kinds, mode, rate)"),
        ("maybe: {rat: 1}", "unknown key 'maybe.rat' (known here: kinds, mode, rate)"),
        (
            "sources: [{type: grammar}, {type: lines, pth: x}]",
            "unknown key 'sources.1.lines.pth' (known here: path, type)",
        ),
    ],
)
def test_known_keys_are_found_below_dictionaries_lists_and_unions(tmp_path: Path, text: str, problem: str) -> None:
    assert problem in sentence(run_file(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("steps: many", "'steps': should be a valid integer"),
        ("steps: 1.5", "'steps': should be a valid integer"),
        ("steps: 0", "'steps': should be greater than or equal to 1"),
        ("name: [a]", "'name': should be a valid string"),
        ("name: 2024-01-01", "'name': should be a valid string"),
        ("inner: 4", "'inner': should be a valid dictionary"),
        ("inner:", "'inner': should be a valid dictionary"),
        ("inner: {rate: -1}", "'inner.rate': should be greater than 0"),
        ("inner: {mode: slow}", "'inner.mode': should be 'fast' or 'exact'"),
        ("inner: {kinds: [a, 3]}", "'inner.kinds.1': should be a valid string"),
        ("named: {ours: {rate: x}}", "'named.ours.rate': should be a valid number"),
        ("name: long", "'(the whole file)': a long run has at least 100 steps"),
        ("1: 2", "'1'"),
    ],
)
def test_a_wrong_value_is_told_with_its_path(tmp_path: Path, text: str, problem: str) -> None:
    file = run_file(tmp_path, text)
    told = sentence(file)
    assert told.startswith(f"{file}: ")
    assert problem in told


@pytest.mark.parametrize(
    "text", ["steps: [1", "\tsteps: 1", "steps: 1\n bad: 2", "when: 2024-13-45", "!!python/name:os.system x"]
)
def test_what_is_not_yaml_is_told_in_one_sentence(tmp_path: Path, text: str) -> None:
    file = run_file(tmp_path, text)
    assert sentence(file).startswith(f"{file}: not valid YAML (")


@pytest.mark.parametrize(
    ("text", "line"),
    [("steps: 4\nname: a\nsteps: 5", 3), ("inner:\n  rate: 1\n  rate: 2", 3), ("inner: {rate: 1, rate: 2}", 1)],
)
def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    file = run_file(tmp_path, text)
    told = sentence(file)
    assert "stands twice" in told
    assert f"line {line}," in told


def test_a_mapping_may_be_merged_into_another_that_says_it_otherwise(tmp_path: Path) -> None:
    file = run_file(tmp_path, "inner: &a {rate: 1}\nnamed: {ours: {<<: *a, rate: 2}}")
    assert load(Root, file).named["ours"].rate == 2


def test_bytes_that_are_no_text_are_told_too(tmp_path: Path) -> None:
    (tmp_path / "run.yml").write_bytes(b"\xff\xfe\x00")
    assert "not valid YAML (" in sentence(tmp_path / "run.yml")


@pytest.mark.parametrize("text", ["- steps", "[]", "7", "false", "steps"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    assert "a run file is a mapping of keys" in sentence(run_file(tmp_path, text))


def test_a_file_that_is_not_there_or_cannot_be_read_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yml"
    assert sentence(missing) == f"{missing}: there is no such run file; check the path"
    assert sentence(tmp_path) == f"{tmp_path}: cannot be read (Is a directory); check the path"


def test_set_changes_scalars_lists_and_nested_keys(tmp_path: Path) -> None:
    file = run_file(tmp_path, "steps: 7\n")
    root = load(
        Root,
        file,
        ["steps=8", "inner.rate=0.5", "inner.kinds=[x, y]", "named.ours.mode=fast", "name = spaced", "note="],
    )
    assert root == Root(
        steps=8,
        name="spaced",
        inner=Inner(rate=0.5, kinds=("x", "y")),
        named={"ours": Inner(mode="fast")},
    )


def test_of_two_overrides_the_later_one_counts() -> None:
    assert load(Root, None, ["steps=3", "steps=4"]).steps == 4
    assert load(Root, None, ["inner={rate: 2}", "inner.mode=fast"]).inner == Inner(rate=2, mode="fast")


def test_a_value_may_hold_an_equals_sign() -> None:
    assert load(Root, None, ["name=a=b"]).name == "a=b"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("steps", "--set: 'steps' is not of the form key.path=value; write it so"),
        ("=4", "--set: '=4' is not of the form key.path=value; write it so"),
        ("inner.=4", "--set: 'inner.=4' is not of the form key.path=value; write it so"),
        ("name=[a", "--set: the value of 'name' is not YAML; quote it"),
        ("name=2024-99-99", "--set: the value of 'name' is not YAML; quote it"),
        ("steps.more=4", "--set: 'steps.more' goes through 'steps', which holds a value"),
        ("stps=4", "the default settings with --set: unknown key 'stps'"),
        ("steps=x", "the default settings with --set: 'steps': should be a valid integer"),
    ],
)
def test_a_wrong_override_is_told(tmp_path: Path, override: str, problem: str) -> None:
    arguments = (None, [override]) if "default" in problem else (run_file(tmp_path, "steps: 2"), [override])
    assert problem in sentence(*arguments)


def test_overrides_leave_the_file_alone(tmp_path: Path) -> None:
    file = run_file(tmp_path, "steps: 7\n")
    load(Root, file, ["steps=8"])
    assert file.read_text(encoding="utf-8") == "steps: 7\n"
    assert load(Root, file).steps == 7


def test_settings_cannot_be_changed_and_defaults_are_checked() -> None:
    with pytest.raises(ValidationError):
        Root().steps = 4  # type: ignore[misc]

    class Wrong(Settings):
        steps: int = Field(0, ge=1)

    with pytest.raises(ConfigError, match="'steps': should be greater than or equal to 1"):
        validate(Wrong, {}, "defaults")


def test_the_digest_is_fixed_and_follows_values_only() -> None:
    """The literal keeps digests comparable between releases: runs are resumed by them."""
    assert Inner().digest() == "89641df10aa4243052a7b573f9dd028ed2e910eaed6447d78a763031cad51175"
    assert Root().digest() == load(Root, None, ["steps=10", "inner={rate: 0.1}"]).digest()
    assert Root(steps=11).digest() != Root().digest()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab\u00e4", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abc", max_size=2), json_values, max_size=4))
def test_the_digest_does_not_depend_on_the_order_of_keys(value: dict[str, Any]) -> None:
    reverse = {key: value[key] for key in reversed(value)}
    assert digest_of(value) == digest_of(reverse)
    assert len(digest_of(value)) == 64


@given(json_values, json_values)
def test_values_are_equal_exactly_when_their_digests_are(one: Any, other: Any) -> None:
    same = digest_of(one) == digest_of(other)
    # In JSON true is not 1.
    assert same == (repr_of(one) == repr_of(other))


def repr_of(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{repr_of(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(repr_of, value)) + "]"
    return repr(value)


def test_differences_name_every_leaf() -> None:
    old = {"a": {"b": 1, "c": [1, 2]}, "d": "x"}
    new = {"a": {"b": 2, "c": [1, 2]}, "d": "y"}
    assert differences(old, new) == ["a.b: 1 → 2", "d: x → y"]
    assert differences(old, old) == []


def test_differences_tell_a_key_that_only_one_side_has() -> None:
    found = differences({"a": 1}, {"a": 1, "b": 2})
    assert len(found) == 1
    assert found[0].startswith("b: ")
    assert found[0].endswith(" → 2")
    assert differences({"b": None}, {}) != []
    assert len(differences({"a": {"x": 1}}, {"a": 3})) == 1


def test_long_values_are_shortened() -> None:
    (line,) = differences({"a": list(range(100))}, {"a": []})
    assert len(line) < 90
    assert line.endswith("… → []")
