"""The libraries of a container: the exact match test, the refusals, and what NVML and CUDA's errors mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_host import apt
from gpu_host.diagnosis import CUDA_ERRORS, MESSAGES, explain, explain_cuda
from gpu_host.facts import Container, HostFacts, NvidiaGpu
from gpu_host.userspace import plan, unreachable
from gpu_host.userspace_state import (
    LIBRARY_FOLDER,
    Probe,
    UserspaceDesired,
    UserspacePlan,
    UserspaceState,
    library_version,
    loader_cache,
    mismatches,
)

VERSION, OTHER = "580.126.09", "580.126.18"
SUM = "4cac53e48f8adff661d47c8788ed24059a248c9fd8098ceafd088a498986ec26"
RUNFILE = f"/var/cache/drafthouse/NVIDIA-Linux-x86_64-{VERSION}.run"
CARD = "0000:41:00.0"
UUID = "GPU-5ac8a1a4-0000-0000-0000-000000000041"
COMPAT = "/usr/local/cuda/compat"
SEEN = f"GPU 0: NVIDIA RTX A6000 (UUID: {UUID})"

HOST = HostFacts(
    driver_version=VERSION,
    gpus=(NvidiaGpu(CARD, 0, "RTX A6000", UUID),),
    containers=(Container(129, running=True), Container(130, running=False, file="/etc/pve/lxc/130.conf")),
)
DESIRED = UserspaceDesired(version=VERSION, vmid=129, runfile=RUNFILE, sha256=SUM)
ROOMY = UserspaceState(distribution="ubuntu", free_mb=9000, memory_mb=32000, codecs=(60,), runfile_sha256=SUM)


def libraries(version: str, folder: str = LIBRARY_FOLDER) -> tuple[str, ...]:
    names = ("libcuda", "libcudadebugger", "libnvidia-ml", "libnvidia-ptxjitcompiler", "libnvcuvid")
    return tuple(f"{folder}/{name}.so.{version}" for name in names)


def links(version: str, folder: str = LIBRARY_FOLDER) -> dict[str, str]:
    return {
        f"{folder}/libcuda.so.1": f"{folder}/libcuda.so.{version}",
        f"{folder}/libnvidia-ml.so.1": f"{folder}/libnvidia-ml.so.{version}",
    }


def texts(source: str = "runfile") -> dict[str, str | None]:
    pinned = VERSION if source == "apt" else None
    return {apt.PREFERENCES: apt.preferences(pinned), apt.UNATTENDED: apt.unattended_blacklist()}


def settled(**changes: Any) -> UserspaceState:
    done = replace(
        ROOMY,
        libraries=libraries(VERSION),
        resolved=links(VERSION),
        uninstaller=True,
        texts=texts(),
        probe=Probe(SEEN, nvml_ok=True, cuda=0),
    )
    return replace(done, **changes)


def rules(made: UserspacePlan) -> list[str]:
    return [refusal.rule for refusal in made.refusals]


def actions(made: UserspacePlan) -> list[str]:
    return [step.action for step in made.steps]


# -- the exact match test ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.580.126.09", "580.126.09"),
        ("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.178", "580.178"),
        ("libnvidia-ptxjitcompiler.so.570.148.08", "570.148.08"),
        ("libcuda.so.1", ""),
        ("libcuda.so", ""),
        ("libcudart.so.13.0.96", ""),
        ("libnvidia-egl-wayland.so.1.1.19", ""),
        ("libnvidia-container.so.1.17.8", ""),
    ],
)
def test_a_library_of_the_driver_tells_its_version(path: str, version: str) -> None:
    assert library_version(path) == version


def test_the_loaders_cache_is_read_for_this_architecture() -> None:
    text = (
        "3 libs found in cache `/etc/ld.so.cache'\n"
        "\tlibcuda.so.1 (libc6,x86-64) => /usr/local/cuda/compat/libcuda.so.1\n"
        "\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1\n"
        "\tlibcuda.so.1 (libc6) => /usr/lib/i386-linux-gnu/libcuda.so.1\n"
    )
    assert loader_cache(text) == {
        "libcuda.so.1": ["/usr/local/cuda/compat/libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"]
    }


def test_libraries_of_exactly_this_version_fit() -> None:
    assert settled().fits(VERSION)
    assert mismatches(settled(), VERSION) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"resolved": {}}, "the loader knows no libcuda.so.1"),
        ({"resolved": links(OTHER)}, f"libcuda.so.{OTHER}"),
        ({"resolved": {**links(VERSION), f"{LIBRARY_FOLDER}/libcuda.so.1": ""}}, "leads to nothing"),
        ({"libraries": (*libraries(VERSION), *libraries("580.178"))}, "other versions are there"),
        (
            {"resolved": {**links(VERSION), f"{COMPAT}/libcuda.so.1": f"{COMPAT}/libcuda.so.590.48.01"}},
            "/usr/local/cuda/compat/libcuda.so.1 leads to",
        ),
    ],
)
def test_anything_else_does_not_fit_and_is_told(changes: dict[str, Any], told: str) -> None:
    """Rows 13 to 15: a point release apart, userspace upgraded and the host not, a second version beside."""
    state = settled(**changes)
    assert not state.fits(VERSION)
    assert told in "; ".join(mismatches(state, VERSION))


VERSIONS = st.builds("{}.{}.{:02d}".format, st.integers(535, 600), st.integers(1, 300), st.integers(0, 30))


@settings(deadline=None)
@given(VERSIONS, VERSIONS)
def test_a_version_fits_itself_and_no_other(one: str, other: str) -> None:
    state = UserspaceState(libraries=libraries(one), resolved=links(one))
    assert state.fits(other) is (one == other)


# -- installation ------------------------------------------------------------------------------------------------------


def test_an_empty_container_gets_the_installer_without_modules() -> None:
    """Row 12: canonical/lxd#5415, the installer must not look at the host's modules."""
    made = plan(HOST, ROOMY, DESIRED)
    assert not made.refused
    step = next(s for s in made.steps if s.action == "runfile")
    assert step.target == f"/var/tmp/NVIDIA-Linux-x86_64-{VERSION}.run"
    assert step.detail["source"] == RUNFILE
    argv = step.detail["argv"]
    assert set(argv) >= {"-s", "--no-kernel-modules", "--no-dkms", "-z", "--no-systemd", "--no-rebuild-initramfs"}
    assert "--dkms" not in argv
    assert made.wants_runfile


