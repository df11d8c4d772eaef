"""The driver's libraries beside a kernel module that belongs to the host: exactly the same version, once.

A container shares the host's module and brings libraries of its own. A point release of difference is an error of
NVML and CUDA, a second version beside the right one is the same error on another day. The test is that of
libnvidia-container: a library fits when its file name ends in the module's version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from . import apt, runfile
from .diagnosis import Diagnosis, explain, explain_cuda
from .driver import loaded_refusals
from .facts import HostFacts
from .steps import Refusal, Step
from .userspace_state import (
    LIBRARY_FOLDER,
    Probe,
    UserspaceDesired,
    UserspacePlan,
    UserspaceState,
    mismatches,
    owned_files,
    package_set,
    wrong_links,
)

#: What the installer needs while it runs: most of what it unpacks is in memory for a while.
MEMORY_MB = 2048
#: A container's 2 GiB are shown a little smaller by some kernels.
_MEMORY_SLACK_MB = 64
#: FFmpeg 4 to 8, the versions that torchcodec loads (github.com/meta-pytorch/torchcodec, README).
CODECS = range(58, 63)


def plan(host: HostFacts, state: UserspaceState, desired: UserspaceDesired, ahead: bool = False) -> UserspacePlan:
    """What to do, or why not.

    Args:
        host: the machine whose kernel runs the driver; for a container, the host of the container.
        ahead: this looks ahead of work on the host that comes first: its driver, and the installer's file.
    """
    if desired.state == "verified":
        return _verify(host, state, desired)
    if desired.state == "absent":
        return _remove(state, desired)
    return _install(host, state, desired, ahead)


def unreachable(host: HostFacts, desired: UserspaceDesired) -> UserspacePlan | None:
    """What is to be said of a container that is not there or does not run; None where it can be worked in.

    Libraries cannot be installed or proven in a container that is off, so that is refused. On the way back it is only
    told: files that stay in it do no harm, and the host can be given back without them.
    """
    if desired.vmid is None:
        return None
    vmid, container = desired.vmid, host.container(desired.vmid)
    leaving = desired.state == "absent"
    if container is None:
        if leaving:
            return UserspacePlan(notes=[f"there is no container {vmid} to take anything from"])
        refusal = Refusal(
            "no-such-container",
            f"this host has no container {vmid}",
            f"/etc/pve/lxc/{vmid}.conf",
            "correct lxc_gpu_vmid, or create the container (`pct create`) or migrate it here",
        )
        return UserspacePlan(refusals=[refusal])
    if not container.running:
        if leaving:
            return UserspacePlan(
                notes=[
                    f"container {vmid} does not run, so the driver's libraries stay in it; "
                    f"start it (`pct start {vmid}`) and run this again to remove them"
                ]
            )
        refusal = Refusal(
            "container-stopped",
            f"container {vmid} does not run, and its libraries can be neither installed nor proven",
            container.file or f"container {vmid}",
            f"start it (`pct start {vmid}`), or take it out of the inventory",
        )
        return UserspacePlan(refusals=[refusal])
    return None


def _verify(host: HostFacts, state: UserspaceState, desired: UserspaceDesired) -> UserspacePlan:
    loaded = host.driver_version
    refusals = loaded_refusals(loaded, desired.minimum or desired.version)
    found = UserspacePlan(refusals=refusals, notes=_waiting(state, desired))
    if not loaded:
        return found
    wrong = mismatches(state, loaded)
    if wrong:
        found.refusals.append(
            Refusal(
                "libraries-do-not-fit",
                f"the loaded driver is {loaded} and {'; '.join(wrong)}",
                LIBRARY_FOLDER,
                "use an image without driver libraries of its own (the container engine mounts the host's), or remove "
                "the second version",
            )
        )
    if desired.ffmpeg and not _has_codecs(state):
        found.notes.append("FFmpeg's libraries are missing; torchcodec will not load")
    _judge_probe(host, state, desired, found)
    return found


def _install(host: HostFacts, state: UserspaceState, desired: UserspaceDesired, ahead: bool) -> UserspacePlan:
    made = UserspacePlan(notes=_waiting(state, desired))
    version = desired.version
    if host.driver_version not in ("", version):
        differs = Refusal(
            "host-driver-differs",
            f"the loaded kernel module is of {host.driver_version} and {version} is wanted here",
            "/proc/driver/nvidia/version",
            "either bring the host to it first (nvidia_driver), or set nvidia_driver_version to the host's",
        )
        if not ahead or state.fits(version):
            made.refusals.append(differs)
            return made
        made.notes.append(differs.sentence())
    _files(state, desired, made)
    if desired.source == "apt":
        _packages(state, desired, made)
    elif not state.fits(version):
        _runfile(state, desired, made, ahead)
    if desired.ffmpeg and not _has_codecs(state):
        why = "torchcodec loads FFmpeg's libraries"
        made.steps.append(Step("apt-install", "ffmpeg", why, {"packages": {"ffmpeg": ""}}))
    if not made.steps:
        _judge_probe(host, state, desired, made)
    return made


def _waiting(state: UserspaceState, desired: UserspaceDesired) -> list[str]:
    """What stays unproven until the container is restarted, which is not this planner's to do."""
    if not state.waits:
        return []
    return [
        f"container {desired.vmid} has to be restarted before NVML and CUDA can be asked in it ({state.waits}): "
        f"`pct reboot {desired.vmid}`, or set lxc_gpu_restart to true"
    ]


