"""The programs of a host tree: what they print, and what they change in the tree.

`classify` says of any command whether it could change a host; what it does not know counts as a mutator.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_host.world import Result
from tests.doubles.host import containers, virtual_machines

if TYPE_CHECKING:
    from tests.doubles.host.kernel import Program, TreeWorld

#: Programs that only look, whatever their arguments are.
READERS = frozenset(
    {
        *("cat", "df", "dmesg", "dpkg-query", "getconf", "grep", "ldd", "ls", "lsinitramfs", "lsmod", "lspci"),
        *("modinfo", "nproc", "nvidia-ctk", "ps", "pveversion", "readlink", "sha256sum", "stat", "test", "uname"),
        "which",
    }
)
#: Programs that only look with one of these as their first words.
READING_VERBS = {
    "apt-cache": None,
    "apt-mark": {"showhold", "showauto", "showmanual"},
    "dkms": {"status"},
    "docker": {"--version", "info", "version", "inspect", "ps"},
    "ldconfig": {"-p"},
    "mokutil": {"--sb-state", "--test-key"},
    "nvidia-smi": {"-L", "-q", "--version"},
    "pct": {"config", "pending", "status", "list", "listsnapshot"},
    "proxmox-boot-tool": {"status"},
    "pvesh": {"get", "ls"},
    "qm": {"config", "pending", "status", "list", "listsnapshot"},
    "systemctl": {"is-active", "is-enabled", "is-system-running", "show", "status", "cat", "list-units"},
}


def classify(argv: list[str]) -> str:
    """`reader` or `mutator`."""
    words = _bare(argv)
    if not words:
        return "reader"
    name, rest = words[0].rsplit("/", 1)[-1], words[1:]
    if name == "pct" and rest[:1] == ["exec"]:
        return classify(rest[rest.index("--") + 1 :])
    if name == "proxmox-boot-tool" and rest[:2] == ["kernel", "list"]:
        return "reader"
    if together := containers.asked_together(words):
        return "reader" if all(classify(question) == "reader" for question in together) else "mutator"
    if name == "sh" and rest[:1] == ["-c"]:
        parts = re.split(r"[;|&]+", re.sub(r"'[^']*'|\d?>\s*/dev/null|2>&1", "", rest[1])) if len(rest) > 1 else []
        words_of = [part.split() for part in parts if part.split() and part.split() != ["true"]]
        return "reader" if all(classify(part) == "reader" for part in words_of) else "mutator"
    if name == "modprobe" and set(rest) & {"-n", "--dry-run", "-R", "--show-depends", "-c"}:
        return "reader"
    if name in READING_VERBS:
        verbs = READING_VERBS[name]
        return "reader" if verbs is None or (rest and rest[0] in verbs) else "mutator"
    return "reader" if name in READERS else "mutator"


def _bare(argv: list[str]) -> list[str]:
    """Without `env NAME=value` in front."""
    words = list(argv)
    while words and words[0] == "env":
        words = words[1:]
        while words and re.match(r"\w+=", words[0]):
            words = words[1:]
    return words


def modprobe(world: TreeWorld, argv: list[str]) -> Result | int:
    names = [word for word in argv[1:] if not word.startswith("-")]
    for name in names:
        if "-r" in argv:
            said = world.kernel.unload(name)
        else:
            options = "".join(f"{world.read(path) or ''}\n" for path in world.glob("/etc/modprobe.d/*.conf"))
            off = re.search(rf"^install\s+{re.escape(name)}\s+(/(?:usr/)?bin/false)", options, re.MULTILINE)
            said = f"modprobe: ERROR: ../libkmod: Error running install command '{off[1]}'" if off else None
            said = said or world.kernel.load(name)
        if said:
            return Result(1, "", f"{said}\n")
    return 0


def modinfo(world: TreeWorld, argv: list[str]) -> Result | str:
    words = argv[1:]
    release = words[words.index("-k") + 1] if "-k" in words else world.kernel.release
    field = words[words.index("-F") + 1] if "-F" in words else None
    found = world.kernel.module_file(words[-1], release)
    if found is None:
        return Result(1, "", f"modinfo: ERROR: Module {words[-1]} not found.\n")
    return f"{found.get(field, '')}\n" if field else "".join(f"{key}: {value}\n" for key, value in found.items())


def dkms(world: TreeWorld, argv: list[str]) -> Result | str | int:
    """`status` from DKMS's own tree; `install` and `remove` change it."""
    if argv[1] == "status":
        return "".join(f"{line}\n" for line in _dkms_status(world) if len(argv) < 3 or argv[2] in line)
    name, version = next(word for word in argv[2:] if "/" in word).split("/")
    tree = f"/var/lib/dkms/{name}"
    if argv[1] == "remove":
        for path in world.glob(f"{tree}/kernel-*"):
            if f"{version}/" in (world.link(path) or ""):
                world.remove(path)
                kernel = path.rsplit("/kernel-", 1)[1].rsplit("-", 1)[0]
                for module in world.glob(f"/lib/modules/{kernel}/updates/dkms/{name}*.ko"):
                    world.remove(module)
        shutil.rmtree(world.path(f"{tree}/{version}"), ignore_errors=True)
        return 0
    if argv[1] != "install" or not world.exists(f"/usr/src/{name}-{version}"):
        return Result(3, "", f"Error! The module/version {name}/{version} is not in the DKMS tree.\n")
    release = argv[argv.index("-k") + 1] if "-k" in argv else world.kernel.release
    if not world.exists(f"/lib/modules/{release}/build"):
        return Result(1, "", f"Error! Your kernel headers for kernel {release} cannot be found.\n")
    for module in (name, f"{name}-uvm", f"{name}-modeset", f"{name}-drm"):
        world.write(f"/lib/modules/{release}/updates/dkms/{module}.ko", f"version={version}\nkind=open\n")
    Path(world.path(f"{tree}/{version}/{release}/x86_64/module")).mkdir(parents=True, exist_ok=True)
    link = Path(world.path(f"{tree}/kernel-{release}-x86_64"))
    link.unlink(missing_ok=True)
    link.symlink_to(f"{version}/{release}/x86_64")
    return 0


