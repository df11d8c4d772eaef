"""Which kernels an NVIDIA driver builds on: the gate before anything else.

A driver that does not build leaves more than a failed task behind: with DKMS installed, every kernel package's
post-installation runs the build again and dpkg stays half-configured. So kernels are judged before the first write,
and the headers of kernels that do not fit are kept off the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .steps import Refusal

#: (major, minor) of a kernel series.
Series = tuple[int, int]

#: Minor numbers of a major series that a pattern has to tell apart; Linux goes to the next major around .20.
_LAST_MINOR = 99


@dataclass(frozen=True)
class KernelRange:
    """Kernel series that a span of driver versions builds on, both ends included.

    Attributes:
        first, last: driver versions of the span, both included.
        low, high: oldest and newest kernel series.
        source: where the upper end was reported.
    """

    first: str
    last: str
    low: Series
    high: Series
    source: str

    def holds(self, kernel: str) -> bool:
        series = series_of(kernel)
        return series is not None and self.low <= series <= self.high

    def text(self) -> str:
        return f"{shown(self.low)} to {shown(self.high)}"


#: The lower end is that of the open kernel modules: github.com/NVIDIA/open-gpu-kernel-modules, README ("Linux kernel
#: 4.15 or newer"). The upper end is the last series before the first reported failure, or the last one reported to
#: build where no failure is known: a series that nobody has reported on is not entered by hope.
TABLE: tuple[KernelRange, ...] = (
    KernelRange(
        "550.54.14",
        "555.999",
        (4, 15),
        (6, 12),
        "Debian 13 ships 550.163.01 with 6.12; NVIDIA/open-gpu-kernel-modules#1143: 550 and 555 fail on 6.17",
    ),
    KernelRange(
        "580.65.06",
        "580.119.02",
        (4, 15),
        (6, 18),
        "Frogging-Family/nvidia-all#379: 580.119.02 builds on 6.18 LTS, fails on 7.0.9",
    ),
    KernelRange(
        "580.126.09",
        "580.159.03",
        (4, 15),
        (6, 18),
        "NixOS/nixpkgs#492422: 580.126.09 fails on 6.19.2; void-linux/void-packages#60171: 580.126.18 fails on 7.0",
    ),
    KernelRange(
        "580.159.04",
        "580.999",
        (4, 15),
        (7, 1),
        "void-linux/void-packages#61087: build on 7.1 fixed in 580.159.04",
    ),
    KernelRange(
        "590.44.01",
        "590.999",
        (4, 15),
        (6, 18),
        "NVIDIA/open-gpu-kernel-modules#1021: 590.48.01 does not build on 6.19",
    ),
)


def version_key(version: str) -> tuple[int, ...]:
    """`580.126.09` -> (580, 126, 9); an empty tuple for text that is no driver version."""
    return tuple(int(part) for part in version.split(".")) if re.fullmatch(r"\d+(\.\d+)+", version) else ()


def series_of(kernel: str) -> Series | None:
    """`6.17.2-1-pve` -> (6, 17); None for text that is no kernel release."""
    match = re.match(r"(\d+)\.(\d+)", kernel)
    return (int(match[1]), int(match[2])) if match else None


def shown(series: Series) -> str:
    return f"{series[0]}.{series[1]}"


def table_of(version: str, extra: Mapping[str, Mapping[str, Any]] | None = None) -> KernelRange | None:
    """The range of a driver version, None when nothing is known about it.

    Args:
        extra: ranges on top of the table, which they override: driver version or branch (`570`) -> `min` and `max`
            kernel, as text (`"6.14"`), and `source`.
    """
    key = version_key(version)
    if not key:
        return None
    for name in (version, str(key[0])):
        entry = (extra or {}).get(name)
        if entry is not None:
            low, high = series_of(str(entry.get("min", "4.15"))), series_of(str(entry.get("max", "")))
            if low is None or high is None:
                return None
            return KernelRange(version, version, low, high, str(entry.get("source", "nvidia_driver_kernels")))
    return next((r for r in TABLE if version_key(r.first) <= key <= version_key(r.last)), None)


def judge(version: str, kernel: str, extra: Mapping[str, Mapping[str, Any]] | None = None) -> bool:
    """Whether the driver is known to build on the kernel; False also when nothing is known."""
    known = table_of(version, extra)
    return known is not None and known.holds(kernel)


def newer_driver(version: str, kernel: str) -> str | None:
    """The oldest driver of the table above `version` that builds on the kernel."""
    fitting = [r.first for r in TABLE if version_key(r.first) > version_key(version) and r.holds(kernel)]
    return min(fitting, key=version_key, default=None)


def order_of(kernel: str) -> tuple[int, ...]:
    """Sorts releases by age: `6.17.2-1-pve` before `6.17.13-1-pve`."""
    return tuple(int(part) for part in re.findall(r"\d+", kernel))


def fitting(known: KernelRange, kernels: Iterable[str]) -> list[str]:
    """Those of the kernels that the range holds, newest first."""
    return sorted((k for k in kernels if known.holds(k)), key=order_of, reverse=True)


def ways_out(version: str, known: KernelRange, kernel: str, installed: Iterable[str], proxmox: bool) -> str:
    """Both ways out of a kernel that does not fit: another kernel, or another driver."""
    candidates = [k for k in fitting(known, installed) if k != kernel]
    pin = "proxmox-boot-tool kernel pin" if proxmox else "GRUB_DEFAULT in /etc/default/grub:"
    if candidates:
        first = f"boot {candidates[0]}, which is installed (`{pin} {candidates[0]}`, then reboot)"
    elif proxmox:
        package = f"proxmox-kernel-{shown(known.high)}"
        first = f"install a kernel of {known.text()} and pin it (`apt install {package}`, `{pin} RELEASE`, then reboot)"
    else:
        first = f"install and boot a kernel of {known.text()}"
    newer = newer_driver(version, kernel)
    second = (
        f"set nvidia_driver_version to {newer} or newer" if newer else "set nvidia_driver_version to a newer driver"
    )
    return f"either {first}, or {second}"


def unknown_driver(version: str, where: str) -> Refusal:
    """Nothing is known about this driver: the table has to be told before a build is tried."""
    newest = ", ".join(f"{r.first} ({r.text()})" for r in TABLE)
    return Refusal(
        "no-kernel-range",
        f"no range of kernels is known for driver {version!r}",
        where,
        f"either choose a driver that is known ({newest}), or add its min and max kernel to nvidia_driver_kernels",
    )


def unfit_headers_pattern(known: KernelRange) -> str:
    """Extended regular expression for header packages of kernels newer than the range, for apt preferences.

    `proxmox-headers-7.0`, `linux-headers-6.19.2-amd64` match where 6.18 is the newest; the names that follow the
    default kernel match too, since the default kernel is what moves.
    """
    major, minor = known.high
    minors = _at_least(minor + 1)
    majors = _at_least(major + 1)
    later = f"({major}\\.{minors}|{majors}(\\.[0-9]+)?)"
    return f"^((proxmox|pve|linux)-headers-{later}([.-].*)?|proxmox-default-headers|pve-headers)$"


def _at_least(number: int) -> str:
    """Regular expression for whole numbers from `number` to 99."""
    if number > _LAST_MINOR:
        return "[0-9][0-9][0-9]+"
    tens, units = divmod(number, 10)
    parts = []
    if tens == 0:
        parts.append(f"[{units}-9]")
        parts.append("[1-9][0-9]")
    else:
        parts.append(f"{tens}[{units}-9]")
        if tens < 9:
            parts.append(f"[{tens + 1}-9][0-9]")
    return f"({'|'.join(parts)})"