def test_on_the_machine_itself_nothing_is_pushed() -> None:
    made = plan(HOST, ROOMY, replace(DESIRED, vmid=None))
    assert next(s for s in made.steps if s.action == "runfile").target == RUNFILE


def test_a_container_as_desired_has_an_empty_plan() -> None:
    made = plan(HOST, settled(), DESIRED)
    assert made.as_dict() == {"steps": [], "refusals": [], "notes": [], "wants_runfile": False}
    assert plan(HOST, settled(runfile_sha256=None, free_mb=0, memory_mb=0), DESIRED).steps == []


def test_a_point_release_apart_is_installed_over() -> None:
    """The installer removes what an earlier one installed."""
    made = plan(HOST, settled(libraries=libraries(OTHER), resolved=links(OTHER)), DESIRED)
    assert not made.refused
    assert actions(made) == ["runfile"]


@pytest.mark.parametrize(("changes", "rule"), [({"free_mb": 1200}, "no-space"), ({"memory_mb": 1024}, "no-memory")])
def test_too_little_room_is_refused_before_the_installer_runs(changes: dict[str, int], rule: str) -> None:
    assert rules(plan(HOST, replace(ROOMY, **changes), DESIRED)) == [rule]


def test_two_gibibytes_are_enough_memory() -> None:
    assert not plan(HOST, replace(ROOMY, memory_mb=2014, free_mb=1500), DESIRED).refused


