"""Device lines of a Proxmox container's configuration: what they mean, and editing them without touching the rest.

`devN` is known since pve-container 5.0.7 (Proxmox VE 8.1); before that, raw LXC keys do the same. Raw keys can only be
changed in the file, which lives in the cluster file system (pmxcfs): it is written in place, because pmxcfs refuses to
change owner or mode and a rename would ask for both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .facts import Container, ContainerEntry
from .steps import ApplyError

DEV_KEY = re.compile(r"dev(\d+)")
DEV_LIMIT = 256
CGROUP_KEY = "lxc.cgroup2.devices.allow"
#: Ignored where only cgroup v2 is mounted, as on every Proxmox VE of today; old guides still write it.
CGROUP_V1_KEY = "lxc.cgroup.devices.allow"
MOUNT_KEY = "lxc.mount.entry"
NVIDIA_PREFIX = "/dev/nvidia"
_SECTION = re.compile(r"^\[.+\]\s*$")


def dev_options(value: str) -> dict[str, str]:
    """`/dev/nvidia0,mode=0666` as a dictionary; the mode loses its leading zeros, so that 666 equals 0666."""
    options: dict[str, str] = {}
    for part in value.split(","):
        key, equals, text = part.strip().partition("=")
        options["path" if not equals else key] = text if equals else key
    options["path"] = options.get("path", "")
    if "mode" in options:
        options["mode"] = options["mode"].lstrip("0") or "0"
    if options.get("deny-write") == "0":
        del options["deny-write"]
    return options


def dev_value(path: str, mode: str, gid: int | None) -> str:
    """The value of a `devN` key: without a mode it would be 0660 of root, which no service user can open."""
    return f"{path},mode={mode}" + (f",gid={gid}" if gid is not None else "")


def effective(container: Container) -> dict[str, str]:
    """`devN` keys as the next start will have them: the main section with the pending changes applied."""
    values = {e.key: e.value for e in container.entries if e.section == "main" and DEV_KEY.fullmatch(e.key)}
    for entry in container.entries:
        if entry.section != "pending":
            continue
        if entry.key == "delete":
            for key in re.split(r"[,;\s]+", entry.value):
                values.pop(key.lstrip("!"), None)
        elif DEV_KEY.fullmatch(entry.key):
            values[entry.key] = entry.value
    return values


def upcoming_paths(container: Container) -> frozenset[str]:
    """Host devices that the container will have at its next start, by `devN` keys and by raw mounts."""
    raw = {e.path for e in container.entries if e.section == "main" and e.key == MOUNT_KEY and e.path}
    return frozenset(raw | {dev_options(value)["path"] for value in effective(container).values()})


@dataclass(frozen=True)
class DevChange:
    """`pct set` of one container: keys to set and keys to delete, and the same for the way back."""

    set: Mapping[str, str]
    delete: tuple[str, ...]
    undo_set: Mapping[str, str]
    undo_delete: tuple[str, ...]


def dev_change(current: Mapping[str, str], wanted: Mapping[str, str]) -> DevChange | None:
    """From `devN` keys to the wanted nodes (path -> value); None when they agree.

    Entries of other devices keep their numbers; those of NVIDIA nodes keep theirs where the path stays, and give them
    to the new ones where it does not, so that the fewest keys change.
    """
    ours = {k: v for k, v in current.items() if dev_options(v)["path"].startswith(NVIDIA_PREFIX)}
    kept: dict[str, str] = {}
    free: list[str] = []
    for key in sorted(ours, key=_number):
        path = dev_options(ours[key])["path"]
        if path in wanted and path not in kept:
            kept[path] = key
        else:
            free.append(key)
    numbers = (f"dev{n}" for n in range(DEV_LIMIT) if f"dev{n}" not in current)
    placed = {path: kept[path] if path in kept else free.pop(0) if free else next(numbers) for path in wanted}
    to_set = {
        placed[path]: value
        for path, value in wanted.items()
        if placed[path] not in current or dev_options(current[placed[path]]) != dev_options(value)
    }
    if not to_set and not free:
        return None
    return DevChange(
        set=to_set,
        delete=tuple(free),
        undo_set={key: current[key] for key in (*to_set, *free) if key in current},
        undo_delete=tuple(key for key in to_set if key not in current),
    )


def _number(key: str) -> int:
    return int(key[3:])


def raw_lines(nodes: Mapping[str, tuple[int, int]]) -> list[str]:
    """Raw lines for nodes (path -> major, minor): exact numbers, because `195:*` would give every card.

    Without `optional`, so that the container does not start with an empty file in the place of a missing node.
    """
    allow = [f"{CGROUP_KEY}: c {major}:{minor} rwm" for major, minor in nodes.values()]
    mount = [f"{MOUNT_KEY}: {path} {path.lstrip('/')} none bind,create=file" for path in nodes]
    return allow + mount


def nvidia_raw_lines(
    entries: Iterable[ContainerEntry], majors: Mapping[str, int], nvidia_majors: set[int]
) -> list[str]:
    """Raw lines of the main section that are about NVIDIA nodes, stale majors of nvidia-uvm included.

    A major of nvidia-uvm changes with kernels. A line for a dynamic major that no driver has now is taken for such a
    remainder when the container also mounts NVIDIA nodes.
    """
    main = [entry for entry in entries if entry.section == "main"]
    mounts = any(entry.key == MOUNT_KEY and entry.path.startswith(NVIDIA_PREFIX) for entry in main)
    lines = []
    for entry in main:
        is_mount = entry.key == MOUNT_KEY and entry.path.startswith(NVIDIA_PREFIX)
        match = re.match(r"c\s+(\d+):", entry.value) if entry.key in (CGROUP_KEY, CGROUP_V1_KEY) else None
        major = int(match[1]) if match else -1
        orphan = mounts and (234 <= major <= 254 or 384 <= major <= 511) and major not in majors.values()
        if is_mount or major in nvidia_majors or orphan:
            lines.append(f"{entry.key}: {entry.value}")
    return lines


def edit_lines(text: str, drop: Iterable[str], add: Iterable[str]) -> str:
    """The configuration with lines of its main section replaced; sections for pending changes and snapshots stay.

    Raises:
        ApplyError: a line to drop is not there, so the file is not the one that was planned for.
    """
    lines = text.split("\n")
    end = next((i for i, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    main = lines[:end]
    for gone in drop:
        found = next((i for i, line in enumerate(main) if _same_line(line, gone)), None)
        if found is None:
            raise ApplyError(f"the line `{gone}` is no longer in the configuration; run again")
        del main[found]
    blank = 0
    while blank < len(main) and not main[len(main) - 1 - blank].strip():
        blank += 1
    body, tail = main[: len(main) - blank], main[len(main) - blank :]
    if not tail and end == len(lines):
        tail = [""]
    return "\n".join([*body, *add, *tail, *lines[end:]])


def _same_line(line: str, wanted: str) -> bool:
    """Equal but for the space around the separator, which is `:` in Proxmox and `=` in plain LXC."""
    key, value = re.match(r"\s*([^:=\s]*)\s*[:=]?\s*(.*?)\s*$", line).groups()  # type: ignore[union-attr]
    return f"{key}: {value}" == wanted
