"""What is asked of the driver's libraries, and what stands where they go: in a container, or on the machine itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from . import apt, runfile
from .container_nodes import LISTING, awaits_restart, look_inside
from .facts import HostFacts
from .steps import Plan
from .world import World

LIBRARY_FOLDER = "/usr/lib/x86_64-linux-gnu"
#: Where the loader finds libraries, by either of the names that the folder has.
_FOLDERS = (LIBRARY_FOLDER, LIBRARY_FOLDER.replace("/usr", "", 1))
#: How NVML and CUDA are asked.
_PROBES = (
    ("nvidia-smi", "-L"),
    ("python3", "-c", "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"),
)
#: Sonames that decide: libcuda for CUDA, libnvidia-ml for NVML and nvidia-smi.
SONAMES = ("libcuda.so.1", "libnvidia-ml.so.1")
#: A library of the driver carries the driver's version; helpers such as libnvidia-egl-wayland carry their own.
LIBRARY = re.compile(r"^lib(?:cuda|cudadebugger|nvcuvid|nvoptix|nvidia-[a-z0-9-]+)\.so\.(\d{3}\.\d+(?:\.\d+)?)$")


@dataclass(frozen=True)
class UserspaceDesired:
    """What the inventory asks for.

    Attributes:
        version: driver version; the host's, to the last digit.
        state: `present`, `absent`, or `verified`: the libraries are somebody else's and have to fit.
        vmid: container of this host, None for this machine itself.
        minimum: with `verified`, the oldest version that will do.
        source: `runfile` or `apt`.
        runfile, sha256: path of the installer on the host and its checksum.
        packages: with apt, instead of the distribution's own set.
        ffmpeg: FFmpeg's libraries are wanted, for torchcodec.
        remove_foreign: libraries and packages of another version may be removed.
        probe: ask NVML and CUDA whether they work.
        addresses: cards that must be seen, by PCI address; empty: any.
    """

    version: str
    state: str = "present"
    vmid: int | None = None
    minimum: str = ""
    source: str = "runfile"
    runfile: str = ""
    sha256: str = ""
    packages: tuple[str, ...] = ()
    ffmpeg: bool = True
    remove_foreign: bool = False
    probe: bool = True
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Probe:
    """What NVML and CUDA answer: output of `nvidia-smi -L`, and cuInit's CUresult (None: no Python to ask with)."""

    nvml: str = ""
    nvml_ok: bool = True
    cuda: int | None = None

    @property
    def uuids(self) -> frozenset[str]:
        return frozenset(re.findall(r"UUID: (GPU-[0-9a-f-]+)", self.nvml))


@dataclass(frozen=True)
class UserspaceState:
    """What stands where the libraries go.

    Attributes:
        distribution: `debian`, `ubuntu`, …: ID of /etc/os-release.
        libraries: paths of the driver's libraries that carry a version.
        resolved: path of a soname in the loader's cache -> file that it leads to, empty for a broken link.
        owners: path of a library of another version -> package that it belongs to; files of no package are absent.
        uninstaller: a `.run` installation is there.
        packages: installed packages of the driver -> version.
        available: package -> versions that apt could install.
        held: packages on hold.
        texts: path -> text of the files that the role owns, None where absent.
        codecs: major versions of libavcodec in the loader's cache.
        free_mb: free space of the file system with /usr and of that with /var/tmp, the smaller one.
        memory_mb: memory.
        runfile_sha256: checksum of the installer on the host.
        waits: why the container has to be restarted before its cards can be asked, empty when it need not.
        probe: None where it was not asked for, or would tell nothing yet.
    """

    distribution: str = ""
    libraries: tuple[str, ...] = ()
    resolved: Mapping[str, str] = field(default_factory=dict)
    owners: Mapping[str, str] = field(default_factory=dict)
    uninstaller: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)
    available: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    texts: Mapping[str, str | None] = field(default_factory=dict)
    codecs: tuple[int, ...] = ()
    free_mb: int = 0
    memory_mb: int = 0
    runfile_sha256: str | None = None
    waits: str = ""
    probe: Probe | None = None

    def foreign(self, version: str) -> tuple[str, ...]:
        """Libraries of the driver of another version than this."""
        return tuple(path for path in self.libraries if library_version(path) != version)

    def fits(self, version: str) -> bool:
        """The exact match test: every soname leads to this version, and no other version is beside it."""
        return not mismatches(self, version)


@dataclass
class UserspacePlan(Plan):
    """A plan that says whether its steps read the installer, which has to be on the host by then."""

    wants_runfile: bool = False

    def as_dict(self) -> dict[str, object]:
        return {**super().as_dict(), "wants_runfile": self.wants_runfile}


def library_version(path: str) -> str:
    """Version in the file name of a library of the driver, empty for other files."""
    match = LIBRARY.match(path.rsplit("/", 1)[-1])
    return match[1] if match else ""


