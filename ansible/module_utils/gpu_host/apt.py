"""Exact package versions through apt: what is there, how it is pinned, and how it is proven afterwards.

apt has three ways to leave an exact version: a higher candidate, a transitional package of another branch, and a
virtual package with many providers. So packages are named with their version, other versions get no candidate, and
what is installed is read back from dpkg.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from .apply import Undo
from .steps import ApplyError, Refusal, Step
from .world import World

PREFERENCES = "/etc/apt/preferences.d/drafthouse-nvidia"
UNATTENDED = "/etc/apt/apt.conf.d/52drafthouse-nvidia"

#: Packages of the driver, by name.
DRIVER_PACKAGES = "libnvidia-* nvidia-* libcuda1 libcudadebugger1"
#: Packages that share the prefix and have versions of their own: the container toolkit, and what Debian's libraries
#: need around them (libcuda1 is not installable where nvidia-support has no candidate).
INDEPENDENT_PACKAGES = (
    "nvidia-container-toolkit nvidia-container-toolkit-base libnvidia-container1 libnvidia-container-tools "
    "nvidia-support nvidia-installer-cleanup nvidia-legacy-check nvidia-kernel-common nvidia-modprobe nvidia-settings "
    "nvidia-xconfig"
)

#: Names that look like the driver's and are versioned independently of it.
_OTHER_VERSIONS = re.compile(
    r"container|nvidia-egl|nvidia-vaapi|nvidia-cuda|nvidia-driver-(pinning|local-repo)|^nvidia-(support|legacy-check)"
    r"|^nvidia-(installer-cleanup|kernel-common|modprobe|settings|xconfig)$|^pve-|-headers-|^nvidia-cudnn"
)
_DRIVER_NAME = re.compile(r"^(lib)?nvidia-|^libcuda1$|^libcudadebugger1$|^firmware-nvidia-gsp$")

_ENVIRONMENT = ["env", "DEBIAN_FRONTEND=noninteractive"]


def is_driver_package(name: str) -> bool:
    """A package that has to be of the driver's own version."""
    return bool(_DRIVER_NAME.search(name)) and not _OTHER_VERSIONS.search(name)


def preferences(version: str | None) -> str:
    """Text of the preferences file: this version, and no candidate at all instead of another one.

    Args:
        version: driver version; None where the driver comes from a .run file and no package may be beside it.

    The first stanza that matches a version wins, so that of the independent packages stands first (apt_preferences(5)).
    """
    stanzas = [("Versions of their own", INDEPENDENT_PACKAGES, "release *", 500)]
    if version is not None:
        stanzas.append(("The one version of this host", DRIVER_PACKAGES, f"version {version}-*", 1001))
    stanzas.append(("No other version: no candidate instead of drift", DRIVER_PACKAGES, "release *", -1))
    return "\n".join(
        f"Explanation: {why}\nPackage: {packages}\nPin: {pin}\nPin-Priority: {priority}\n"
        for why, packages, pin, priority in stanzas
    )


def header_preferences(pattern: str) -> str:
    """Text of the preferences file that keeps headers of unfit kernels away (`kernels.unfit_headers_pattern`)."""
    return (
        "Explanation: DKMS would build the NVIDIA driver for these kernels, fail, and leave dpkg half-configured\n"
        f"Package: /{pattern}/\nPin: release *\nPin-Priority: -1\n"
    )


def unattended_blacklist() -> str:
    """Text for unattended-upgrades, which does not ask preferences about packages already installed."""
    return (
        "// The driver and its libraries change together or not at all.\n"
        'Unattended-Upgrade::Package-Blacklist {\n    "nvidia-(?!container)";\n    "libnvidia-(?!container)";\n'
        '    "libcuda";\n};\n'
    )


def distribution(world: World) -> str:
    """`debian`, `ubuntu`, …: ID of /etc/os-release."""
    match = re.search(r'^ID="?([a-z]+)', world.read("/etc/os-release") or "", re.MULTILINE)
    return match[1] if match else ""