def _dkms_status(world: TreeWorld) -> list[str]:
    lines = []
    for source in world.glob("/var/lib/dkms/*/*/source"):
        folder = source.rsplit("/", 1)[0]
        name, version = folder.split("/")[-2:]
        builds = [path.split("/")[-2] for path in world.glob(f"{folder}/*/x86_64")]
        if not builds:
            lines.append(f"{name}/{version}: added")
        for kernel in builds:
            installed = f"{version}/{kernel}/" in (world.link(f"/var/lib/dkms/{name}/kernel-{kernel}-x86_64") or "")
            lines.append(f"{name}/{version}, {kernel}, x86_64: {'installed' if installed else 'built'}")
    return lines


def dpkg_query(world: TreeWorld, argv: list[str]) -> Result | str:
    """`-W -f FORMAT PATTERN…` from the status file, with the fields that somebody here asks for."""
    form = argv[argv.index("-f") + 1] if "-f" in argv else "${Package}\t${Version}\n"
    patterns = [word for word in argv[argv.index(form) + 1 if form in argv else 2 :] if not word.startswith("-")]
    out, unmatched = [], set(patterns)
    stanzas = (world.read("/var/lib/dpkg/status") or "").split("\n\n")
    for fields in (dict(line.split(": ", 1) for line in s.splitlines() if ": " in line) for s in stanzas):
        name = fields.get("Package", "")
        hits = {p for p in patterns if re.fullmatch(p.replace(".", r"\.").replace("*", ".*"), name)}
        unmatched -= hits
        if name and (hits or not patterns):
            state = "ii " if fields["Status"].endswith(" installed") else "rc "
            line = form.replace("${db:Status-Abbrev}", state).replace("${Package}", name).replace("\\n", "\n")
            out.append(line.replace("${Version}", fields["Version"]).replace("\\t", "\t"))
    said = "".join(f"dpkg-query: no packages found matching {pattern}\n" for pattern in sorted(unmatched))
    return Result(1 if unmatched else 0, "".join(out), said)


