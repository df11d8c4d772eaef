"""Which kernel the driver is for: judged before anything is installed, pinned where that is allowed.

DKMS builds for every kernel with headers, now and in every later package update, so headers of a kernel on which the
driver does not build are as wrong as the kernel itself.
"""

from __future__ import annotations

import re

from .driver_state import MOK_KEY, DriverDesired, DriverPlan, DriverState
from .facts import HostFacts
from .kernels import KernelRange, fitting, order_of, unfit_headers_pattern, ways_out
from .steps import Refusal, Step


def judge_kernel(facts: HostFacts, desired: DriverDesired, known: KernelRange, made: DriverPlan) -> str:
    """Judge the running kernel and the next one to boot; returns the kernel that the driver is installed for."""
    candidates = fitting(known, facts.kernels)
    proxmox = bool(facts.pve)

    def refuse(rule: str, kernel: str, role: str) -> None:
        out = ways_out(desired.version, known, kernel, facts.kernels, proxmox)
        if proxmox and candidates:
            out += "; nvidia_driver_pin_kernel: true does the first"
        made.refusals.append(
            Refusal(
                rule,
                f"{role} {kernel} is not one that driver {desired.version} builds on ({known.text()}; {known.source})",
                "kernel",
                out,
            )
        )

    if not known.holds(facts.kernel):
        if facts.pinned_kernel in candidates:
            return facts.pinned_kernel
        if not (desired.pin_kernel and proxmox and candidates):
            refuse("kernel-unfit", facts.kernel, "the running kernel")
            return facts.kernel
        _pin(candidates[0], facts, f"the running {facts.kernel} does not fit driver {desired.version}", made)
        return candidates[0]
    following = facts.pinned_kernel or max((*facts.kernels, facts.kernel), key=order_of)
    if not known.holds(following):
        if desired.pin_kernel and proxmox:
            _pin(facts.kernel, facts, f"the next boot would be {following}, without a driver", made)
        else:
            refuse("next-kernel-unfit", following, "the kernel of the next boot")
    return facts.kernel


def _pin(kernel: str, facts: HostFacts, why: str, made: DriverPlan) -> None:
    back = ["proxmox-boot-tool", "kernel", *(["pin", facts.pinned_kernel] if facts.pinned_kernel else ["unpin"])]
    made.steps.append(Step("pin-kernel", kernel, why, {"undo": back}))


def judge_headers(facts: HostFacts, desired: DriverDesired, known: KernelRange, made: DriverPlan) -> None:
    """No headers of a kernel on which the build would fail: its next package update would end in dpkg's half-way."""
    unfit = _unfit_header_packages(facts, known)
    for kernel in facts.headers:
        packaged = any(kernel in name for name in unfit)
        if not known.holds(kernel) and not packaged:
            made.refusals.append(
                Refusal(
                    "headers-unfit",
                    f"headers of {kernel} are installed without a package, and driver {desired.version} builds on "
                    f"{known.text()} only",
                    f"/lib/modules/{kernel}/build",
                    "either remove that link, or set nvidia_driver_version to a driver for that kernel",
                )
            )
    if unfit:
        why = f"DKMS would try {desired.version} on these kernels and leave dpkg half-configured"
        made.steps.append(Step("apt-remove", "headers of unfit kernels", why, {"packages": unfit}))


def _unfit_header_packages(facts: HostFacts, known: KernelRange) -> list[str]:
    pattern = re.compile(unfit_headers_pattern(known))
    return sorted(name for name in facts.header_packages if pattern.search(name))


def judge_secure_boot(facts: HostFacts, state: DriverState, made: DriverPlan) -> None:
    if facts.secure_boot and not state.mok_enrolled:
        made.refusals.append(
            Refusal(
                "secure-boot",
                "Secure Boot is on and the key that DKMS signs with is not enrolled: the kernel would reject the "
                "module (`Key was rejected by service`)",
                MOK_KEY,
                f"either enrol it at the console: `dkms generate_mok` if {MOK_KEY} is missing, `mokutil --import "
                f"{MOK_KEY}`, reboot, choose Enroll MOK in the blue menu, run this again; or switch Secure Boot off in "
                "the firmware",
            )
        )


def kernels_to_serve(facts: HostFacts, known: KernelRange) -> list[str]:
    """Kernels that must have the module: the running one, and those whose headers let DKMS build for them."""
    return sorted({facts.kernel, *(k for k in facts.headers if known.holds(k))}, key=order_of)