def test_libraries_that_nobody_installed_are_refused_or_removed() -> None:
    state = replace(ROOMY, libraries=libraries("570.148.08"), resolved=links("570.148.08"))
    made = plan(HOST, state, DESIRED)
    assert rules(made) == ["foreign-version"]
    assert "570.148.08" in made.refusals[0].what
    allowed = plan(HOST, state, replace(DESIRED, remove_foreign=True))
    assert not allowed.refused
    assert actions(allowed).index("remove-libraries") < actions(allowed).index("runfile")
    paths = next(s for s in allowed.steps if s.action == "remove-libraries").detail["paths"]
    assert sorted(paths) == sorted(state.libraries)


def test_packages_are_not_overwritten_by_the_installer() -> None:
    packages = {"libnvidia-compute-570": "570.148.08-0ubuntu1"}
    state = replace(ROOMY, packages=packages, libraries=libraries("570.148.08"), resolved=links("570.148.08"))
    state = replace(state, owners=dict.fromkeys(state.libraries, "libnvidia-compute-570"))
    made = plan(HOST, state, DESIRED)
    assert rules(made) == ["packaged-driver"]
    assert "libnvidia-compute-570 570.148.08-0ubuntu1" in made.refusals[0].what
    allowed = plan(HOST, state, replace(DESIRED, remove_foreign=True))
    assert not allowed.refused
    assert actions(allowed).index("apt-remove") < actions(allowed).index("runfile")
    assert "remove-libraries" not in actions(allowed)


def test_another_version_on_the_host_is_refused() -> None:
    """Row 15: zzzhouuu/truenas-nvidia-drivers#19."""
    host = replace(HOST, driver_version="580.173.02")
    for state in (ROOMY, settled()):
        assert rules(plan(host, state, DESIRED)) == ["host-driver-differs"]


def test_looking_ahead_of_the_hosts_upgrade_shows_the_plan() -> None:
    host = replace(HOST, driver_version="580.65.06")
    made = plan(host, replace(ROOMY, runfile_sha256=None), DESIRED, ahead=True)
    assert not made.refused
    assert "runfile" in actions(made)
    assert "580.65.06" in made.notes[0]


def test_a_host_without_a_loaded_driver_yet_is_fine() -> None:
    assert plan(replace(HOST, driver_version="", gpus=()), settled(probe=None), DESIRED).steps == []


def test_the_installer_is_checked_like_the_hosts() -> None:
    assert rules(plan(HOST, replace(ROOMY, runfile_sha256=None), DESIRED)) == ["no-runfile"]
    assert rules(plan(HOST, replace(ROOMY, runfile_sha256="0" * 64), DESIRED)) == ["runfile-checksum"]


@pytest.mark.parametrize("codecs", [(), (57,)])
def test_ffmpeg_is_installed_where_torchcodec_would_not_find_it(codecs: tuple[int, ...]) -> None:
    made = plan(HOST, settled(codecs=codecs), DESIRED)
    assert [s.detail.get("packages") for s in made.steps] == [{"ffmpeg": ""}]
    assert plan(HOST, settled(codecs=codecs), replace(DESIRED, ffmpeg=False)).steps == []


@pytest.mark.parametrize("desired", [DESIRED, replace(DESIRED, vmid=None)])
def test_a_running_container_and_the_machine_itself_can_be_worked_on(desired: UserspaceDesired) -> None:
    assert unreachable(HOST, desired) is None


@pytest.mark.parametrize(("vmid", "rule"), [(130, "container-stopped"), (131, "no-such-container")])
def test_a_container_that_is_off_or_not_there_is_refused_and_on_the_way_back_only_told(vmid: int, rule: str) -> None:
    told = unreachable(HOST, replace(DESIRED, vmid=vmid))
    assert told is not None
    assert rules(told) == [rule]
    gone = unreachable(HOST, replace(DESIRED, vmid=vmid, state="absent"))
    assert gone is not None
    assert (gone.refusals, gone.steps, len(gone.notes)) == ([], [], 1)