def nvidia_modprobe(world: TreeWorld, argv: list[str]) -> Result | int:
    """`-c N` makes the node of a minor, `-u -c 0` loads nvidia-uvm and makes its two; what stands there stays."""
    minors = [int(argv[i + 1]) for i, word in enumerate(argv) if word == "-c"]
    name = "nvidia-uvm" if "-u" in argv else "nvidia"
    if "-l" not in argv and world.kernel.load(name):
        return 1
    numbers = re.search(rf"^\s*(\d+) {name}$", world.read("/proc/devices") or "", re.MULTILINE)
    if numbers is None:
        return 1
    paths = {f"/dev/nvidia{'ctl' if minor == 255 else minor}": minor for minor in minors}
    if "-u" in argv:
        paths = {"/dev/nvidia-uvm": 0, "/dev/nvidia-uvm-tools": 1} if minors else {}
    for path, minor in paths.items():
        if not world.exists(path):
            world.make_node(path, int(numbers[1]), minor)
    return 0


def systemctl(world: TreeWorld, argv: list[str]) -> Result | int:
    """Units as files below /run/double: the persistence daemon is a process that has the cards open."""
    verb, units = argv[1], [word for word in argv[2:] if not word.startswith("-")]
    enabled, active = "/etc/systemd/system/multi-user.target.wants", "/run/double/active"
    names = [unit if "." in unit else f"{unit}.service" for unit in units]
    if verb in ("is-enabled", "is-active"):
        on = world.exists(f"{enabled if verb == 'is-enabled' else active}/{names[0]}")
        word = ("enabled" if on else "disabled") if verb == "is-enabled" else ("active" if on else "inactive")
        return Result(0 if on else 3, f"{word}\n", "")
    for name in names:
        if verb in ("enable", "disable"):
            path = f"{enabled}/{name}"
            world.write(path, "") if verb == "enable" else world.remove(path)
        if verb in ("start", "restart", "stop") or "--now" in argv:
            _unit(world, name, verb in ("start", "restart", "enable"), f"{active}/{name}")
    return 0


def _unit(world: TreeWorld, name: str, on: bool, marker: str) -> None:
    world.write(marker, "") if on else world.remove(marker)
    if name == "nvidia-persistenced.service":
        shutil.rmtree(world.path("/proc/4242"), ignore_errors=True)
        if on:
            world.write("/proc/4242/comm", "nvidia-persiste\n")
            world.write("/proc/4242/cmdline", "/usr/bin/nvidia-persistenced\0--user\0nvidia-persistenced\0")
            Path(world.path("/proc/4242/fd")).mkdir()
            for number, minor in enumerate(world.kernel.minors().values(), 3):
                Path(world.path(f"/proc/4242/fd/{number}")).symlink_to(f"../../../dev/nvidia{minor}")


def proxmox_boot_tool(world: TreeWorld, argv: list[str]) -> Result | str | int:
    pin = "/etc/kernel/proxmox-boot-pin"
    if argv[1:3] == ["kernel", "pin"]:
        if not world.exists(f"/boot/vmlinuz-{argv[3]}"):
            return Result(1, "", f"E: no kernel image found in /boot for '{argv[3]}', not setting default.\n")
        world.write(pin, f"{argv[3]}\n")
    elif argv[1:3] == ["kernel", "unpin"]:
        world.remove(pin)
    elif argv[1:3] == ["kernel", "list"]:
        return f"Automatically selected kernels:\n{world.kernel.release}\n"
    return 0


def nothing(world: TreeWorld, argv: list[str]) -> int:
    """Has no effect that the tree could show."""
    return 0


PROGRAMS: dict[str, Program] = {
    "dkms": dkms,
    "dpkg-query": dpkg_query,
    "modinfo": modinfo,
    "modprobe": modprobe,
    "nvidia-modprobe": nvidia_modprobe,
    "pct": containers.pct,
    "proxmox-boot-tool": proxmox_boot_tool,
    "qm": virtual_machines.qm,
    "systemctl": systemctl,
    "udevadm": nothing,
    "update-grub": nothing,
    "update-initramfs": nothing,
}
