#!/usr/bin/python
"""Ansible module `nvidia_driver`: plan, refuse or act; the logic is in module_utils/gpu_host/driver.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_driver
short_description: Exactly one NVIDIA driver on a GPU host, or a clear refusal
description:
  - Judges kernels, headers, Secure Boot and what is installed before the first write, installs the driver through
    DKMS from the C(.run) file or from exact apt versions, and proves the result by C(modinfo), C(dkms status), the
    firmware's folder and C(/proc/driver/nvidia/version).
  - Needs no GPU that is bound to the driver.
options:
  version:
    description: Driver version.
    type: str
    required: true
  state:
    description: C(verified) looks at a driver that belongs to somebody else and installs nothing.
    type: str
    choices: [present, absent, verified]
    default: present
  minimum:
    description: With C(verified), the oldest version that will do; I(version) when empty.
    type: str
    default: ""
  source:
    description: Where the driver comes from.
    type: str
    choices: [runfile, apt]
    default: runfile
  kind:
    description: Kernel modules.
    type: str
    choices: [open, proprietary]
    default: open
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
  files:
    description: Units and scripts of the role.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Where the file goes.
        type: str
        required: true
      text:
        description: The whole file.
        type: str
        required: true
      mode:
        description: Permissions, octal.
        type: str
        default: "0644"
      unit:
        description: Whether systemd reads it.
        type: bool
        default: false
  units:
    description: Units that start with the host.
    type: list
    elements: str
    default: []
  kernels:
    description: Kernel ranges on top of the table, driver version or branch to C(min), C(max) and C(source).
    type: dict
    default: {}
  pin_kernel:
    description: Whether a kernel may be pinned.
    type: bool
    default: false
  reboot:
    description: Whether the play may reboot this host, so that a driver in use may be replaced for the next boot.
    type: bool
    default: false
author: drafthouse
"""

EXAMPLES = r"""
- name: Install the driver
  nvidia_driver:
    version: "580.126.09"
    runfile: /var/cache/drafthouse/NVIDIA-Linux-x86_64-580.126.09.run
    sha256: 4cac53e48f8adff661d47c8788ed24059a248c9fd8098ceafd088a498986ec26
"""

RETURN = r"""
plan:
  description: C(steps), C(refusals), C(notes), C(reboot) (why the host must boot, or empty) and C(wants_runfile).
  type: dict
  returned: always
done:
  description: A sentence for each step taken.
  type: list
  elements: str
  returned: changed
"""

from dataclasses import replace

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_host import runfile
from ansible.module_utils.gpu_host.arguments import DRIVER
from ansible.module_utils.gpu_host.driver import plan
from ansible.module_utils.gpu_host.driver_state import DriverDesired, DriverPlan, ManagedFile, gather_state
from ansible.module_utils.gpu_host.driver_steps import HANDLERS
from ansible.module_utils.gpu_host.gather import gather
from ansible.module_utils.gpu_host.module import conclude
from ansible.module_utils.gpu_host.world import World

FILE = {
    "path": {"type": "str", "required": True},
    "text": {"type": "str", "required": True},
    "mode": {"type": "str", "default": "0644"},
    "unit": {"type": "bool", "default": False},
}
ARGUMENTS = {
    **DRIVER,
    "kind": {"type": "str", "choices": ["open", "proprietary"], "default": "open"},
    "files": {"type": "list", "elements": "dict", "default": [], "options": FILE},
    "units": {"type": "list", "elements": "str", "default": []},
    "kernels": {"type": "dict", "default": {}},
    "pin_kernel": {"type": "bool", "default": False},
    "reboot": {"type": "bool", "default": False},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    values = dict(module.params)
    files = tuple(ManagedFile(f["path"], f["text"], int(f["mode"], 8), f["unit"]) for f in values.pop("files"))
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    desired, world = DriverDesired(files=files, **values), World()

    def plan_of() -> DriverPlan:
        facts, state = gather(world), gather_state(world, desired)
        made = plan(facts, state, desired, runfile_coming=True)
        if made.wants_runfile and not module.check_mode:
            # Hundreds of megabytes are hashed only when they are about to run.
            state = replace(state, runfile_sha256=runfile.sha256_of(world, desired.runfile))
            made = plan(facts, state, desired)
        return made

    conclude(module, world, plan_of, HANDLERS)


if __name__ == "__main__":
    main()
