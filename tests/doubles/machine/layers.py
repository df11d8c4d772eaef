"""File systems of the machine double: the machine's own files over this computer's root, changes kept apart.

An overlay of three layers: `changes` (empty at boot, so whatever is in it was changed since) over `own` (the fake host)
over `/`. Everything lies on a tmpfs inside the private mount namespace of the process that calls this.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

#: Folders of this computer that the machine must not see: its own settings for devices, its programs and its users.
HIDDEN = (
    "/boot",
    "/dev",
    "/etc/apt/apt.conf.d",
    "/etc/apt/preferences.d",
    "/etc/apt/sources.list.d",
    "/etc/docker",
    "/etc/modprobe.d",
    "/etc/modules-load.d",
    "/etc/systemd/system",
    "/etc/udev/rules.d",
    "/home",
    "/opt",
    "/proc",
    "/root",
    "/run",
    "/srv",
    "/sys",
    "/tmp",
    "/usr/lib/modprobe.d",
    "/usr/lib/modules",
    "/usr/lib/modules-load.d",
    "/usr/lib/systemd/system",
    "/usr/lib/udev/rules.d",
    "/usr/local",
    "/var/cache/apt",
    "/var/lib/apt/lists",
    "/var/lib/dpkg",
    "/var/log",
    "/var/tmp",
)
#: Single files of this computer that it must not see either.
HIDDEN_FILES = (
    "/.dockerenv",
    "/etc/apt/sources.list",
    "/etc/default/grub",
    "/etc/kernel/cmdline",
    "/etc/modules",
    "/usr/bin/docker*",
    "/usr/bin/ffmpeg",
    "/usr/bin/nvidia-*",
    "/usr/lib/x86_64-linux-gnu/libavcodec.so*",
    "/usr/lib/x86_64-linux-gnu/libcuda*",
    "/usr/lib/x86_64-linux-gnu/libnvidia-*",
)
#: What Ansible itself writes on a host that it only looks at.
SCRATCH = ("/root/.ansible", "/tmp")
STANDIN = "/usr/local/lib/machine/standin"
RUN = "/usr/local/lib/machine/run"
NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}


def hide(own: Path) -> None:
    """Lay empty folders over `HIDDEN` and make what a booted machine has in them."""
    own.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        # A folder of the fake host below /lib must land where this computer's merged /usr has it.
        if Path("/", name).is_symlink():
            (own / "usr" / name).mkdir(parents=True, exist_ok=True)
            (own / name).symlink_to(f"usr/{name}")
    for name in HIDDEN:
        folder = own / name.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        os.setxattr(folder, "trusted.overlay.opaque", b"y")
    for name in ("tmp", "var/tmp"):
        (own / name).chmod(0o1777)
    (own / "root").chmod(0o700)
    for name in (
        "var/log/apt",
        "var/cache/apt/archives/partial",
        "var/lib/apt/lists/partial",
        "run/lock",
        "usr/local/bin",
    ):
        (own / name).mkdir(parents=True, exist_ok=True)
    (own / "usr/local/sbin").mkdir(exist_ok=True)
    basic_nodes(own)


def basic_nodes(root: Path) -> None:
    """The device nodes that every machine has."""
    for name, (major, minor) in NODES.items():
        node = root / "dev" / name
        if not node.is_char_device():
            node.unlink(missing_ok=True)
            make_node(node, major, minor)


def hide_files(own: Path) -> None:
    """Take `HIDDEN_FILES` away, but for those that the machine has of its own."""
    for pattern in HIDDEN_FILES:
        for path in Path("/").glob(pattern.lstrip("/")):
            hidden = own / path.relative_to("/")
            hidden.parent.mkdir(parents=True, exist_ok=True)
            if not hidden.exists():
                os.mknod(hidden, stat.S_IFCHR, os.makedev(0, 0))  # what overlayfs takes for a removed file


def make_node(path: Path, major: int, minor: int, mode: int = 0o666) -> None:
    os.mknod(path, stat.S_IFCHR | mode, os.makedev(major, minor))
    path.chmod(mode)


def mount_tmpfs(at: Path, size: str) -> None:
    at.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", str(at))


def mount_overlay(memory: Path, at: Path) -> None:
    """`at` shows `memory/own` over `/`; changes go to `memory/changes`, and `memory/before` still shows what was."""
    for name in ("before", "changes", "work"):
        (memory / name).mkdir()
    _mount("-t", "overlay", "-o", f"lowerdir={memory}/own:/", "overlay", str(memory / "before"))
    layers = f"lowerdir={memory}/own:/,upperdir={memory}/changes,workdir={memory}/work"
    _mount("-t", "overlay", "-o", layers, "overlay", str(at))


def touched(memories: Mapping[str, Path]) -> dict[str, str]:
    """Every path written since the mount -> its kind, mode, owner and content, Ansible's scratch aside.

    Args:
        memories: prefix for the paths of a machine -> where its layers lie.
    """
    found: dict[str, str] = {}
    for prefix, memory in memories.items():
        top = memory / "changes"
        for folder, folders, files in os.walk(top):
            for name in (*folders, *files):
                path = Path(folder) / name
                shown = f"/{path.relative_to(top)}"
                if not any(shown == skip or shown.startswith(f"{skip}/") for skip in SCRATCH):
                    found[prefix + shown] = _fingerprint(path)
    return found


def changed(memories: Mapping[str, Path]) -> dict[str, str]:
    """The part of `touched` that is not as it was at the mount."""
    found = {}
    for path, now in touched(memories).items():
        prefix, _, name = path.rpartition(":/")
        before = memories[f"{prefix}:" if prefix else ""] / "before" / name.lstrip("/")
        then = _fingerprint(before) if os.path.lexists(before) else "removed"
        if now != then:
            found[path] = now
    return found


def _fingerprint(path: Path) -> str:
    status = path.lstat()
    owner = f"{stat.filemode(status.st_mode)} {status.st_uid}:{status.st_gid}"
    if stat.S_ISLNK(status.st_mode):
        return f"{owner} -> {path.readlink()}"
    if stat.S_ISREG(status.st_mode):
        return f"{owner} sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        return "removed"
    return owner


def put_programs(own: Path, names: Iterable[str]) -> None:
    """Put the stand-in program in, under all these names and first in the PATH."""
    standin = own / STANDIN.lstrip("/")
    standin.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).with_name("standin.py"), standin)
    standin.chmod(0o755)
    (own / RUN.lstrip("/")).mkdir()
    for name in names:
        (own / "usr/local/sbin" / name).symlink_to(STANDIN)


def bind(source: Path, at: Path) -> None:
    """Show a folder at a second place, as a container sees the host's /sys."""
    at.mkdir(parents=True, exist_ok=True)
    _mount("--bind", str(source), str(at))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)
