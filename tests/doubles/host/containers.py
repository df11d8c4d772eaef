"""`pct` of a host tree: configuration with pending changes, start with device nodes, commands inside.

What stands in a container is a folder, /var/lib/lxc/<vmid>/rootfs; that it runs is its command socket in
/proc/net/unix, where Proxmox VE itself looks it up.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_host.world import ASK, Result, World

if TYPE_CHECKING:
    from tests.doubles.host.kernel import TreeWorld

_DEVICE = re.compile(r"(?:path=)?(/dev/[^,]+)")
_LISTING = re.compile(r"stat -c '%n\|%F\|%t\|%T' (\S+)")


def pct(world: TreeWorld, argv: list[str]) -> Result | str | int:
    verb = argv[1]
    if verb == "list":
        numbers = [path.rsplit("/", 1)[1].removesuffix(".conf") for path in world.glob("/etc/pve/lxc/*.conf")]
        rows = [f"{n:<10} {'running' if runs(world, n) else 'stopped'}\n" for n in numbers]
        return "VMID       Status     Lock         Name\n" + "".join(rows)
    vmid, words = argv[2], argv[3:]
    text = world.read(path_of(vmid))
    if text is None:
        return _failed(f"Configuration file 'nodes/x/lxc/{vmid}.conf' does not exist", 2)
    if verb == "config":
        return text.split("\n[", 1)[0].rstrip("\n") + "\n"
    if verb == "status":
        return f"status: {'running' if runs(world, vmid) else 'stopped'}\n"
    if verb == "set":
        return _set(world, vmid, words)
    if verb == "start":
        return start(world, vmid)
    if verb in ("shutdown", "stop"):
        return stop(world, vmid)
    if verb == "reboot":
        said = stop(world, vmid)
        return said if isinstance(said, Result) else start(world, vmid)
    if verb == "push":
        return _push(world, vmid, words)
    if verb == "exec":
        return _inside(world, vmid, words[words.index("--") + 1 :])
    return _failed(f"ERROR: unknown command 'pct {verb}'", 255)


def _failed(text: str, status: int = 255) -> Result:
    return Result(status, "", f"{text}\n")


def path_of(vmid: str) -> str:
    return f"/etc/pve/lxc/{vmid}.conf"


def root_of(vmid: str) -> str:
    return f"/var/lib/lxc/{vmid}/rootfs"


def runs(world: TreeWorld, vmid: str) -> bool:
    return f"@/var/lib/lxc/{vmid}/command\n" in (world.read("/proc/net/unix") or "")


# -- configuration -----------------------------------------------------------------------------------------------------


def _sections(text: str) -> dict[str, list[tuple[str, str]]]:
    """Section -> its keys and values in order; the main section is called ``."""
    found: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for line in text.splitlines():
        if line.startswith("["):
            name = line.strip("[]\n ")
            found[name] = []
        elif ":" in line and not line.startswith("#"):
            key, value = line.split(":", 1)
            found[name].append((key.strip(), value.strip()))
        elif line.startswith("#"):
            found[name].insert(0, (line, ""))
    return found


def _save(world: TreeWorld, vmid: str, sections: dict[str, list[tuple[str, str]]]) -> None:
    """As Proxmox VE writes it: comments first, keys sorted, `lxc.` keys last and in their order."""
    lines = []
    for name, entries in sections.items():
        if not entries and name == "pve:pending":
            continue
        lines += [f"\n[{name}]"] if name else []
        lines += [key for key, _ in entries if key.startswith("#")]
        lines += sorted(f"{k}: {v}" for k, v in entries if not k.startswith(("#", "lxc.")))
        lines += [f"{key}: {value}" for key, value in entries if key.startswith("lxc.")]
    Path(world.path(path_of(vmid))).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _set(world: TreeWorld, vmid: str, words: list[str]) -> Result | int:
    """`-devN value … -delete a,b`: at once for a container that is off, pending until its next start otherwise.

    A deletion and a value of one key in the same call is refused, as Proxmox VE does.
    """
    values = {words[i].lstrip("-"): words[i + 1] for i in range(0, len(words), 2)}
    delete = [key for key in re.split("[,; ]+", values.pop("delete", "")) if key]
    for key, value in values.items():
        match = _DEVICE.match(value)
        if key in delete:
            return _failed(f"400 Parameter verification failed.\n{key}: duplicate option -delete and -{key}")
        if key.startswith("dev"):
            node = world.device(match[1]) if match else None
            if node is None or node[0] not in ("char", "block"):
                return _failed(f"Device {value} is not a device" if node else f"Device {value} does not exist")
    sections = _sections(world.read(path_of(vmid)) or "")
    if not runs(world, vmid):
        sections[""] = _changed(sections[""], values, delete)
    else:
        pending = sections.pop("pve:pending", [])
        waiting = {k for k, v in pending if k == "delete" for k in re.split("[,; ]+", v)}
        current = dict(sections[""])
        waiting = (waiting | {key for key in delete if key in current}) - set(values)
        kept = [(k, v) for k, v in pending if k not in values and k != "delete" and k not in delete]
        new = [(k, v) for k, v in values.items() if current.get(k) != v]
        entries = [*kept, *new, *([("delete", ",".join(sorted(waiting)))] if waiting else [])]
        sections = {"": sections[""], "pve:pending": entries, **{k: v for k, v in sections.items() if k}}
    _save(world, vmid, sections)
    return 0


def _changed(entries: list[tuple[str, str]], values: dict[str, str], delete: list[str]) -> list[tuple[str, str]]:
    return [(k, v) for k, v in entries if k not in values and k not in delete] + list(values.items())


def _apply_pending(world: TreeWorld, vmid: str) -> list[tuple[str, str]]:
    sections = _sections(world.read(path_of(vmid)) or "")
    pending = sections.pop("pve:pending", [])
    if pending:
        delete = [key for k, v in pending if k == "delete" for key in re.split("[,; ]+", v)]
        values = {k: v for k, v in pending if k != "delete"}
        sections[""] = _changed(sections[""], values, delete)
        _save(world, vmid, sections)
    return sections[""]


# -- life --------------------------------------------------------------------------------------------------------------


def start(world: TreeWorld, vmid: str) -> Result | int:
    """Nodes of `devN` are made from what stands on the host; raw mounts bring it as it is."""
    if runs(world, vmid):
        return _failed(f"CT {vmid} already running")
    entries = _apply_pending(world, vmid)
    wanted: dict[str, tuple[str, int, int] | None] = {}
    for key, value in entries:
        if re.fullmatch(r"dev\d+", key):
            path = _DEVICE.match(value)[1]  # type: ignore[index]
            node = world.device(path)
            if node is None or node[0] != "char":
                return _failed(f"Could not get mode or device ID of {path}: No such file or directory")
            wanted[path] = node
        elif key == "lxc.mount.entry" and value.startswith("/dev/"):
            source, place, _, options = value.split()[:4]
            node = world.device(source)
            if node is None and "optional" not in options:
                return _failed(f"startup for container '{vmid}' failed: mount of {source} failed")
            if node or "create=file" in options:
                wanted[f"/{place}"] = node
    for path, node in wanted.items():
        inside = f"{root_of(vmid)}{path}"
        if node and node[0] == "char":
            world.make_node(inside, node[1], node[2])
        else:
            world.write(inside, "")
    sockets = world.read("/proc/net/unix") or ""
    line = f"0000000000000000: 00000002 00000000 00010000 0001 01 {40000 + int(vmid)} @/var/lib/lxc/{vmid}/command\n"
    world.write("/proc/net/unix", sockets + line)
    return 0


def stop(world: TreeWorld, vmid: str) -> Result | int:
    if not runs(world, vmid):
        return _failed(f"CT {vmid} not running")
    sockets = (world.read("/proc/net/unix") or "").splitlines(keepends=True)
    world.write("/proc/net/unix", "".join(line for line in sockets if f"/lxc/{vmid}/command" not in line))
    for path in world.glob(f"{root_of(vmid)}/dev/*"):
        if (_node(world, path) or ("",))[0] == "char":
            world.remove(path)
    _apply_pending(world, vmid)
    return 0


def _push(world: TreeWorld, vmid: str, words: list[str]) -> Result | int:
    if not runs(world, vmid):
        return _failed(f"CT {vmid} is not running")
    target = Path(world.path(f"{root_of(vmid)}{words[1]}"))
    target.parent.mkdir(parents=True, exist_ok=True)
    source = words[0] if Path(words[0]).exists() else world.path(words[0])
    shutil.copyfile(source, target)
    if "--perms" in words:
        target.chmod(int(words[words.index("--perms") + 1], 8))
    return 0


def _node(world: TreeWorld, path: str) -> tuple[str, int, int] | None:
    """What stands at a path of the rootfs; a node there is a file of numbers as on the host."""
    match = re.fullmatch(r"c (\d+):(\d+)\n", world.read(path) or "")
    return ("char", int(match[1]), int(match[2])) if match else world.device(path)


def _inside(world: TreeWorld, vmid: str, argv: list[str]) -> Result | str | int:
    """The few commands that are run inside containers, on the folder of its root."""
    if not runs(world, vmid):
        return _failed(f"CT {vmid} is not running")
    root, words = root_of(vmid), argv[1:]
    questions = asked_together(argv)
    if questions:
        answers = [world.answer(["pct", "exec", vmid, "--", *question]) for question in questions]
        return "".join(f"{said.out}\0{said.rc}\0{said.err.rstrip()}\0" for said in answers)
    if argv[0] == "sh" and words[:1] == ["-c"]:
        listing, names = _LISTING.search(words[1]), re.fullmatch(r"ls -1d (\S+) 2>/dev/null", words[1])
        if listing:
            return "".join(f"{_stat(world, path, root)}\n" for path in _expand(world, root, listing[1]))
        if names:
            return "".join(f"{path[len(root) :]}\n" for path in _expand(world, root, names[1]))
    elif argv[0] == "cat":
        text = world.read(f"{root}{words[0]}")
        return Result(1, "", f"cat: {words[0]}: No such file or directory\n") if text is None else text
    elif argv[0] == "ls":
        return "".join(f"{name}\n" for name in world.names(f"{root}{words[-1]}"))
    elif argv[0] == "readlink":
        inside = World(world.path(root))
        link = inside.end(words[-1]) if "-e" in words else inside.link(words[-1])
        return f"{link}\n" if link else 1
    elif argv[0] == "stat":
        path = f"{root}{words[-1]}"
        if not world.exists(path):
            return 1
        whose = world.ownership(path) if "%a|%u|%g" in words else None
        # Everything in these containers is its root's, whoever runs the test.
        return f"{whose.mode:o}|0|0\n" if whose else f"{_stat(world, path, root).split('|', 1)[1]}\n"
    elif argv[0] == "mkdir":
        Path(world.path(f"{root}{words[-1]}")).mkdir(parents=True, exist_ok=True)
        return 0
    elif argv[0] == "rm":
        world.remove(f"{root}{words[-1]}")
        return 0
    return Result(127, "", f"{argv[0]}: command not found\n")


def asked_together(argv: list[str]) -> list[list[str]]:
    """The questions of `ContainerWorld.ahead` in its one command; none in any other command."""
    if argv[:2] != ["sh", "-c"] or not argv[2].startswith(ASK):
        return []
    return [shlex.split(line)[1:] for line in argv[2].removeprefix(ASK).splitlines()]


def _expand(world: TreeWorld, root: str, pattern: str) -> list[str]:
    folder, name = f"{root}{pattern}".rsplit("/", 1)
    return [f"{folder}/{found}" for found in fnmatch.filter(world.names(folder), name)]


def _stat(world: TreeWorld, path: str, root: str) -> str:
    kind, major, minor = _node(world, path) or ("other", 0, 0)
    names = {"char": "character special file", "file": "regular empty file", "dir": "directory"}
    return f"{path[len(root) :]}|{names.get(kind, 'block special file')}|{major:x}|{minor:x}"
