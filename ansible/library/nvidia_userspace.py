#!/usr/bin/python
"""Ansible module `nvidia_userspace`: plan, refuse or act; the logic is in module_utils/gpu_host/userspace.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_userspace
short_description: The driver's libraries in a container, exactly of the version of the host's module
description:
  - Runs on the Proxmox host and reaches a container through C(pct exec) and C(pct push); without I(vmid) it works on
    the machine itself.
  - Proves that C(libcuda.so.1) and C(libnvidia-ml.so.1) lead to files of the version of the kernel module, that no
    second version is beside them, that FFmpeg's libraries are there, and that NVML and CUDA answer.
options:
  version:
    description: Driver version, the host's.
    type: str
    required: true
  state:
    description: C(verified) looks and installs nothing.
    type: str
    choices: [present, absent, verified]
    default: present
  vmid:
    description: Number of the container; this machine itself when left out.
    type: int
  minimum:
    description: With C(verified), the oldest version that will do; I(version) when empty.
    type: str
    default: ""
  source:
    description: Where the libraries come from.
    type: str
    choices: [runfile, apt]
    default: runfile
  runfile:
    description: Path of the installer on the host. In check mode it may be absent.
    type: str
    default: ""
  sha256:
    description: Checksum of the installer.
    type: str
    default: ""
  packages:
    description: With C(apt), instead of the distribution's own set.
    type: list
    elements: str
    default: []
  ffmpeg:
    description: Whether FFmpeg's libraries are wanted.
    type: bool
    default: true
  remove_foreign:
    description: Whether libraries and packages of another version may be removed.
    type: bool
    default: false
  probe:
    description: Whether NVML and CUDA are asked.
    type: bool
    default: true
  addresses:
    description: Cards that must be seen, by PCI address.
    type: list
    elements: str
    default: []
author: drafthouse
"""

EXAMPLES = r"""
- name: Give container 129 the libraries of the driver
  nvidia_userspace:
    vmid: 129
    version: "580.126.09"
    runfile: /var/cache/drafthouse/NVIDIA-Linux-x86_64-580.126.09.run
    sha256: 4cac53e48f8adff661d47c8788ed24059a248c9fd8098ceafd088a498986ec26

- name: Check the libraries of a rented node
  nvidia_userspace:
    version: "580.126.09"
    minimum: "580.65.06"
    state: verified
"""

RETURN = r"""
plan:
  description: C(steps), C(refusals), C(notes) and C(wants_runfile).
  type: dict
  returned: always
done:
  description: A sentence for each step taken.
  type: list
  elements: str
  returned: changed
"""

from dataclasses import replace
from functools import partial

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_host import runfile
from ansible.module_utils.gpu_host.arguments import DRIVER
from ansible.module_utils.gpu_host.gather import gather
from ansible.module_utils.gpu_host.module import conclude
from ansible.module_utils.gpu_host.userspace import plan, unreachable
from ansible.module_utils.gpu_host.userspace_state import (
    UserspaceDesired,
    UserspacePlan,
    gather_state,
    why_waiting,
)
from ansible.module_utils.gpu_host.userspace_steps import HANDLERS
from ansible.module_utils.gpu_host.world import ContainerWorld, World

ARGUMENTS = {
    **DRIVER,
    "vmid": {"type": "int"},
    "ffmpeg": {"type": "bool", "default": True},
    "remove_foreign": {"type": "bool", "default": False},
    "probe": {"type": "bool", "default": True},
    "addresses": {"type": "list", "elements": "str", "default": []},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    desired = UserspaceDesired(**{k: tuple(v) if isinstance(v, list) else v for k, v in module.params.items()})
    host = World()
    world = host if desired.vmid is None else ContainerWorld(host, desired.vmid)

    def plan_of() -> UserspacePlan:
        facts = gather(host, builds=False)
        said = unreachable(facts, desired)
        if said is not None:
            return said
        state = gather_state(world, desired, facts.driver_version, partial(why_waiting, facts, desired))
        made = plan(facts, state, desired, ahead=True)
        if module.check_mode:
            return made
        if made.wants_runfile:
            # Hundreds of megabytes are hashed only when they are about to run.
            state = replace(state, runfile_sha256=runfile.sha256_of(host, desired.runfile))
        return plan(facts, state, desired)

    conclude(module, world, plan_of, HANDLERS)


if __name__ == "__main__":
    main()
