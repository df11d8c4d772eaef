"""The files that bind every card again at boot, and the steps that write them and clean the hiding places.

Debian's initramfs takes every rule of /etc/udev/rules.d with it, and rules 10-* run before the modules are loaded
(80-drivers.rules), so `driver_override` is set before any driver is asked. It loads nothing itself, hence the softdeps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from .hiding_places import (
    DRIVERCTL,
    GRUB,
    KERNEL_CMDLINE,
    REMOVED,
    SHORTENED,
    Cards,
    clean,
    keep_line,
    kept_texts,
    restore,
)
from .steps import Step

RULES = "/etc/udev/rules.d/10-drafthouse-vfio.rules"
OPTIONS = "/etc/modprobe.d/drafthouse-vfio.conf"
MODULES = "/etc/modules-load.d/drafthouse-vfio.conf"
OWN_FILES = (RULES, OPTIONS, MODULES)
#: What an initramfs takes with it; the list of modules is not among it, see `BootSteps`.
INITRAMFS_FILES = ("/etc/modprobe.d/", "/etc/udev/rules.d/", "/etc/initramfs-tools/")
INITRAMFS_TIMEOUT_S = 1800
#: Drivers that could take a function of a card before vfio-pci is there.
RIVALS = ("nvidia", "nvidia_drm", "nvidiafb", "nouveau", "snd_hda_intel")

_HEAD = "# Written by the role vfio_binding; changes are lost with its next run.\n"


def initramfs_step(why: str) -> Step:
    """Every kernel's initramfs is made anew; with several kernels that takes minutes."""
    detail = {"argv": ["update-initramfs", "-u", "-k", "all"], "timeout_s": INITRAMFS_TIMEOUT_S}
    return Step("run", "initramfs", why, detail)


def rules_text(overrides: Mapping[str, str]) -> str:
    """One udev rule a function: address -> `driver_override`; functions without one need no rule."""
    lines = [
        f'ACTION=="add", SUBSYSTEM=="pci", KERNEL=="{address}", ATTR{{driver_override}}="{driver}"\n'
        for address, driver in sorted(overrides.items())
        if driver
    ]
    return _HEAD + "".join(lines) if lines else ""


def options_text(any_vm: bool, host_driven: bool, kept: Mapping[str, str]) -> str:
    """modprobe options: vfio-pci before its rivals, no NVIDIA driver at all where the host has no card."""
    lines = [keep_line(path, text) for path, text in sorted(kept.items())]
    if any_vm:
        lines += [f"softdep {rival} pre: vfio-pci" for rival in RIVALS]
        lines += [] if host_driven else ["# Every card belongs to a virtual machine.", "blacklist nvidia"]
    return _HEAD + "".join(f"{line}\n" for line in lines) if lines else ""


def modules_text(any_vm: bool, files: Mapping[str, str]) -> str:
    """Modules to load at boot, and for which files the initramfs was built."""
    carried = {
        path: text
        for path, text in files.items()
        if path.startswith(INITRAMFS_FILES) and (path in OWN_FILES or REMOVED in text or SHORTENED in text)
    }
    if not carried:
        return ""
    digest = hashlib.sha256(json.dumps(carried, sort_keys=True).encode()).hexdigest()
    return f"{_HEAD}# The initramfs was built with {digest[:16]}.\n" + ("vfio-pci\n" if any_vm else "")


def _file_step(path: str, text: str | None, why: str) -> Step:
    """Writes, or removes for None; the loader of the boot is told when its command line changes."""
    if text is None:
        return Step("remove", path, why)
    refresh = ["proxmox-boot-tool", "refresh"] if path == KERNEL_CMDLINE else ["update-grub"]
    if path == KERNEL_CMDLINE or path.startswith(GRUB):
        return Step("cmdline", path, why, {"text": text, "refresh": refresh})
    return Step("write", path, why, {"text": text})


def files_given_back(settings: Mapping[str, str], cards: Cards) -> tuple[dict[str, str], list[str]]:
    """The files of others as they were found, and notes on what somebody changed since, which stays as it is."""
    files = {path: restore(path, text, cards) for path, text in sorted(settings.items()) if path not in OWN_FILES}
    notes = []
    for path, text in kept_texts(settings.get(OPTIONS, "")).items():
        if files.get(path) == clean(path, text, cards):
            files[path] = text
        else:
            notes.append(f"{path} was changed since, so it is not put back; it was {text.strip()!r}")
    return files, notes


def _cleaned(settings: Mapping[str, str], cards: Cards) -> tuple[dict[str, str | None], dict[str, str]]:
    """Files that change (None: go) when the cards are taken out, and the texts to keep of those without comments."""
    changed: dict[str, str | None] = {}
    kept = kept_texts(settings.get(OPTIONS, ""))
    for path, text in sorted(settings.items()):
        after = text if path in OWN_FILES else clean(path, text, cards)
        if after == text:
            continue
        changed[path] = after
        oldest_leads_here = path in kept and clean(path, kept[path], cards) == after
        if (path == KERNEL_CMDLINE or path.startswith(DRIVERCTL)) and not oldest_leads_here:
            kept[path] = text
    return changed, kept


@dataclass
class BootSteps:
    """Steps around the moves of the cards.

    `before` changes the files; `after` rebuilds the initramfs and then, last of all, writes the list of modules, which
    names what the initramfs was built with. A run that dies in between is therefore taken up by the next one.
    """

    before: list[Step] = field(default_factory=list)
    after: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def boot_steps(settings: Mapping[str, str], cards: Cards, overrides: Mapping[str, str], leaving: bool) -> BootSteps:
    """From the files as they are to those that bind every card at boot.

    Args:
        settings: path -> text of the files where an assignment can hide.
        cards: what the inventory assigns.
        overrides: function -> the driver that its `driver_override` names at boot.
        leaving: put the files back as they were found and keep rules only for what they do not cover.
    """
    result = BootSteps()
    changed: dict[str, str | None]
    kept: dict[str, str] = {}
    if leaving:
        files, result.notes = files_given_back(settings, cards)
        changed = {path: text for path, text in files.items() if settings.get(path) != text}
        why, own_why = "as it was found", "only for what the files that were found do not cover"
    else:
        changed, kept = _cleaned(settings, cards)
        why, own_why = "an old assignment of these cards hides here", "cards are assigned by address at boot"
    any_vm = "vfio-pci" in overrides.values()
    own = {RULES: rules_text(overrides), OPTIONS: options_text(any_vm, cards.host_driven or leaving, kept)}
    after = {path: text for path, text in {**settings, **changed, **own}.items() if text and path != MODULES}
    modules = modules_text(any_vm, after)
    theirs = [_file_step(path, text, why) for path, text in changed.items()]
    ours = [_file_step(path, text or None, own_why) for path, text in own.items() if text != settings.get(path, "")]
    # At no time is a card without an assignment: ours comes before the old one goes, and goes after it is back.
    result.before = [*theirs, *ours] if leaving else [*ours, *theirs]
    if modules != settings.get(MODULES, ""):
        result.after = [
            initramfs_step("it carries the files that bind the cards"),
            _file_step(MODULES, modules or None, own_why),
        ]
    return result
