"""How numbers are written for people: one spelling per unit, so that a figure reads the same everywhere."""

from __future__ import annotations

SPACE = "\u00a0"  # no-break space: a number never parts from its unit at a line end


def count(value: float) -> str:
    """`12345` → `12,345`."""
    return f"{value:,.0f}"


def compact(value: float) -> str:
    """Three significant digits with a decimal prefix: `443264` → `443 k`, `1040000` → `1.04 M`."""
    for limit, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999,950 would round to "1000 k": the next prefix begins where three digits end
        if abs(value) >= limit * 0.9995:
            return f"{_three_digits(value / limit)}{SPACE}{prefix}"
    return f"{value:g}" if abs(value) < 10 else f"{value:.0f}"


def size(value: float) -> str:
    """Bytes with decimal prefixes (1 MB = 10^6 B): `2100000` → `2.10 MB`."""
    if abs(value) < 999.5:
        return f"{value:.0f}{SPACE}B"
    return (
        compact(value)
        .replace(f"{SPACE}k", f"{SPACE}kB")
        .replace(f"{SPACE}M", f"{SPACE}MB")
        .replace(f"{SPACE}G", f"{SPACE}GB")
    )


def duration(seconds: float) -> str:
    """`0.042` → `42 ms`, `7.26` → `7.3 s`, `290` → `4 min 50 s`, `5400` → `1 h 30 min`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}{SPACE}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}{SPACE}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}{SPACE}s"
    if whole < 3600:
        return f"{whole // 60}{SPACE}min {whole % 60:02d}{SPACE}s"
    minutes = round(seconds / 60)
    return f"{minutes // 60}{SPACE}h {minutes % 60:02d}{SPACE}min"


def percent(share: float) -> str:
    """`0.7126` → `71 %`; one digit below 10 %, where a whole percent would hide the difference."""
    value = share * 100
    return f"{value:.1f}{SPACE}%" if 0 < abs(value) < 9.95 else f"{value:.0f}{SPACE}%"


def change(new: float, old: float) -> str:
    """Relative change: `change(3.6, 3.0)` → `+20.0 %`. A true minus sign, so that it is read out."""
    value = (new / old - 1) * 100
    sign = "−" if round(value, 1) < 0 else "+"
    return f"{sign}{abs(value):.1f}{SPACE}%"


def length(value: float) -> str:
    """An acceptance length (tokens per target pass), two decimals."""
    return f"{value:.2f}"


def ratio(value: float) -> str:
    """`1.276` → `1.28×`."""
    return f"{value:.2f}×"


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"
