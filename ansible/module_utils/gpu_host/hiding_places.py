"""Where an old assignment of cards hides and comes back with the next boot, and how it is taken out and put back.

Four places are usual: `ids=` of vfio-pci, `blacklist nvidia`, `install nvidia /bin/false` and the kernel command line;
udev rules and driverctl are two more. Only the words that are about the cards in question go; a line that changes stays
behind as a comment, by which `restore` finds the way back. All functions here are pure: text in, text out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: In front of a line that was taken out as a whole.
REMOVED = "# drafthouse-vfio removed: "
#: In front of a line whose shortened form follows it.
SHORTENED = "# drafthouse-vfio shortened: "
#: In our own modprobe file: what files held that take no comments, as JSON [path, text].
KEPT = "# drafthouse-vfio keeps: "

GRUB = "/etc/default/grub"
KERNEL_CMDLINE = "/etc/kernel/cmdline"
RUNNING_CMDLINE = "/proc/cmdline"
MODPROBE = "/etc/modprobe.d/"
DRIVERCTL = "/etc/driverctl.d/pci-"
MODULE_LISTS = ("/etc/modules", "/etc/modules-load.d/", "/etc/initramfs-tools/modules")
NVIDIA_MODULES = frozenset({"nvidia", "nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia_peermem"})
STUBS = frozenset({"vfio_pci", "pci_stub"})

_GRUB_LINE = re.compile(r"""^(?P<head>\s*GRUB_CMDLINE_LINUX\w*=)(?P<quote>["']?)(?P<words>.*?)(?P=quote)\s*$""")


@dataclass(frozen=True)
class Cards:
    """The cards that are assigned by address, and nowhere else.

    Attributes:
        ids: `vendor:device` of all their functions.
        drivers: their functions by address -> the driver that each is to get.
        host_driven: at least one of them is the host's, so nothing may keep its driver away.
    """

    ids: frozenset[str]
    drivers: Mapping[str, str]
    host_driven: bool


def _module(name: str) -> str:
    return name.replace("-", "_").lower()


def _without_ids(value: str, ids: frozenset[str]) -> str:
    """`10de:2230,8086:1521` without the cards' ids; an entry may go on with subsystem and class."""
    return ",".join(item for item in value.split(",") if ":".join(item.lower().split(":")[:2]) not in ids)


def _without_stub_ids(words: list[str], ids: frozenset[str]) -> list[str]:
    """Module parameters with a shorter `ids=`, or without it."""
    kept = []
    for word in words:
        key, _, value = word.partition("=")
        if key == "ids":
            left = _without_ids(value, ids)
            word = f"ids={left}" if left else ""
        kept.append(word)
    return [word for word in kept if word]


def _modprobe_line(line: str, cards: Cards) -> str:
    words = line.split()
    if len(words) < 2:
        return line
    command, module, rest = words[0], _module(words[1]), words[2:]
    if command == "options" and module in STUBS:
        left = _without_stub_ids(rest, cards.ids)
        return line if left == rest else " ".join([command, words[1], *left]) if left else ""
    if not cards.host_driven or module not in NVIDIA_MODULES:
        return line
    switched_off = command == "install" and rest and rest[0].rsplit("/", 1)[-1] in ("false", "true")
    return "" if command == "blacklist" or switched_off else line


def _module_list_line(line: str, cards: Cards) -> str:
    """A line of /etc/initramfs-tools/modules, such as `vfio-pci ids=10de:2204`; the module itself stays loaded."""
    words = line.split()
    if not words or _module(words[0]) not in STUBS:
        return line
    left = _without_stub_ids(words[1:], cards.ids)
    return line if left == words[1:] else " ".join([words[0], *left])


def _udev_line(line: str, cards: Cards) -> str:
    """A foreign rule that sets `driver_override` for one of the cards, by address or for the whole vendor."""
    lower = line.lower()
    about_us = any(address in lower for address in cards.drivers) or "0x10de" in lower
    return "" if "driver_override" in lower and about_us and not lower.lstrip().startswith("#") else line


def _command_line(words: str, cards: Cards) -> str:
    """A kernel command line without the cards' ids and, for a driver of the host, without its blacklist."""

    def kept(match: re.Match[str]) -> str:
        key, equals, value = match["word"].partition("=")
        name = _module(key)
        if name in ("vfio_pci.ids", "pci_stub.ids"):
            left = _without_ids(value, cards.ids)
        elif name in ("modprobe.blacklist", "module_blacklist", "rd.driver.blacklist") and cards.host_driven:
            left = ",".join(item for item in value.split(",") if _module(item) not in NVIDIA_MODULES)
        else:
            return match[0]
        return f"{match['gap']}{key}{equals}{left}" if left else ""

    shorter = re.sub(r"(?P<gap>\s*)(?P<word>\S+)", kept, words)
    return shorter if shorter == words else shorter.lstrip()


def _grub_line(line: str, cards: Cards) -> str:
    match = _GRUB_LINE.match(line)
    if not match:
        return line
    shorter = _command_line(match["words"], cards)
    return line if shorter == match["words"] else f"{match['head']}{match['quote']}{shorter}{match['quote']}"


def _line_editor(path: str) -> Callable[[str, Cards], str] | None:
    if path.startswith(MODPROBE):
        return _modprobe_line
    if path.startswith(MODULE_LISTS):
        return _module_list_line
    if path.startswith("/etc/udev/rules.d/"):
        return _udev_line
    return _grub_line if path.startswith(GRUB) else None


def clean(path: str, text: str, cards: Cards) -> str | None:
    """The file without what it says about the cards; the same text when that is nothing, None when the file goes."""
    if path == KERNEL_CMDLINE:
        return "\n".join(_command_line(line, cards) for line in text.split("\n"))
    if path.startswith(DRIVERCTL):
        wanted = cards.drivers.get(path[len(DRIVERCTL) :].lower())
        return text if wanted in (None, text.strip()) else None
    edit = _line_editor(path)
    if edit is None:
        return text
    out: list[str] = []
    for line in text.split("\n"):
        edited = line if line.lstrip().startswith("#") else edit(line, cards)
        if edited == line:
            out.append(line)
            continue
        again = bool(out) and out[-1].startswith(SHORTENED)  # the oldest form is the one to go back to
        if not again:
            out.append(f"{SHORTENED if edited else REMOVED}{line}")
        if edited:
            out.append(edited)
        elif again:
            out[-1] = REMOVED + out[-1][len(SHORTENED) :]
    return "\n".join(out)


def restore(path: str, text: str, cards: Cards) -> str:
    """The file as it was before `clean`; a shortened line that somebody changed since is left as it is."""
    edit = _line_editor(path)
    if edit is None:
        return text
    out: list[str] = []
    lines = iter(text.split("\n"))
    for line in lines:
        if line.startswith(REMOVED):
            out.append(line[len(REMOVED) :])
        elif line.startswith(SHORTENED):
            original, now = line[len(SHORTENED) :], next(lines, "")
            out.append(original if edit(original, cards) == now else now)
        else:
            out.append(line)
    return "\n".join(out)


def keep_line(path: str, text: str) -> str:
    """A comment that keeps the text of a file which takes no comments itself."""
    return f"{KEPT}{json.dumps([path, text])}"


def kept_texts(own_file: str) -> dict[str, str]:
    """Path -> text, from the comments that `keep_line` made."""
    pairs = [json.loads(line[len(KEPT) :]) for line in own_file.split("\n") if line.startswith(KEPT)]
    return dict(pairs)


def claimed_ids(settings: Mapping[str, str]) -> frozenset[str]:
    """`vendor:device` that the boot files hand to vfio-pci by id."""
    found: set[str] = set()
    for path, text in settings.items():
        for line in text.split("\n"):
            words = [] if line.lstrip().startswith("#") else re.sub(r"[\"']", " ", line).split()
            parameter = _ids_parameter(path, words)
            for word in words if parameter else ():
                key, _, value = word.partition("=")
                if _module(key) == parameter:
                    found |= {":".join(item.lower().split(":")[:2]) for item in value.split(",")}
    return frozenset(found)


def _ids_parameter(path: str, words: list[str]) -> str:
    """What vfio-pci's list of ids is called on a line of this file, empty where the line is about something else."""
    if path.startswith((GRUB, KERNEL_CMDLINE, RUNNING_CMDLINE)):
        return "vfio_pci.ids"
    if path.startswith(MODPROBE):
        module = words[1] if words[:1] == ["options"] and len(words) > 1 else ""
    else:
        module = words[0] if words and path.startswith(MODULE_LISTS) else ""
    return "ids" if _module(module) == "vfio_pci" else ""