def test_a_container_that_waits_for_its_restart_gets_its_libraries_and_a_note() -> None:
    """Its cards cannot be asked yet, which is no reason to fail."""
    waits = "/dev/nvidia0 is not inside yet"
    first = plan(HOST, replace(ROOMY, waits=waits), DESIRED)
    assert not first.refused
    assert "runfile" in actions(first)
    done = plan(HOST, settled(waits=waits, probe=None), DESIRED)
    assert (done.steps, done.refusals) == ([], [])
    for made in (first, done, plan(HOST, settled(waits=waits, probe=None), replace(DESIRED, state="verified"))):
        assert [note for note in made.notes if waits in note and "`pct reboot 129`" in note] == made.notes
        assert len(made.notes) == 1


# -- apt ---------------------------------------------------------------------------------------------------------------

BY_APT = replace(DESIRED, source="apt")
NAMES = apt.library_packages("ubuntu", VERSION)
EXACT = dict.fromkeys(NAMES, f"{VERSION}-1ubuntu1")


def test_exact_packages_are_installed_and_held() -> None:
    state = replace(ROOMY, available=dict.fromkeys(NAMES, ("580.173.02-1ubuntu1", f"{VERSION}-1ubuntu1")))
    made = plan(HOST, state, BY_APT)
    assert not made.refused
    assert next(s for s in made.steps if s.action == "apt-install").detail["packages"] == EXACT
    assert next(s for s in made.steps if s.action == "apt-hold").detail["packages"] == sorted(NAMES)
    assert actions(made)[0] == "write"
    assert not made.wants_runfile


def test_a_dropped_version_is_refused_with_what_is_there() -> None:
    made = plan(HOST, replace(ROOMY, available=dict.fromkeys(NAMES, ("580.173.02-1ubuntu1",))), BY_APT)
    assert set(rules(made)) == {"no-exact-version"}
    assert "580.173.02-1ubuntu1" in made.refusal_text()


def test_a_container_by_apt_as_desired_has_an_empty_plan() -> None:
    state = settled(uninstaller=False, packages=EXACT, held=NAMES, texts=texts("apt"))
    assert plan(HOST, state, BY_APT).steps == []


def test_a_package_moved_by_an_upgrade_is_brought_back() -> None:
    """Row 16: lyulyul/shine-cluster#30."""
    moved = {**EXACT, NAMES[0]: "580.173.02-1ubuntu1"}
    state = settled(
        uninstaller=False,
        packages=moved,
        held=NAMES,
        texts=texts("apt"),
        available=dict.fromkeys(NAMES, (f"{VERSION}-1ubuntu1",)),
        libraries=libraries("580.173.02"),
        resolved=links("580.173.02"),
        owners=dict.fromkeys(libraries("580.173.02"), NAMES[0]),
    )
    made = plan(HOST, state, BY_APT)
    assert not made.refused
    assert actions(made) == ["apt-install"]


def test_a_foreign_package_beside_is_refused_or_purged() -> None:
    packages = {**EXACT, "libnvidia-compute-535": "580.178.04-0ubuntu1"}  # a transitional package of another branch
    state = settled(uninstaller=False, packages=packages, held=(*NAMES, "libnvidia-compute-535"), texts=texts("apt"))
    assert rules(plan(HOST, state, BY_APT)) == ["foreign-version"]
    allowed = plan(HOST, state, replace(BY_APT, remove_foreign=True))
    assert not allowed.refused
    assert allowed.steps[0].detail["packages"] == ["libnvidia-compute-535"]