def library_packages(name: str, version: str) -> tuple[str, ...]:
    """Packages with the libraries and tools and nothing of the kernel; never a metapackage, which may change branch.

    Names are those of NVIDIA's CUDA repository and of the distributions; empty for an unknown distribution.
    """
    if name == "ubuntu":
        suffix = _branch_suffix(version)
        names = ("libnvidia-compute", "libnvidia-gpucomp", "libnvidia-cfg1", "libnvidia-decode", "nvidia-utils")
        return tuple(f"{base}{suffix}" for base in names)
    if name == "debian":
        return ("libcuda1", "libnvidia-ml1", "libnvidia-ptxjitcompiler1", "libnvidia-gpucomp", "nvidia-smi")
    return ()


def host_packages(name: str, version: str, kind: str) -> tuple[str, ...]:
    """Packages of a host: the module through DKMS, the tools that make nodes and keep cards awake, the libraries."""
    if name == "ubuntu":
        suffix = _branch_suffix(version)
        modules = f"nvidia-dkms{suffix}{'-open' if kind == 'open' else ''}"
        common = (f"nvidia-kernel-common{suffix}", f"nvidia-compute-utils{suffix}", "nvidia-modprobe")
        return (modules, *common, *library_packages(name, version))
    if name == "debian":
        modules = "nvidia-kernel-open-dkms" if kind == "open" else "nvidia-kernel-dkms"
        return (modules, "nvidia-modprobe", "nvidia-persistenced", *library_packages(name, version))
    return ()


def _branch_suffix(version: str) -> str:
    """`-580`; from 590 on the names of packages carry no branch."""
    branch = version.split(".", 1)[0]
    return "" if branch.isdigit() and int(branch) >= 590 else f"-{branch}"


def unknown_distribution(name: str, variable: str) -> Refusal:
    return Refusal(
        "unknown-distribution",
        f"no set of driver packages is known for {name or 'this distribution'}",
        "/etc/os-release",
        f"either name them in {variable}, or set nvidia_driver_source: runfile",
    )


def madison(text: str) -> dict[str, tuple[str, ...]]:
    """`apt-cache madison`: package -> versions, in the order shown."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split("|")]
        if len(parts) >= 3 and parts[1] not in found.setdefault(parts[0], []):
            found[parts[0]].append(parts[1])
    return {name: tuple(versions) for name, versions in found.items()}


def exact_versions(
    packages: Iterable[str], available: Mapping[str, Sequence[str]], version: str, where: str
) -> tuple[dict[str, str], list[Refusal]]:
    """The packages' full versions for a driver version, or refusals that say what the archive has instead."""
    chosen: dict[str, str] = {}
    refusals = []
    for name in packages:
        matching = [v for v in available.get(name, ()) if v.startswith(f"{version}-")]
        if matching:
            chosen[name] = matching[0]
            continue
        there = ", ".join(available.get(name, ())) or "no version of it"
        refusals.append(
            Refusal(
                "no-exact-version",
                f"apt has no {name} of {version}; it has {there}",
                where,
                "either add the archive that keeps it (NVIDIA's CUDA repository keeps old versions, distributions drop "
                "them) and update apt's lists, or install from the .run file",
            )
        )
    return chosen, refusals


def astray(wanted: Iterable[str], there: Mapping[str, str], version: str) -> list[str]:
    """Packages of the driver, wanted or come along, that are absent or of another version than the driver's."""
    return sorted(n for n in {*wanted, *there} if not there.get(n, "").startswith(f"{version}-"))


def plan_packages(
    wanted: Sequence[str], there: Mapping[str, str], could: Mapping[str, Sequence[str]], version: str
) -> tuple[list[Step], list[Refusal]]:
    """Bring the wanted packages to exactly this version; refuse what the archive has not, or what would stay beside.

    Args:
        there: installed packages of the driver -> version.
        could: package -> versions that apt could install.
    """
    wrong = astray(wanted, there, version)
    if set(wrong) & set(wanted):
        chosen, refusals = exact_versions(wanted, could, version, "apt-cache madison")
        why = f"exactly {version}, named with its version"
        return [Step("apt-install", "the driver's packages", why, {"packages": chosen})], refusals
    if wrong:
        return [], [foreign_packages({name: there[name] for name in wrong}, version)]
    return [], []


