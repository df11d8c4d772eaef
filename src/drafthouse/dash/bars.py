"""Small bars beside numbers. They are drawn as attributes of SVG, because the page's policy forbids inline styles."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from drafthouse.dash.model import GpuView

# From here on a bar is drawn as a warning: NVIDIA's data centre GPUs begin to slow down between 83 and 90 °C.
HOT_C = 85.0
FULL = 0.97


def bar(share: float | None, kind: str = "") -> Markup:
    """A horizontal bar of `share` (0 to 1); empty when nobody could tell."""
    width = 0.0 if share is None else 100 * min(1.0, max(0.0, share))
    return Markup(
        f'<svg class="bar {kind}" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true" focusable="false">'
        f'<rect class="track" width="100" height="8"/><rect class="fill" width="{width:.1f}" height="8"/></svg>'
    )


def strip(shares: Sequence[float | None], kind: str = "") -> Markup:
    """Upright bars, one a GPU."""
    width = 10 * max(1, len(shares))
    parts = "".join(
        f"M{10 * place + 1} 20v-{20 * min(1.0, max(0.0, share)):.1f}h8V20z"
        for place, share in enumerate(shares)
        if share
    )
    tracks = "".join(f"M{10 * place + 1} 0h8v20h-8z" for place in range(len(shares)))
    return Markup(
        f'<svg class="strip {kind}" viewBox="0 0 {width} 20" width="{width}" height="20" aria-hidden="true"'
        f' focusable="false"><path class="track" d="{tracks}"/><path class="fill" d="{parts}"/></svg>'
    )


def utilization(gpu: GpuView) -> float | None:
    """Share of the time that the GPU computed."""
    return None if gpu.utilization_percent is None else gpu.utilization_percent / 100


def memory(gpu: GpuView) -> float | None:
    """Share of its memory that is used."""
    return None if gpu.used_mib is None or not gpu.memory_mib else gpu.used_mib / gpu.memory_mib


def temperature(gpu: GpuView) -> float | None:
    """Share of 100 °C."""
    return None if gpu.temperature_c is None else gpu.temperature_c / 100


def power(gpu: GpuView) -> float | None:
    """Share of its power limit."""
    return None if gpu.power_w is None or not gpu.power_limit_w else gpu.power_w / gpu.power_limit_w
