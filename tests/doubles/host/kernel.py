"""The kernel behind a host tree: what happens when somebody writes to sysfs, loads a module, or boots.

All state is in the tree itself, so a `Kernel` can be put on a tree that somebody else laid or copied.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu_host.steps import ApplyError
from gpu_host.world import Result, World
from tests.doubles.host.commands import PROGRAMS, classify

PCI = "/sys/bus/pci"
_NODE = re.compile(r"c (\d+):(\d+)\n")
#: Drivers and the functions that they match by themselves, as patterns of `vendor class`.
MATCHES = {
    "nvidia": ("10de 030[02]",),
    "nouveau": ("10de 030[02]",),
    "snd_hda_intel": (".... 0403",),
    "xhci_hcd": (".... 0c03",),
    "nvme": (".... 0108",),
    "pcieport": (".... 0604",),
}


@dataclass
class Kernel:
    """The driver core of PCI, and as much of the NVIDIA driver as can be seen from outside.

    Attributes:
        hanging: functions whose unbind never returns, on top of those that a process or a VM has open.
        failing: (function, driver) whose probe fails, and which stay unbound then.
        uvm_major: the dynamic major that nvidia-uvm gets when it is loaded next.
        silent_minors: cards whose `information` has no line `Device Minor`, as before the first use.
    """

    world: TreeWorld
    hanging: set[str] = field(default_factory=set)
    failing: set[tuple[str, str]] = field(default_factory=set)
    uvm_major: int = 509
    silent_minors: set[str] = field(default_factory=set)

    # -- sysfs -----------------------------------------------------------------------------------------------------

    def poke(self, path: str, text: str) -> bool:
        """A write to an attribute; False when the path is none of the kernel's.

        Raises:
            OSError: as the kernel answers.
            BlockingIOError: the write would never return.
        """
        word, parts = text.strip(), path.split("/")
        if not path.startswith("/sys/"):
            return False
        if parts[-1] == "driver_override":
            if not self.world.exists(path):
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            self._attribute(path, "(null)\n" if not word else f"{word}\n")
        elif parts[-1] == "unbind":
            folder = path.rsplit("/", 1)[0]
            driver = (self.world.link(folder) or folder).rsplit("/", 1)[-1]
            if self.driver_of(word) != driver:
                raise OSError(errno.ENODEV, "No such device", path)
            self._refuse_busy(word)
            self.detach(word)
        elif parts[-1] == "bind":
            self._bind(parts[-2], word, path)
        elif parts[-1] == "drivers_probe":
            self._existing(word, path)
            self._probe(word)
        elif parts[-1] in ("new_id", "remove_id"):
            self._dynamic_id(parts[-2], word.split()[:2], parts[-1] == "new_id", path)
        else:
            return False
        return True

    def _attribute(self, path: str, text: str) -> None:
        Path(self.world.path(path)).write_text(text, encoding="utf-8")

    def _existing(self, address: str, path: str) -> None:
        if not self.world.exists(f"{PCI}/devices/{address}"):
            raise OSError(errno.ENODEV, "No such device", path)

    def _bind(self, driver: str, address: str, path: str) -> None:
        self._existing(address, path)
        if self.driver_of(address):
            raise OSError(errno.EBUSY, "Device or resource busy", path)
        if not self.takes(driver, address):
            raise OSError(errno.ENODEV, "No such device", path)
        if not self._try(address, driver):
            raise OSError(errno.EINVAL, "Invalid argument", path)

    def _refuse_busy(self, address: str) -> None:
        nodes = {f"/dev/nvidia{self.minors().get(address)}"}
        if self.driver_of(address) == "vfio-pci":
            nodes = {f"/dev/vfio/{self.group(address)}"}
        for descriptor in self.world.glob("/proc/[0-9]*/fd/*"):
            target = followed(descriptor, self.world.link(descriptor) or "")
            if target in nodes:
                raise BlockingIOError(errno.EAGAIN, f"{target} is open, unbinding {address} never returns")
        reserved = self.world.read("/run/qemu-server/pci-id-reservations") or ""
        if address in self.hanging or re.search(rf"^{address} \d+ pid:", reserved, re.MULTILINE):
            raise BlockingIOError(errno.EAGAIN, f"{address} is in use, unbinding it never returns")

    # -- drivers and functions -------------------------------------------------------------------------------------

    def addresses(self) -> list[str]:
        return self.world.names(f"{PCI}/devices")

    def driver_of(self, address: str) -> str | None:
        link = self.world.link(f"{PCI}/devices/{address}/driver")
        return link.rsplit("/", 1)[-1] if link else None

    def override(self, address: str) -> str | None:
        text = (self.world.read(f"{PCI}/devices/{address}/driver_override") or "").strip()
        return None if text in ("", "(null)") else text

    def group(self, address: str) -> str:
        return (self.world.link(f"{PCI}/devices/{address}/iommu_group") or "none").rsplit("/", 1)[-1]

    def _value(self, address: str, name: str) -> str:
        return (self.world.read(f"{PCI}/devices/{address}/{name}") or "").strip().removeprefix("0x")

    def takes(self, driver: str, address: str) -> bool:
        """Whether a probe gives the function to the driver: by override, by a dynamic id, or by the driver's table."""
        override = self.override(address)
        if override:
            return override == driver
        ids = f"{self._value(address, 'vendor')} {self._value(address, 'device')}"
        if ids in self.dynamic_ids(driver):
            return True
        vendor_class = f"{self._value(address, 'vendor')} {self._value(address, 'class')}"
        return any(re.match(pattern, vendor_class) for pattern in MATCHES.get(driver, ()))

    def dynamic_ids(self, driver: str) -> list[str]:
        return (self.world.read(f"/run/kernel/dynamic_ids/{driver}") or "").splitlines()

    def _dynamic_id(self, driver: str, words: Sequence[str], add: bool, path: str) -> None:
        ids, known = " ".join(words), self.dynamic_ids(driver)
        if add and ids in known:
            raise OSError(errno.EEXIST, "File exists", path)
        if not add and ids not in known:
            raise OSError(errno.ENODEV, "No such device", path)
        known = [*known, ids] if add else [k for k in known if k != ids]
        self.world.write(f"/run/kernel/dynamic_ids/{driver}", "".join(f"{k}\n" for k in known))
        if add:  # every unbound function with this id, whoever it belongs to
            self._claim_unbound(driver)

    def add_driver(self, driver: str) -> None:
        folder = Path(self.world.path(f"{PCI}/drivers/{driver}"))
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("bind", "unbind", "new_id", "remove_id"):
            if not os.path.lexists(folder / name):
                (folder / name).write_text("", encoding="utf-8")

    def attach(self, address: str, driver: str) -> None:
        """The driver has the function; the NVIDIA driver gives its card the first free minor."""
        link = self.world.link(f"{PCI}/devices/{address}")
        device = os.path.normpath(f"{PCI}/devices/{link}")
        here, there = f"{device}/driver", f"{PCI}/drivers/{driver}"
        for source, target in ((here, there), (f"{there}/{address}", device)):
            place = Path(self.world.path(source))
            place.unlink(missing_ok=True)
            place.symlink_to(os.path.relpath(self.world.path(target), place.parent))
        if driver == "nvidia" and self._value(address, "class").startswith("03"):
            self._information(address)
        if driver == "vfio-pci" and self.group(address) != "none":
            self.world.make_node("/dev/vfio/vfio", 10, 196)
            self.world.make_node(f"/dev/vfio/{self.group(address)}", 511, int(self.group(address)))

    def detach(self, address: str) -> None:
        driver = self.driver_of(address)
        for path in (f"{PCI}/devices/{address}/driver", f"{PCI}/drivers/{driver}/{address}"):
            self.world.remove(path)
        shutil.rmtree(self.world.path(f"/proc/driver/nvidia/gpus/{address}"), ignore_errors=True)
        group = self.group(address)
        members = self.world.names(f"/sys/kernel/iommu_groups/{group}/devices")
        if not any(self.driver_of(member) == "vfio-pci" for member in members):
            self.world.remove(f"/dev/vfio/{group}")

    def _try(self, address: str, driver: str) -> bool:
        if (address, driver) in self.failing:
            return False
        self.attach(address, driver)
        return True

    def _probe(self, address: str) -> None:
        for driver in self.world.names(f"{PCI}/drivers"):
            if not self.driver_of(address) and self.takes(driver, address):
                self._try(address, driver)

    def _claim_unbound(self, driver: str) -> None:
        for address in self.addresses():
            if not self.driver_of(address) and self.takes(driver, address):
                self._try(address, driver)

    # -- the NVIDIA driver -----------------------------------------------------------------------------------------

    def minors(self) -> dict[str, int]:
        """Address -> minor of the cards that the NVIDIA driver has initialised."""
        texts = {path.split("/")[-2]: self.world.read(path) or "" for path in self._information_files()}
        found = {address: re.search(r"Device Minor:\s*(\d+)", text) for address, text in texts.items()}
        return {address: int(match[1]) for address, match in found.items() if match}

    def _information_files(self) -> list[str]:
        return self.world.glob("/proc/driver/nvidia/gpus/*/information")

    def _information(self, address: str) -> None:
        taken = set(self.minors().values())
        minor = next(number for number in range(248) if number not in taken)
        device = self._value(address, "device")
        model = {"2230": "NVIDIA RTX A6000", "2204": "NVIDIA GeForce RTX 3090"}.get(device, "NVIDIA Graphics Device")
        lines = [
            f"Model: \t\t {model}",
            "IRQ:   \t\t 120",
            f"GPU UUID: \t {uuid_of(address)}",
            "Video BIOS: \t 94.02.5c.00.02",
            "Bus Type: \t PCIe",
            "DMA Size: \t 47 bits",
            f"Bus Location: \t {address}",
            *([] if address in self.silent_minors else [f"Device Minor: \t {minor}"]),
            "GPU Excluded:\t No",
        ]
        self.world.write(f"/proc/driver/nvidia/gpus/{address}/information", "\n".join(lines) + "\n")

    # -- modules ---------------------------------------------------------------------------------------------------

    @property
    def release(self) -> str:
        return (self.world.read("/proc/sys/kernel/osrelease") or "").strip()

    def module_file(self, name: str, release: str | None = None) -> dict[str, str] | None:
        """What the module on disk says of itself, None when there is none for this kernel."""
        text = self.world.read(f"/lib/modules/{release or self.release}/updates/dkms/{name.replace('_', '-')}.ko")
        return None if text is None else dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def loaded(self) -> list[str]:
        return [line.split()[0] for line in (self.world.read("/proc/modules") or "").splitlines()]

    def load(self, name: str) -> str | None:
        """Insert a module and let it take what it finds; what modprobe would say when it cannot, else None."""
        module = name.replace("-", "_")
        if module in self.loaded():
            return None
        if module.startswith("nvidia"):
            said = self._load_nvidia(module)
            if said:
                return said
        elif module == "vfio_pci":
            for path in self.world.glob("/etc/modprobe.d/*.conf"):
                lines = re.findall(r"^options\s+vfio[-_]pci\s.*?\bids=(\S+)", self.world.read(path) or "", re.MULTILINE)
                ids = [" ".join(i.split(":")[:2]) for line in lines for i in line.split(",")]
                self.world.write("/run/kernel/dynamic_ids/vfio-pci", "".join(f"{i}\n" for i in ids))
        self._insert(module)
        driver = {"vfio_pci": "vfio-pci"}.get(module, module)
        if driver in MATCHES or driver == "vfio-pci":
            self.add_driver(driver)
            self._claim_unbound(driver)
        if module == "nvidia" and not self._information_files():
            self.unload("nvidia")
            return f"modprobe: ERROR: could not insert '{name}': No such device"
        return None

    def _load_nvidia(self, module: str) -> str | None:
        on_disk = self.module_file(module)
        if on_disk is None:
            return f"modprobe: FATAL: Module {module} not found in directory /lib/modules/{self.release}"
        if module == "nvidia":
            words = "Open Kernel Module for x86_64 " if on_disk["kind"] == "open" else "x86_64 Kernel Module "
            text = f"NVRM version: NVIDIA UNIX {words} {on_disk['version']}  Release Build\nGCC version:  gcc 14.2.0\n"
            self.world.write("/proc/driver/nvidia/version", text)
            self.world.write("/sys/module/nvidia/version", f"{on_disk['version']}\n")
            self._major("nvidia", 195)
            return None
        if "nvidia" not in self.loaded():
            said = self.load("nvidia")
            if said:
                return said
        if module == "nvidia_uvm":
            self._major("nvidia-uvm", self.uvm_major)
        return None

    def _insert(self, module: str) -> None:
        text = self.world.read("/proc/modules") or ""
        self.world.write("/proc/modules", f"{text}{module} 16384 0 - Live 0x0000000000000000\n")
        Path(self.world.path(f"/sys/module/{module}")).mkdir(parents=True, exist_ok=True)

    def _major(self, name: str, number: int | None) -> None:
        text = self.world.read("/proc/devices") or "Character devices:\n\nBlock devices:\n"
        text = re.sub(rf"^ *\d+ {re.escape(name)}\n", "", text, flags=re.MULTILINE)
        if number is not None:
            text = text.replace("\n\nBlock", f"\n{number:3d} {name}\n\nBlock", 1)
        self.world.write("/proc/devices", text)

    def unload(self, name: str) -> str | None:
        """Remove a module; what modprobe would say when it is in use, else None."""
        module = name.replace("-", "_")
        driver = {"vfio_pci": "vfio-pci"}.get(module, module)
        if module not in self.loaded():
            return f"modprobe: FATAL: Module {name} is not currently loaded"
        if module == "nvidia" and any(m.startswith("nvidia_") for m in self.loaded()):
            return "modprobe: FATAL: Module nvidia is in use."
        held = [address for address in self.addresses() if self.driver_of(address) == driver]
        try:
            for address in held:
                self._refuse_busy(address)
        except BlockingIOError:
            return f"modprobe: FATAL: Module {name} is in use."
        for address in held:
            self.detach(address)
        left = [line for line in (self.world.read("/proc/modules") or "").splitlines() if line.split()[0] != module]
        self.world.write("/proc/modules", "".join(f"{line}\n" for line in left))
        for folder in (f"/sys/module/{module}", f"{PCI}/drivers/{driver}"):
            shutil.rmtree(self.world.path(folder), ignore_errors=True)
        if module == "nvidia":
            shutil.rmtree(self.world.path("/proc/driver/nvidia"), ignore_errors=True)
            self._major("nvidia", None)
        if module == "nvidia_uvm":
            self._major("nvidia-uvm", None)
        return None

    # -- boot ------------------------------------------------------------------------------------------------------

    def reboot(self) -> None:
        """Boot anew: everything that was only in memory is gone, and the boot files decide who gets which function."""
        for path in self.world.glob("/proc/[0-9]*"):
            if path != "/proc/1":
                shutil.rmtree(self.world.path(path))
        for path in ("/run", "/dev/vfio", "/proc/driver/nvidia"):
            shutil.rmtree(self.world.path(path), ignore_errors=True)
        Path(self.world.path("/run")).mkdir()
        for path in self.world.glob("/dev/nvidia*"):
            self.world.remove(path)
        self.world.write("/proc/net/unix", "Num       RefCount Protocol Flags    Type St Inode Path\n")
        for address in self.addresses():
            if self.driver_of(address) not in ("nvme", "pcieport"):
                self.detach(address)
            self._attribute(f"{PCI}/devices/{address}/driver_override", "(null)\n")
        for name in ("nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia", "vfio_pci", "snd_hda_intel"):
            self.unload(name)
        self._boot_files()

    def _boot_files(self) -> None:
        for path in self.world.glob("/etc/udev/rules.d/*.rules"):
            rule = r'^[^#\n]*KERNEL=="([^"]+)".*ATTR\{driver_override\}="([^"]*)"'
            for address, driver in re.findall(rule, self.world.read(path) or "", re.MULTILINE):
                if self.world.exists(f"{PCI}/devices/{address}"):
                    self._attribute(f"{PCI}/devices/{address}/driver_override", f"{driver}\n")
        options = "".join(f"{self.world.read(path) or ''}\n" for path in self.world.glob("/etc/modprobe.d/*.conf"))
        lists = ("/etc/modules", "/etc/initramfs-tools/modules", *self.world.glob("/etc/modules-load.d/*.conf"))
        early = "".join(f"{self.world.read(path) or ''}\n" for path in lists)
        softdep = re.search(r"^softdep\s+\S+\s+pre:.*\bvfio[-_]pci\b", options, re.MULTILINE)
        if softdep or re.search(r"^vfio[-_]pci\b", early, re.MULTILINE):
            self.load("vfio-pci")
        off = r"^(?:blacklist\s+{0}\s*$|install\s+{0}\s+/(?:usr/)?bin/(?:false|true))"
        for module in ("snd_hda_intel", "nvidia"):
            wanted = any(self.takes(module, address) for address in self.addresses())
            if wanted and not re.search(off.format(module), options, re.MULTILINE):
                self.load(module)


