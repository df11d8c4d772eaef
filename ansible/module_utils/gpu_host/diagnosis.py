"""What NVML and CUDA say when driver, libraries and device nodes do not fit together, and what it means here.

Sources: CUDA driver API reference, CUresult; NVML API reference, nvmlReturn_t; the kernel module's NVRM messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Diagnosis:
    """A known error: its name, what it means, and what to do."""

    name: str
    meaning: str
    fix: str


#: By pattern in the output of a tool, most specific first.
MESSAGES: tuple[tuple[str, Diagnosis], ...] = (
    (
        r"Driver/library version mismatch|API mismatch",
        Diagnosis(
            "version-mismatch",
            "the libraries are of another version than the loaded kernel module",
            "bring both to nvidia_driver_version (site.yml for the host, then its containers); where the module is the "
            "old one, reboot the host",
        ),
    ),
    (
        r"couldn't communicate with the NVIDIA driver|Driver Not Loaded",
        Diagnosis(
            "driver-not-loaded",
            "the kernel module is not loaded, or /dev/nvidiactl is not there",
            "on the host: `systemctl restart drafthouse-nvidia-nodes`, then restart the container",
        ),
    ),
    (
        r"No devices were found",
        Diagnosis(
            "no-devices",
            "the driver answers and has no card that can be opened here",
            "check lxc_gpu_addresses and the devN entries of the container (`pct config`), and that vfio-pci does not "
            "hold the card",
        ),
    ),
    (
        r"Insufficient Permissions|Operation not permitted",
        Diagnosis(
            "not-permitted",
            "a device node is there and may not be opened",
            "set the mode of the container's devN entries to 0666, or their gid to a group of the service's user",
        ),
    ),
    (
        r"Failed to initialize NVML: Unknown Error",
        Diagnosis(
            "nvml-unknown",
            "the control group forbids a node that the container had when it started",
            "restart the container; device entries of the raw form must name majors that are valid after this boot",
        ),
    ),
    (
        r"libnvidia-ml\.so|command not found|executable file not found",
        Diagnosis("no-userspace", "the driver's libraries or tools are not installed here", "run nvidia_userspace"),
    ),
)

#: By CUresult of cuInit.
CUDA_ERRORS: dict[int, Diagnosis] = {
    100: Diagnosis(
        "cuda-100",
        "CUDA_ERROR_NO_DEVICE: CUDA sees no card",
        "check that /dev/nvidiaN of the card is a character device in here and that CUDA_VISIBLE_DEVICES does not hide "
        "it",
    ),
    222: Diagnosis(
        "cuda-222",
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the program was compiled for a newer CUDA than the driver",
        "use a newer driver, or a build for this driver's CUDA",
    ),
    802: Diagnosis(
        "cuda-802",
        "CUDA_ERROR_SYSTEM_NOT_READY: a fabric manager is missing on a machine with NVSwitch",
        "start nvidia-fabricmanager of the same version on the host",
    ),
    803: Diagnosis(
        "cuda-803",
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: libcuda and the kernel module are of different versions",
        "bring both to nvidia_driver_version; look for a second libcuda.so.1 (`ldconfig -p | grep libcuda`)",
    ),
    804: Diagnosis(
        "cuda-804",
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE: a CUDA compatibility libcuda is found before the driver's own",
        "take /usr/local/cuda/compat out of LD_LIBRARY_PATH and /etc/ld.so.conf.d, or purge cuda-compat-*",
    ),
    999: Diagnosis(
        "cuda-999",
        "CUDA_ERROR_UNKNOWN: as a rule /dev/nvidia-uvm is missing, stale, or of the major of an earlier boot",
        "on the host: `systemctl restart drafthouse-nvidia-nodes`, compare /proc/devices with the node's major, then "
        "restart the container",
    ),
}


def explain(text: str) -> Diagnosis | None:
    """The known error that a tool's output tells of."""
    return next((found for pattern, found in MESSAGES if re.search(pattern, text)), None)


def explain_cuda(code: int) -> Diagnosis | None:
    """The meaning of cuInit's result; None for success."""
    if code == 0:
        return None
    unknown = Diagnosis(
        f"cuda-{code}", f"cuInit ends with CUresult {code}", "look it up in the CUDA driver API reference"
    )
    return CUDA_ERRORS.get(code, unknown)
