"""The node: GPUs, driver, peer-to-peer, shared memory, limits, libraries."""

from __future__ import annotations

from collections.abc import Iterator

from drafthouse.serve.facts import Facts, HostFacts
from drafthouse.serve.findings import Finding, error, not_checked, warning
from drafthouse.serve.profile import Profile, Sglang
from drafthouse.serve.versions import before, release, required_driver

GIB = 1024**3
_NVIDIA_SMI = "run the check on the node, where nvidia-smi is"
# FFmpeg 4 to 8; torchcodec tries its libraries for each of them.
_LIBAVUTIL = range(56, 61)
_P2P = "SGLang 0.5.23, custom all-reduce; NCCL environment variables"


def check(profile: Profile, facts: Facts) -> Iterator[Finding]:
    """Findings about the node."""
    host = facts.host
    if profile.engine.device == "cuda":
        yield from _gpus(profile, host)
        yield from _driver(profile, host)
        if profile.world_size > 1:
            yield from _links(profile, host)
            yield from _shared_memory(profile, host)
        yield from _compiler(profile, host)
    if isinstance(profile.engine, Sglang):
        yield from _libraries(facts)


def _gpus(profile: Profile, host: HostFacts) -> Iterator[Finding]:
    if host.gpus is None:
        yield not_checked("the GPUs: number, model, free memory", _NVIDIA_SMI)
        return
    wanted = profile.world_size
    if len(host.gpus) < wanted:
        yield error(
            "gpu-count",
            f"the profile occupies {wanted} GPUs, this node has {len(host.gpus)}",
            "choose another node, or lower tensor_parallel and pipeline_parallel",
            "preflight",
        )
    used = host.gpus[:wanted]
    if len({gpu.name for gpu in used}) > 1:
        yield error(
            "gpu-mixed",
            f"the GPUs differ ({', '.join(sorted({gpu.name for gpu in used}))}): the smaller one sets the memory and"
            " the slower one the speed",
            "choose equal GPUs with CUDA_VISIBLE_DEVICES",
            "preflight",
        )
    for number, gpu in enumerate(used):
        if gpu.memory_mib and gpu.free_mib is not None and gpu.free_mib < 0.95 * gpu.memory_mib:
            yield warning(
                "gpu-busy",
                f"GPU {number} has {gpu.free_mib} of {gpu.memory_mib} MiB free: somebody uses it",
                "stop what runs there (nvidia-smi names it), or lower the memory fraction",
                "preflight",
            )


def _driver(profile: Profile, host: HostFacts) -> Iterator[Finding]:
    engine = profile.engine
    needed = required_driver(engine.name, engine.version)
    if host.driver is None:
        yield not_checked("the NVIDIA driver", _NVIDIA_SMI)
    elif needed is None:
        yield not_checked(f"the driver that {engine.name} {engine.version} needs", "see its release notes")
    elif (release(host.driver) or (0,))[0] < needed:
        yield error(
            "driver-too-old",
            f"driver {host.driver} cannot run {engine.name} {engine.version}, whose CUDA needs {needed} or newer",
            f"install a driver of branch {needed}"
            + (
                ", or SGLang 0.5.19, the last release with CUDA 12" if needed == 580 and engine.name == "sglang" else ""
            ),
            "CUDA 13 release notes; SGLang documentation (CUDA 13 only since 0.5.20)",
        )


def _links(profile: Profile, host: HostFacts) -> Iterator[Finding]:
    engine = profile.engine
    nccl_off = profile.environment.get("NCCL_P2P_DISABLE") == "1"
    if host.p2p is None:
        yield not_checked("whether the GPUs can read each other's memory (P2P)", _NVIDIA_SMI)
    elif not host.p2p and (engine.custom_all_reduce or not nccl_off):
        yield error(
            "p2p-broken",
            "the GPUs cannot read each other's memory (IOMMU or ACS), but the profile would try: hangs or wrong sums",
            "set engine.custom_all_reduce: false and environment NCCL_P2P_DISABLE: '1', or turn ACS off",
            _P2P,
        )
    nvlink = host.nvlink if host.nvlink is not None else profile.hardware.nvlink
    if not nvlink and engine.custom_all_reduce:
        yield warning(
            "custom-all-reduce-pcie",
            "without NVLink a custom all-reduce is used only where a probe passes, so two equal nodes may differ",
            "set engine.custom_all_reduce: false",
            _P2P,
        )


