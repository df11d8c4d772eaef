"""How figures, ages and states are written."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from drafthouse.dash import words

S = "\u00a0"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (3660, "1 h 01 min"), (172800, "2 d")],
)
def test_ages(seconds: float, text: str) -> None:
    assert words.age(seconds) == text.replace(" s", f"{S}s").replace(" min", f"{S}min").replace(" h", f"{S}h").replace(
        " d", f"{S}d"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0003, "3e−4"),
        (-0.5, "−0.5"),
        (2.38149, "2.381"),
        (1234.5, "1,234"),
        (12345, f"12.3{S}k"),
        (1e13, "1e+13"),
    ],
)
def test_figures(value: float, text: str) -> None:
    assert words.figure(value) == text


@pytest.mark.parametrize("write", [words.count, words.rate, words.size, words.percent, words.duration, words.figure])
def test_what_nobody_could_tell_is_a_dash(write: object) -> None:
    assert callable(write)
    assert write(None) == words.UNKNOWN
    assert "nobody could tell" in words.UNKNOWN


def test_sizes_go_beyond_gigabytes() -> None:
    assert words.size(37_700_000_000_000) == f"37.7{S}TB"
    assert words.size(2e15) == f"2{S}PB"
    assert words.size(999_500_000_000) == f"1{S}TB"
    assert words.size(340_000_000) == f"340{S}MB"


def test_a_moment_of_today_is_a_clock_and_another_has_its_date() -> None:
    now = datetime.now(UTC)
    assert words.utc(now) == f"{now:%H:%M:%S}"
    assert words.utc(datetime(2020, 2, 3, 4, 5, 6, tzinfo=UTC)) == "2020-02-03 04:05"
    assert words.utc(None) == "–"


def test_an_age_is_counted_from_now_and_never_negative() -> None:
    now = datetime(2026, 3, 1, 12, tzinfo=UTC)
    assert f">12{S}s ago<" in words.ago(now - timedelta(seconds=12), now)
    assert f">0{S}s ago<" in words.ago(now + timedelta(seconds=5), now)
    assert 'datetime="2026-03-01T12:00:00+00:00"' in words.ago(now, now)
    assert "never" in words.ago(None)


def test_a_state_is_glyph_and_word_and_an_unknown_word_is_neutral() -> None:
    assert words.badge("silent") == '<span class="st bad"><i aria-hidden="true">✖</i>silent</span>'
    assert 'class="st idle"' in words.badge("anything")
    assert "&lt;b&gt;" in words.badge("<b>")
    assert len(set(words.GLYPHS.values())) == len(words.GLYPHS), "states differ without colour"


def test_totals_leave_out_what_is_unknown() -> None:
    assert words.total([1.0, None, 2.0]) == 3.0
    assert words.total([None]) is None