def _has_codecs(state: UserspaceState) -> bool:
    return any(version in CODECS for version in state.codecs)


def _files(state: UserspaceState, desired: UserspaceDesired, made: UserspacePlan) -> None:
    if state.distribution not in ("debian", "ubuntu"):
        return
    for path, text in owned_files(desired).items():
        if state.texts.get(path) != text:
            made.steps.append(Step("write", path, "no other version of the driver comes in by apt", {"text": text}))


def _packages(state: UserspaceState, desired: UserspaceDesired, made: UserspacePlan) -> None:
    version, wanted = desired.version, package_set(state.distribution, desired)
    if not wanted:
        made.refusals.append(apt.unknown_distribution(state.distribution, "nvidia_userspace_packages"))
        return
    if state.uninstaller:
        made.refusals.append(
            Refusal(
                "runfile-driver",
                "a .run installation is there, and packages would be laid over it",
                runfile.UNINSTALLER,
                f"either remove it (`{runfile.UNINSTALLER} -s`), or set nvidia_driver_source: runfile",
            )
        )
    others = {n: v for n, v in state.packages.items() if not v.startswith(f"{version}-") and n not in wanted}
    if others and desired.remove_foreign:
        made.steps.append(_purge(sorted(others)))
    there = {n: v for n, v in state.packages.items() if not (desired.remove_foreign and n in others)}
    steps, refusals = apt.plan_packages(wanted, there, state.available, version)
    made.steps += steps
    made.refusals += refusals
    _foreign_files(state, desired, made)
    held_back = sorted({*wanted, *there} - set(state.held))
    if held_back:
        why = "no upgrade moves one of them alone"
        made.steps.append(Step("apt-hold", "the driver's packages", why, {"packages": held_back}))
    wrong = wrong_links(state, version)
    if wrong and not made.refusals and not made.steps:
        made.refusals.append(_unexplained(wrong, version))


def _runfile(state: UserspaceState, desired: UserspaceDesired, made: UserspacePlan, ahead: bool) -> None:
    if state.packages:
        names = sorted(state.packages)
        if desired.remove_foreign:
            made.steps.append(_purge(names))
        else:
            listed = ", ".join(f"{name} {state.packages[name]}" for name in names)
            made.refusals.append(
                Refusal(
                    "packaged-driver",
                    f"packages of the driver are installed ({listed}) and the installer would overwrite their files",
                    "dpkg",
                    "either allow their removal (nvidia_userspace_remove_foreign: true), or set "
                    "nvidia_driver_source: apt",
                )
            )
    others = _other_owners(state, desired.version)
    own = {path: end for path, end in state.resolved.items() if state.owners.get(end) not in others}
    links_right = not wrong_links(replace(state, resolved=own), desired.version)
    # What an earlier .run installation left is removed by the new one; other files are not.
    _foreign_files(state, desired, made, loose_too=links_right or not state.uninstaller)
    if links_right and not state.packages:
        return
    made.refusals += runfile.space_refusals(
        state.free_mb, runfile.LIBRARIES_MB, "free space, or enlarge the root disk (`pct resize ID rootfs +4G`)"
    )
    if state.memory_mb < MEMORY_MB - _MEMORY_SLACK_MB:
        made.refusals.append(
            Refusal(
                "no-memory",
                f"there are {state.memory_mb} MB of memory, the installer needs {MEMORY_MB}",
                "memory",
                f"give the container more while it is installed (`pct set ID --memory {MEMORY_MB}`)",
            )
        )
    if not ahead:
        made.refusals += runfile.refusals(desired.runfile, desired.sha256, state.runfile_sha256)
    made.wants_runfile = True
    inside = f"{runfile.FOLDER}/{runfile.name_of(desired.version)}" if desired.vmid is not None else desired.runfile
    detail = {"source": desired.runfile, "argv": runfile.container_arguments(inside), "version": desired.version}
    why = f"libraries of {desired.version}, no kernel modules"
    made.steps.append(Step("runfile", inside, why, detail))