def _shared_memory(profile: Profile, host: HostFacts) -> Iterator[Finding]:
    container = profile.container
    if container is not None and not container.ipc_host:
        if (container.shm_gib or 0) < 1:
            yield error(
                "shm-container",
                "a container has 64 MiB of /dev/shm unless it is told otherwise: ranks cannot talk to each other",
                "set container.ipc_host: true, or container.shm_gib",
                "SGLang compose.yaml (ipc: host)",
            )
        return
    if host.shm_bytes is None:
        yield not_checked("the size of /dev/shm", "run the check where the server will run")
    elif host.shm_bytes < GIB:
        yield error(
            "shm-small",
            f"/dev/shm holds {host.shm_bytes / 1024**2:.0f} MiB, too little for {profile.world_size} ranks",
            "run the container with --ipc host or --shm-size 16g, or remount /dev/shm larger",
            "SGLang compose.yaml (ipc: host)",
        )
    if host.memlock_bytes is None:
        yield not_checked("the limit of locked memory", "run the check where the server will run")
    elif 0 <= host.memlock_bytes < GIB and (container is None or not container.memlock_unlimited):
        yield warning(
            "memlock-low",
            f"only {host.memlock_bytes / 1024:.0f} KiB may be locked, and NCCL registers its buffers",
            "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity, docker: --ulimit memlock=-1)",
            "SGLang compose.yaml (memlock -1)",
        )


def _compiler(profile: Profile, host: HostFacts) -> Iterator[Finding]:
    if not isinstance(profile.engine, Sglang) or before(profile.engine.version, "0.5.20"):
        return
    if host.nvcc is None:
        yield not_checked("the CUDA compiler that kernels are built with at start", "run the check inside the image")
    elif release(host.nvcc)[:1] != (13,):
        yield error(
            "nvcc-mismatch",
            f"nvcc {host.nvcc} is not of CUDA 13: kernels that are built at start fail, and graph capture with them",
            "use an image with the CUDA 13 development toolkit",
            "sgl-project/sglang#25487",
        )


def _libraries(facts: Facts) -> Iterator[Finding]:
    host, codec = facts.host, facts.engine.torchcodec
    if host.glibc is None:
        yield not_checked("glibc", "run the check where the server will run")
    elif before(host.glibc, "2.34"):
        yield error(
            "glibc-too-old",
            f"SGLang's wheels need glibc 2.34, this system has {host.glibc}",
            "use Ubuntu 22.04, Debian 12 or newer, or the image",
            "sglang 0.5.23 wheel tag manylinux_2_34",
        )
    if codec == "ok":
        return
    if codec is not None and codec != "absent":
        yield error(
            "torchcodec-import",
            f"torchcodec cannot be imported ({codec}), and SGLang catches only some of these errors",
            "install FFmpeg 4 to 8 (apt install ffmpeg) and the torchcodec of the release's torch",
            "sgl-project/sglang#26122, PR #14679; aws/deep-learning-containers#6440",
        )
    elif host.libavutil is None:
        yield not_checked("FFmpeg's libraries (libavutil)", "run the check where the server will run")
    elif not any(major in _LIBAVUTIL for major in host.libavutil):
        found = ", ".join(map(str, host.libavutil)) or "none"
        yield error(
            "ffmpeg-missing",
            f"no libavutil of FFmpeg 4 to 8 is installed (found: {found}): 'libavutil.so… cannot open shared object'",
            "apt install ffmpeg; slim runtime images lack it",
            "sgl-project/sglang#26122, PR #14679",
        )
