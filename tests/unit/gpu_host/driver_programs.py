"""Test double: apt and NVIDIA's installer on a host tree, beside the programs that the tree brings itself.

A machine of its own inside a container is a second tree below the container's root, reached through `pct exec`.
"""

from __future__ import annotations

import fnmatch
import hashlib

from gpu_host.runfile import LOG, UNINSTALLER
from gpu_host.userspace_state import LIBRARY_FOLDER
from gpu_host.world import Result
from tests.doubles.host_tree import HostTree, TreeWorld

Answer = Result | str | int | None


class Machine:
    """What apt could install, and how the installer behaves, on one tree.

    Attributes:
        archive: package -> versions that apt knows now.
        archive_after_update: what it knows after `apt-get update`.
        abort: what the installer writes into its log before it gives up; empty for an installation.
        status: what the installer ends with after an installation.
        modules: the installer builds kernel modules.
        nvml: what `nvidia-smi -L` says.
        cuda: what cuInit returns.
    """

    def __init__(self, tree: HostTree, modules: bool = True) -> None:
        self.tree, self.world = tree, tree.world
        self.archive: dict[str, tuple[str, ...]] = {}
        self.archive_after_update: dict[str, tuple[str, ...]] = {}
        self.abort, self.status, self.modules = "", 0, modules
        self.nvml, self.cuda = "", 0
        self.held: set[str] = set()
        programs = {
            "apt-cache": self._madison,
            "apt-get": self._apt_get,
            "apt-mark": self._apt_mark,
            "df": self._df,
            "ldconfig": self._ldconfig,
            "mokutil": self._mokutil,
            "nvidia-smi": self._nvidia_smi,
            "nvidia-uninstall": self._uninstall,
            "python3": self._python,
            "rm": self._rm,
            "sh": self._installer,
            "sha256sum": self._sha256sum,
            "useradd": self._useradd,
        }
        for name, program in programs.items():
            self.world.on(name, program)

    def fails(self, name: str, text: str) -> None:
        """The program ends with 1 and says this, from now on."""
        self.world.on(name, lambda world, argv: Result(1, "", f"{text}\n"))

    def lies(self, name: str) -> None:
        """The program reports success and does nothing, from now on."""
        self.world.on(name, lambda world, argv: 0)

    def calls(self, name: str) -> list[list[str]]:
        bare = [[w for w in argv if w != "env" and not w.startswith("DEBIAN_")] for argv in self.world.commands]
        return [argv for argv in bare if argv[0] == name]

    # -- apt -------------------------------------------------------------------------------------------------------

    def _madison(self, world: TreeWorld, argv: list[str]) -> Answer:
        rows = [(name, version) for name in argv[2:] for version in self.archive.get(name, ())]
        return "".join(f" {name} | {version} | https://example.org/debian ./ Packages\n" for name, version in rows)

    def _apt_get(self, world: TreeWorld, argv: list[str]) -> Answer:
        verb, *names = [word for word in argv[1:] if not word.startswith("-")]
        if verb == "update":
            self.archive = {**self.archive, **self.archive_after_update}
        for name, _, version in (word.partition("=") for word in names):
            if verb == "purge":
                self.tree.package(name, None)
                kernel = name.split("-headers-")[-1]
                if kernel != name:
                    world.remove(f"/lib/modules/{kernel}/build")
            elif name not in self.archive:
                return Result(100, "", f"E: Unable to locate package {name}\n")
            else:
                self.tree.package(name, version or self.archive[name][0])
                if "-headers-" in name:
                    running = world.kernel.release == name.split("-headers-")[1]
                    self.tree.kernel(name.split("-headers-")[1], running=running)
        return 0

    def _apt_mark(self, world: TreeWorld, argv: list[str]) -> Answer:
        if argv[1] == "showhold":
            return "".join(f"{name}\n" for name in sorted(self.held))
        self.held = self.held | set(argv[2:]) if argv[1] == "hold" else self.held - set(argv[2:])
        return 0

    # -- the installer ---------------------------------------------------------------------------------------------

    def _installer(self, world: TreeWorld, argv: list[str]) -> Answer:
        if not argv[1].endswith(".run"):
            return None
        version = argv[1].rsplit("-", 1)[1].removesuffix(".run")
        world.write(LOG, f"nvidia-installer log file '{LOG}'\n{self.abort}")
        if self.abort:
            return 1
        for path in world.glob(f"{LIBRARY_FOLDER}/lib*.so.*"):
            if "libav" not in path:
                world.remove(path)
        if self.modules:
            self.tree.driver(version, kernels=(world.kernel.release,))
        self.libraries(version)
        world.write(UNINSTALLER, "#!/bin/sh\n", 0o755)
        return self.status

    def libraries(self, version: str) -> None:
        for name in ("libcuda", "libnvidia-ml"):
            self.tree.file(f"{LIBRARY_FOLDER}/{name}.so.{version}", "")
            self.tree.path(f"{LIBRARY_FOLDER}/{name}.so.1").unlink(missing_ok=True)
            self.tree.path(f"{LIBRARY_FOLDER}/{name}.so.1").symlink_to(f"{name}.so.{version}")

    def _uninstall(self, world: TreeWorld, argv: list[str]) -> Answer:
        for path in (
            *world.glob(f"{LIBRARY_FOLDER}/lib*nvidia*"),
            *world.glob(f"{LIBRARY_FOLDER}/libcuda*"),
            UNINSTALLER,
        ):
            world.remove(path)
        for build in world.names("/var/lib/dkms/nvidia"):
            if "kernel-" not in build:
                world.answer(["dkms", "remove", f"nvidia/{build}", "--all"])
        return 0

    # -- others ----------------------------------------------------------------------------------------------------

    def _df(self, world: TreeWorld, argv: list[str]) -> Answer:
        row = "/dev/root 64000 20000 44000 32% /\n"
        return f"Filesystem 1048576-blocks Used Available Capacity Mounted on\n{row}{row}"

    def _ldconfig(self, world: TreeWorld, argv: list[str]) -> Answer:
        names = [n for n in world.names(LIBRARY_FOLDER) if fnmatch.fnmatch(n, "*.so.1") or n.startswith("libav")]
        return "".join(f"\t{name} (libc6,x86-64) => {LIBRARY_FOLDER}/{name}\n" for name in names)

    def _mokutil(self, world: TreeWorld, argv: list[str]) -> Answer:
        return f"{argv[-1]} is {'already' if world.exists('/run/double/mok') else 'not'} enrolled\n"

    def _nvidia_smi(self, world: TreeWorld, argv: list[str]) -> Answer:
        return f"{self.nvml}\n"

    def _python(self, world: TreeWorld, argv: list[str]) -> Answer:
        return f"{self.cuda}\n"

    def _rm(self, world: TreeWorld, argv: list[str]) -> Answer:
        for path in argv[2:]:
            if world.device(path) and world.device(path)[0] == "dir":  # type: ignore[index]
                return Result(1, "", f"rm: cannot remove '{path}': Is a directory\n")
            world.remove(path)
        return 0

    def _sha256sum(self, world: TreeWorld, argv: list[str]) -> Answer:
        text = world.read(argv[1])
        return 1 if text is None else f"{hashlib.sha256(text.encode()).hexdigest()}  {argv[1]}\n"

    def _useradd(self, world: TreeWorld, argv: list[str]) -> Answer:
        world.write("/etc/passwd", f"{world.read('/etc/passwd') or ''}{argv[-1]}:x:997:997::/:/usr/sbin/nologin\n")
        return 0


def inside(host: HostTree, vmid: int) -> Machine:
    """The machine in a container: the host's `pct exec` asks its programs first."""
    tree = HostTree(host.path(f"/var/lib/lxc/{vmid}/rootfs"), f"ct{vmid}", proxmox=False)
    machine = Machine(tree, modules=False)

    def pct(world: TreeWorld, argv: list[str]) -> Answer:
        if argv[1:3] != ["exec", str(vmid)]:
            return None
        said = tree.world.answer(argv[argv.index("--") + 1 :])
        return None if said.rc == 127 else said

    host.world.on("pct", pct)
    return machine