def uuid_of(address: str) -> str:
    """A UUID that belongs to the address for good."""
    digits = re.sub(r"[^0-9a-f]", "", address).rjust(12, "0")
    return f"GPU-5d7f1c2e-0000-4000-8000-{digits}"


def followed(path: str, link: str) -> str:
    """Where a symbolic link at `path` leads, as a path of the host."""
    return link if link.startswith("/") else os.path.normpath(f"{path.rsplit('/', 1)[0]}/{link}")


#: Takes the world and a command's words; None for "not mine", an int for a mere exit status.
Program = Callable[["TreeWorld", list[str]], "Result | str | int | None"]


class TreeWorld(World):
    """A world on a host tree: writes to sysfs act, commands are answered by doubles and kept in `commands`.

    Args:
        root: the tree.
        real_nodes: device nodes are real ones (needs root); otherwise a file holds their numbers.

    Attributes:
        kernel: what acts behind the files, with its faults.
        commands: every command, in order.
        programs: name -> double; a test may put its own there.
    """

    def __init__(self, root: Path | str, real_nodes: bool = False) -> None:
        super().__init__(str(root))
        self.real_nodes = real_nodes
        self.kernel = Kernel(self)
        self.commands: list[list[str]] = []
        self.programs: dict[str, Program] = dict(PROGRAMS)

    @property
    def mutations(self) -> list[list[str]]:
        """The commands that could have changed the host."""
        return [argv for argv in self.commands if classify(argv) == "mutator"]

    def on(self, name: str, program: Program) -> None:
        """Answer a program by this double first; what it does not take (None) goes to the one before."""
        before = self.programs.get(name)

        def first(world: TreeWorld, argv: list[str]) -> Result | str | int | None:
            answer = program(world, argv)
            return before(world, argv) if answer is None and before else answer

        self.programs[name] = first

    # -- World -----------------------------------------------------------------------------------------------------

    def run(self, argv: Sequence[str], timeout_s: float = 60.0, stdin: str | None = None) -> Result:
        words = list(argv)
        self.commands.append(words)
        return self.answer(words)

    def answer(self, argv: list[str]) -> Result:
        """What the program says, without a record of the call."""
        while argv[0] == "env":
            argv = argv[1:]
            while argv and "=" in argv[0]:
                argv = argv[1:]
        name = argv[0].rsplit("/", 1)[-1]
        program = self.programs.get(name)
        said = program(self, [name, *argv[1:]]) if program else None
        if said is None:
            return Result(127, "", f"{name}: command not found")
        if isinstance(said, int):
            return Result(said, "", "")
        return Result(0, said, "") if isinstance(said, str) else said

    def write(self, path: str, text: str, mode: int | None = None, owner: tuple[int, int] | None = None) -> None:
        """Without the sync to disk: a tree dies with its test, and thousands of them are written."""
        real = Path(self.path(path))
        real.parent.mkdir(parents=True, exist_ok=True)
        new = not real.exists()
        real.write_text(text, encoding="utf-8")
        if owner:
            os.chown(real, *owner)
        if mode is not None or new:
            real.chmod(0o644 if mode is None else mode)

    def poke(self, path: str, text: str) -> None:
        if not self.kernel.poke(path, text):
            super().poke(path, text)

    def poke_within(self, path: str, text: str, timeout_s: float) -> None:
        try:
            self.poke(path, text)
        except BlockingIOError as blocked:
            raise ApplyError(f"writing {text.strip()!r} to {path} did not return within {timeout_s:g} s") from blocked

    def wait(self, holds: Callable[[], bool], timeout_s: float, interval_s: float = 0.05) -> bool:
        """Everything here happens at once: what does not hold now never will."""
        return holds()

    # -- device nodes ----------------------------------------------------------------------------------------------

    def make_node(self, path: str, major: int, minor: int) -> None:
        real = Path(self.path(path))
        real.parent.mkdir(parents=True, exist_ok=True)
        real.unlink(missing_ok=True)
        if self.real_nodes:
            os.mknod(real, 0o020666, os.makedev(major, minor))
            real.chmod(0o666)
        else:
            real.write_text(f"c {major}:{minor}\n", encoding="utf-8")

    def device(self, path: str, follow: bool = False) -> tuple[str, int, int] | None:
        link = self.link(path)
        if follow and link is not None:
            path = followed(path, link)
        match = _NODE.fullmatch(self.read(path) or "") if path.startswith("/dev/") else None
        return ("char", int(match[1]), int(match[2])) if match else super().device(path, follow)
