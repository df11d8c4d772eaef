from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse.measure import units

S = units.SPACE


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.6, f"1.00{S}k"),
        (443_264, f"443{S}k"),
        (999_949, f"1.00{S}M"),
        (1_041_216, f"1.04{S}M"),
        (27e9, f"27.0{S}G"),
    ],
)
def test_compact_keeps_three_digits(value: float, text: str) -> None:
    assert units.compact(value) == text


@given(st.integers(min_value=0, max_value=990_000_000_000))
def test_compact_never_writes_four_digits(value: int) -> None:
    written, _, prefix = units.compact(value).partition(S)
    assert 1 <= len(written.replace(".", "")) <= 3
    scale = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[prefix]
    assert float(written) * scale == pytest.approx(value, rel=5.1e-3)


@pytest.mark.parametrize(
    ("value", "text"),
    [(12, f"12{S}B"), (8_192, f"8.19{S}kB"), (2_100_000, f"2.10{S}MB"), (25_276_514_304, f"25.3{S}GB")],
)
def test_size_is_decimal_bytes(value: float, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.042, f"42{S}ms"),
        (0.9999, f"1.0{S}s"),
        (7.26, f"7.3{S}s"),
        (59.7, f"1{S}min 00{S}s"),
        (290, f"4{S}min 50{S}s"),
        (3599.7, f"1{S}h 00{S}min"),
        (5_400, f"1{S}h 30{S}min"),
    ],
)
def test_duration_never_shows_sixty(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, f"0{S}%"), (0.0163, f"1.6{S}%"), (0.0999, f"10{S}%"), (0.7126, f"71{S}%"), (1, f"100{S}%")],
)
def test_percent(share: float, text: str) -> None:
    assert units.percent(share) == text


def test_change_has_a_sign_and_no_negative_zero() -> None:
    assert units.change(3.6, 3.0) == f"+20.0{S}%"
    assert units.change(2.4, 3.0) == f"−20.0{S}%"
    assert units.change(3.0 - 1e-9, 3.0) == f"+0.0{S}%"