COMPATIBILITY: dict[str, Any] = {
    "resolved": {**links(VERSION), f"{COMPAT}/libcuda.so.1": f"{COMPAT}/libcuda.so.590.48.01"},
    "libraries": (*libraries(VERSION), f"{COMPAT}/libcuda.so.590.48.01"),
    "owners": {f"{COMPAT}/libcuda.so.590.48.01": "cuda-compat-13-1"},
}


@pytest.mark.parametrize("source", ["runfile", "apt"])
def test_cudas_compatibility_library_is_refused_or_purged(source: str) -> None:
    """CUDA error 804: it is found before the driver's own library."""
    packaged: dict[str, Any] = {"uninstaller": False, "packages": EXACT, "held": NAMES} if source == "apt" else {}
    state = settled(texts=texts(source), **packaged, **COMPATIBILITY)
    desired = replace(DESIRED, source=source)
    made = plan(HOST, state, desired)
    assert rules(made) == ["foreign-version"]
    assert "cuda-compat-13-1" in made.refusals[0].what
    allowed = plan(HOST, state, replace(desired, remove_foreign=True))
    assert not allowed.refused
    assert [(s.action, s.detail["packages"]) for s in allowed.steps] == [("apt-remove", ["cuda-compat-13-1"])]


def test_a_second_version_beside_the_right_one_needs_no_installer() -> None:
    state = settled(libraries=(*libraries(VERSION), f"{LIBRARY_FOLDER}/libcuda.so.{OTHER}"))
    assert rules(plan(HOST, state, DESIRED)) == ["foreign-version"]
    made = plan(HOST, state, replace(DESIRED, remove_foreign=True))
    assert [(s.action, s.detail["paths"]) for s in made.steps] == [
        ("remove-libraries", [f"{LIBRARY_FOLDER}/libcuda.so.{OTHER}"])
    ]
    assert not made.wants_runfile


def test_packages_of_the_right_version_with_a_broken_link_are_explained() -> None:
    state = settled(uninstaller=False, packages=EXACT, held=NAMES, texts=texts("apt"), resolved={})
    made = plan(HOST, state, BY_APT)
    assert rules(made) == ["libraries-do-not-fit"]
    assert "the loader knows no libcuda.so.1" in made.refusals[0].what


def test_packages_are_not_laid_over_a_run_installation() -> None:
    state = replace(ROOMY, uninstaller=True, available=dict.fromkeys(NAMES, (f"{VERSION}-1ubuntu1",)))
    assert "runfile-driver" in rules(plan(HOST, state, BY_APT))


def test_an_unknown_distribution_needs_the_packages_named() -> None:
    assert rules(plan(HOST, replace(ROOMY, distribution="alpine"), BY_APT)) == ["unknown-distribution"]


# -- somebody else's machine -------------------------------------------------------------------------------------------

VERIFY = replace(DESIRED, state="verified", vmid=None, minimum="580.65.06")


def test_a_rented_node_fits_its_own_driver() -> None:
    host = replace(HOST, driver_version="590.48.01", gpus=())
    state = UserspaceState(libraries=libraries("590.48.01"), resolved=links("590.48.01"), codecs=(60,))
    made = plan(host, state, VERIFY)
    assert not made.refused
    assert made.steps == []


@pytest.mark.parametrize(
    ("loaded", "state", "rule"),
    [
        ("", settled(), "no-driver"),
        ("570.148.08", settled(libraries=libraries("570.148.08"), resolved=links("570.148.08")), "driver-too-old"),
        ("590.48.01", settled(), "libraries-do-not-fit"),
    ],
)
def test_a_rented_node_that_does_not_fit_is_refused(loaded: str, state: UserspaceState, rule: str) -> None:
    assert rule in rules(plan(replace(HOST, driver_version=loaded), state, VERIFY))


def test_missing_codecs_of_a_rented_node_are_noted_and_not_installed() -> None:
    made = plan(HOST, settled(codecs=()), VERIFY)
    assert made.steps == []
    assert "torchcodec" in made.notes[0]