def loader_cache(text: str) -> dict[str, list[str]]:
    """`ldconfig -p`: soname -> paths for this architecture, in the loader's order."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = re.match(r"\s*(\S+) \(([^)]*)\) => (\S+)", line)
        if match and "x86-64" in match[2]:
            found.setdefault(match[1], []).append(match[3])
    return found


def why_waiting(facts: HostFacts, desired: UserspaceDesired, inside: World) -> str:
    """`UserspaceState.waits` of a container of this host; nothing is asked where NVML and CUDA are not to be either."""
    container = None if desired.vmid is None else facts.container(desired.vmid)
    if container is None or not desired.probe or desired.state == "absent":
        return ""
    return awaits_restart(facts, container, look_inside(inside))


def gather_state(
    world: World, desired: UserspaceDesired, loaded: str, waiting: Callable[[World], str] = lambda _: ""
) -> UserspaceState:
    """Read a container's, or this machine's, userspace; changes nothing.

    NVML and CUDA are asked where an answer can be right: nvidia-smi in a container that waits for its nodes would find
    no card, or have nodes made that are not those of the configuration.

    Args:
        loaded: version of the loaded kernel module, empty when none is.
        waiting: tells `UserspaceState.waits` of this world, as `why_waiting` does.
    """
    world = _asked(world, desired)
    cache = loader_cache(world.run(["ldconfig", "-p"]).out)
    links = [path for soname in SONAMES for path in cache.get(soname, [])]
    folders = {LIBRARY_FOLDER, *(path.rsplit("/", 1)[0] for path in links)}
    libraries = sorted(f"{folder}/{name}" for folder in folders for name in world.names(folder) if LIBRARY.match(name))
    state = UserspaceState(
        distribution=apt.distribution(world),
        libraries=tuple(libraries),
        resolved={path: world.end(path) for path in links},
        codecs=tuple(sorted(_codec_versions(cache))),
        waits=waiting(world),
    )
    expected = loaded or desired.version
    fits = state.fits(expected)
    values = dict(vars(state))
    if desired.state != "verified":
        values.update(
            uninstaller=world.exists(runfile.UNINSTALLER),
            packages=apt.driver_packages(world),
            held=apt.held(world),
            texts={path: world.read(path) for path in owned_files(desired)},
            owners=_owners(world, state.foreign(expected)),
        )
        if desired.source == "apt":
            values["available"] = apt.available(world, package_set(state.distribution, desired))
        elif not fits:
            values.update(free_mb=runfile.free_mb(world), memory_mb=_memory_mb(world))
    if fits and desired.probe and desired.state != "absent" and not state.waits:
        values["probe"] = _probe(world.ahead(_PROBES))
    return UserspaceState(**values)


def _asked(world: World, desired: UserspaceDesired) -> World:
    """With the answers that every look needs, and those that most need."""
    commands = [("ldconfig", "-p"), *([LISTING] if desired.probe else [])]
    files = ["/etc/os-release"]
    if desired.state != "verified":
        commands += [apt.DRIVER_QUERY, apt.HELD_QUERY]
        files += owned_files(desired)
    return world.ahead(
        commands,
        files,
        folders=_FOLDERS,
        places=[runfile.UNINSTALLER],
        links=[f"{folder}/{soname}" for folder in _FOLDERS for soname in SONAMES],
    )


def _codec_versions(cache: Mapping[str, Sequence[str]]) -> list[int]:
    names = (re.match(r"libavcodec\.so\.(\d+)$", soname) for soname in cache)
    return [int(match[1]) for match in names if match]


def _owners(world: World, paths: Sequence[str]) -> dict[str, str]:
    if not paths:
        return {}
    found = {}
    for line in world.run(["dpkg-query", "-S", *paths]).out.splitlines():
        package, _, path = line.partition(": ")
        found[path.strip()] = package.split(",")[0].split(":")[0]
    return found


def _memory_mb(world: World) -> int:
    match = re.search(r"^MemTotal:\s+(\d+) kB", world.read("/proc/meminfo") or "", re.MULTILINE)
    return int(match[1]) // 1024 if match else 0


def _probe(world: World) -> Probe:
    nvml, cuda_said = (world.run(argv, 60) for argv in _PROBES)
    cuda = cuda_said.out.strip()
    return Probe((nvml.out + nvml.err).strip(), nvml.ok, int(cuda) if cuda.isdigit() else None)


def mismatches(state: UserspaceState, version: str) -> list[str]:
    """Why the libraries are not exactly of this version, a clause each."""
    wrong = wrong_links(state, version)
    others = state.foreign(version)
    if others:
        shown = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
        wrong.append(f"other versions are there: {shown}")
    return wrong


def wrong_links(state: UserspaceState, version: str) -> list[str]:
    """Sonames that the loader would not find in this version, a clause each."""
    wrong = []
    for soname in SONAMES:
        links = {path: end for path, end in state.resolved.items() if path.endswith(f"/{soname}")}
        if not links:
            wrong.append(f"the loader knows no {soname}")
        for path, end in links.items():
            if library_version(end) != version:
                wrong.append(f"{path} leads to {end or 'nothing'}")
    return wrong


def package_set(distribution: str, desired: UserspaceDesired) -> tuple[str, ...]:
    """The packages of the libraries where they come from apt; empty for an unknown distribution."""
    return desired.packages or apt.library_packages(distribution, desired.version)


def owned_files(desired: UserspaceDesired) -> dict[str, str]:
    """Files of the role: path -> text."""
    pinned = desired.version if desired.source == "apt" else None
    return {apt.PREFERENCES: apt.preferences(pinned), apt.UNATTENDED: apt.unattended_blacklist()}