def _other_owners(state: UserspaceState, version: str) -> list[str]:
    """Packages outside the driver that own a library of another version, such as cuda-compat."""
    return sorted({state.owners[p] for p in state.foreign(version) if p in state.owners} - set(state.packages))


def _foreign_files(
    state: UserspaceState, desired: UserspaceDesired, made: UserspacePlan, loose_too: bool = True
) -> None:
    """Libraries of another version that are nobody's, or another package's, such as CUDA's compatibility libraries."""
    foreign = state.foreign(desired.version)
    loose = [path for path in foreign if path not in state.owners] if loose_too else []
    others = _other_owners(state, desired.version)
    if not loose and not others:
        return
    if not desired.remove_foreign:
        whose = f" (of {', '.join(others)})" if others else ""
        shown = ", ".join(path for path in foreign if state.owners.get(path, "") not in state.packages)
        made.refusals.append(
            Refusal(
                "foreign-version",
                f"libraries of another version than {desired.version} are there: {shown}{whose}",
                LIBRARY_FOLDER,
                "either allow their removal (nvidia_userspace_remove_foreign: true), or remove what brought them (an "
                "image with a driver inside, a bind mount of the host's libraries, cuda-compat)",
            )
        )
        return
    if others:
        made.steps.append(_purge(others))
    if loose:
        why = f"libraries of another version than {desired.version}"
        made.steps.append(Step("remove-libraries", f"{len(loose)} files", why, {"paths": loose}))


def _purge(names: Sequence[str]) -> Step:
    return Step("apt-remove", "packages of another origin or version", "one version only", {"packages": list(names)})


def _unexplained(wrong: Sequence[str], version: str) -> Refusal:
    return Refusal(
        "libraries-do-not-fit",
        f"the packages are of {version}, but {'; '.join(wrong)}",
        LIBRARY_FOLDER,
        "look for a second libcuda (`ldconfig -p | grep libcuda`), or install the packages again",
    )


def _judge_probe(host: HostFacts, state: UserspaceState, desired: UserspaceDesired, made: UserspacePlan) -> None:
    """What NVML and CUDA say, translated; and whether the cards seen are the very cards given."""
    if state.probe is None or not host.driver_version:
        return
    told, seen = _diagnoses(state.probe), state.probe.uuids
    for found in told:
        made.refusals.append(Refusal(found.name, found.meaning, _place(desired), found.fix))
    wanted = {gpu.uuid for gpu in host.gpus if gpu.address in desired.addresses and gpu.uuid}
    if not told and wanted and seen != wanted:
        made.refusals.append(
            Refusal(
                "wrong-cards",
                f"{', '.join(sorted(seen)) or 'no card'} is seen and {', '.join(sorted(wanted))} was given",
                _place(desired),
                "run lxc_gpu again: minors follow the order in which the driver finds cards and may have moved",
            )
        )


def _diagnoses(probe: Probe) -> list[Diagnosis]:
    found = []
    nvml = explain(probe.nvml)
    if nvml is None and not probe.nvml_ok:
        text = probe.nvml.splitlines()[-1] if probe.nvml else "nothing"
        nvml = Diagnosis("nvml-error", f"nvidia-smi fails and says {text!r}", "run `nvidia-smi` there and read on")
    if nvml is not None:
        found.append(nvml)
    cuda = explain_cuda(probe.cuda) if probe.cuda is not None else None
    if cuda is not None:
        found.append(cuda)
    return found


def _place(desired: UserspaceDesired) -> str:
    return f"container {desired.vmid}" if desired.vmid is not None else "this machine"


def _remove(state: UserspaceState, desired: UserspaceDesired) -> UserspacePlan:
    made = UserspacePlan()
    on_hold = sorted(set(state.held) & set(state.packages))
    if on_hold:
        made.steps.append(Step("apt-unhold", "the driver's packages", "they go away", {"packages": on_hold}))
    if state.packages:
        made.steps.append(_purge(sorted(state.packages)))
    if state.uninstaller:
        made.steps.append(Step("uninstall", runfile.UNINSTALLER, "the way back"))
    for path in owned_files(desired):
        if state.texts.get(path) is not None:
            made.steps.append(Step("remove", path, "owned by the role"))
    return made