# -- what NVML and CUDA say --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch", "version-mismatch"),
        ("NVRM: API mismatch: the client 'python3' (pid 7)\nhas the version 570.148.06", "version-mismatch"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "driver-not-loaded"),
        ("Failed to initialize NVML: Driver Not Loaded", "driver-not-loaded"),
        ("No devices were found", "no-devices"),
        ("Failed to initialize NVML: Insufficient Permissions", "not-permitted"),
        ("Failed to initialize NVML: Unknown Error", "nvml-unknown"),
        ("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.", "no-userspace"),
        ("nvidia-smi: command not found", "no-userspace"),
    ],
)
def test_known_messages_of_nvml_are_explained(text: str, name: str) -> None:
    found = explain(text)
    assert found is not None
    assert found.name == name
    assert found.fix


def test_what_is_fine_is_not_explained() -> None:
    assert explain(SEEN) is None
    assert explain_cuda(0) is None


@pytest.mark.parametrize("code", [100, 803, 804, 999, 712])
def test_every_result_of_cuda_becomes_a_sentence(code: int) -> None:
    """Rows 7, 9, 10 and 27 show themselves as 999, row 22 as 100, rows 13 to 15 as 803."""
    found = explain_cuda(code)
    assert found is not None
    assert found.name == f"cuda-{code}"
    assert found.meaning
    assert found.fix


def test_the_tables_have_no_name_twice() -> None:
    names = [d.name for _, d in MESSAGES] + [d.name for d in CUDA_ERRORS.values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("probe", "expected"),
    [
        (Probe("Failed to initialize NVML: Unknown Error", nvml_ok=False, cuda=999), ["nvml-unknown", "cuda-999"]),
        (Probe("nvidia-smi crashed", nvml_ok=False, cuda=None), ["nvml-error"]),
        (Probe(SEEN, nvml_ok=True, cuda=100), ["cuda-100"]),
        (Probe(SEEN, nvml_ok=True, cuda=None), []),
    ],
)
def test_a_fitting_container_that_does_not_work_is_refused_with_the_meaning(probe: Probe, expected: list[str]) -> None:
    made = plan(HOST, settled(probe=probe), DESIRED)
    assert rules(made) == expected
    assert all(refusal.where == "container 129" for refusal in made.refusals)


def test_the_cards_seen_must_be_the_cards_given() -> None:
    """Row 22: index, minor and PCI address are three different things."""
    given_card = replace(DESIRED, addresses=(CARD,))
    assert not plan(HOST, settled(), given_card).refused
    other = Probe(SEEN.replace("0041", "0042"), nvml_ok=True, cuda=0)
    made = plan(HOST, settled(probe=other), given_card)
    assert rules(made) == ["wrong-cards"]
    assert UUID in made.refusals[0].what
    assert not plan(HOST, settled(probe=other), DESIRED).refused


def test_a_probe_without_a_loaded_driver_tells_nothing() -> None:
    broken = Probe("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", False, 100)
    assert not plan(replace(HOST, driver_version=""), settled(probe=broken), DESIRED).refused


# -- the way back ------------------------------------------------------------------------------------------------------

GONE = replace(DESIRED, state="absent")


def test_reset_removes_what_was_installed() -> None:
    made = plan(HOST, settled(), GONE)
    assert actions(made) == ["uninstall", "remove", "remove"]
    by_apt = plan(HOST, settled(uninstaller=False, packages=EXACT, held=(*NAMES, "vim"), texts=texts("apt")), GONE)
    assert actions(by_apt)[:2] == ["apt-unhold", "apt-remove"]
    assert by_apt.steps[0].detail["packages"] == sorted(NAMES)


def test_reset_of_an_empty_container_does_nothing() -> None:
    assert plan(HOST, ROOMY, GONE).steps == []