def foreign_packages(packages: Mapping[str, str], version: str) -> Refusal:
    """Packages of another driver version that would stay beside this one."""
    listed = ", ".join(f"{name} {found}" for name, found in sorted(packages.items()))
    return Refusal(
        "foreign-version",
        f"packages of another version than {version} are installed: {listed}",
        "dpkg",
        f"either purge them (`apt purge {' '.join(sorted(packages))}`), or set nvidia_driver_version to theirs",
    )


#: Package, its status and version, one a line.
_QUERY = ("dpkg-query", "-W", "-f", "${db:Status-Abbrev}|${Package}|${Version}\\n")
_DRIVER_PATTERNS = ("*nvidia*", "libcuda*")
#: What `driver_packages` and `held` ask.
DRIVER_QUERY, HELD_QUERY = (*_QUERY, *_DRIVER_PATTERNS), ("apt-mark", "showhold")


def installed(world: World, *patterns: str) -> dict[str, str]:
    """Installed (or half-configured) packages whose names match dpkg patterns -> version."""
    result = world.run([*_QUERY, *patterns])
    found = {}
    for line in result.out.splitlines():
        status, _, rest = line.partition("|")
        name, _, version = rest.partition("|")
        if version and status[1:2] not in ("n", "c"):
            found[name] = version
    return found


def driver_packages(world: World) -> dict[str, str]:
    """Installed packages of the driver -> version, the container toolkit and its like left out."""
    every = installed(world, *_DRIVER_PATTERNS)
    return {name: version for name, version in every.items() if is_driver_package(name)}


def available(world: World, packages: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Versions that apt could install, whatever the preferences say."""
    return madison(world.run(["apt-cache", "madison", *packages]).out) if packages else {}


def held(world: World) -> tuple[str, ...]:
    return tuple(world.run(HELD_QUERY).out.split())


# -- steps -------------------------------------------------------------------------------------------------------------


def apt_install(step: Step, world: World) -> Undo | None:
    """`apt-install`: `detail['packages']` (name -> version, empty for any) are installed, in these very versions."""
    wanted: dict[str, str] = step.detail["packages"]
    named = [f"{name}={version}" if version else name for name, version in wanted.items()]
    argv = [*_ENVIRONMENT, "apt-get", "install", "-y", "--no-install-recommends", "--allow-downgrades"]
    argv += ["--allow-change-held-packages", *named]
    if not world.run(argv, 1800).ok:
        # Lists of an image or of last month: the package may have moved.
        world.must([*_ENVIRONMENT, "apt-get", "update"], 600)
        world.must(argv, 1800)
    there = installed(world, *wanted)
    wrong = [f"{n} {there.get(n, 'absent')}" for n, v in wanted.items() if n not in there or (v and there[n] != v)]
    if wrong:
        raise ApplyError(f"apt-get reported success, but dpkg has {', '.join(wrong)}")
    return None


def apt_remove(step: Step, world: World) -> Undo | None:
    """`apt-remove`: `detail['packages']` are gone, with their configuration."""
    names: list[str] = step.detail["packages"]
    world.must([*_ENVIRONMENT, "apt-get", "purge", "-y", "--allow-change-held-packages", *names], 1800)
    left = installed(world, *names)
    if left:
        raise ApplyError(f"apt-get reported success, but dpkg still has {', '.join(sorted(left))}")
    return None


def apt_hold(step: Step, world: World) -> Undo | None:
    """`apt-hold`: apt does not move `detail['packages']`, nor what came with them, any more."""
    names = sorted({*step.detail["packages"], *driver_packages(world)} - set(held(world)))
    world.must(["apt-mark", "hold", *names])
    missing = sorted(set(names) - set(held(world)))
    if missing:
        raise ApplyError(f"apt-mark hold had no effect on {', '.join(missing)}")

    def undo() -> None:
        world.must(["apt-mark", "unhold", *names])

    return undo


def apt_unhold(step: Step, world: World) -> Undo | None:
    """`apt-unhold`: apt may move `detail['packages']` again."""
    world.must(["apt-mark", "unhold", *step.detail["packages"]])
    return None


HANDLERS = {"apt-install": apt_install, "apt-remove": apt_remove, "apt-hold": apt_hold, "apt-unhold": apt_unhold}
