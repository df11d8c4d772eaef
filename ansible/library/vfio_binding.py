#!/usr/bin/python
"""Module vfio_binding: every NVIDIA card on the driver of its owner."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vfio_binding
short_description: Bind every NVIDIA card of a host to the driver of its owner
description:
  - Names cards by PCI address and checks them by id, because cards of different owners share ids.
  - Moves cards at runtime, in both directions, and writes the files that bind them again at boot.
  - Refuses before the first write, with all reasons, when a card is held by a virtual machine, in use, or not the
    card that was expected.
  - Takes out what keeps an old assignment alive (C(ids=) of vfio-pci, C(blacklist nvidia), C(install nvidia
    /bin/false), the kernel command line); the lines stay as comments for the way back.
options:
  gpus:
    description: Every NVIDIA card of the host.
    type: list
    elements: dict
    required: true
    suboptions:
      address:
        description: PCI address of the card's display function, such as C(0000:41:00.0).
        type: str
        required: true
      id:
        description: Vendor and device, such as C(10de:2230).
        type: str
        required: true
      owner:
        description: C(host) for the host's driver and its containers, C(vm) for virtual machines.
        type: str
        choices: [host, vm]
        required: true
      model:
        description: Name of the model, checked where the driver tells it.
        type: str
        default: ""
  host_driver:
    description: Kernel driver of the cards that belong to the host.
    type: str
    default: nvidia
  state:
    description: C(absent) gives every card back to vfio-pci and puts the boot files back as they were found.
    type: str
    choices: [present, absent]
    default: present
  containers:
    description: >-
      Numbers of the containers of the inventory, whose entries a later role brings in order. Another container that
      names a card that leaves is a reason to refuse.
    type: list
    elements: int
    default: []
  timeout:
    description: Bound on every wait for the kernel, in seconds.
    type: int
    default: 15
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author:
  - Drafthouse
"""

EXAMPLES = r"""
- name: Give one card to containers and one to virtual machines
  vfio_binding:
    gpus:
      - {address: "0000:41:00.0", id: "10de:2230", owner: host}
      - {address: "0000:81:00.0", id: "10de:2204", owner: vm}
"""

RETURN = r"""
plan:
  description: Steps, refusals and notes.
  type: dict
  returned: always
done:
  description: A sentence for every step that was taken.
  type: list
  elements: str
  returned: when steps were taken
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_host.binding import BindingDesired, GpuWant, plan
from ansible.module_utils.gpu_host.binding_steps import HANDLERS
from ansible.module_utils.gpu_host.gather import gather
from ansible.module_utils.gpu_host.module import conclude
from ansible.module_utils.gpu_host.pci import normalise
from ansible.module_utils.gpu_host.world import World


def main() -> None:
    gpu = {
        "address": {"type": "str", "required": True},
        "id": {"type": "str", "required": True},
        "owner": {"type": "str", "choices": ["host", "vm"], "required": True},
        "model": {"type": "str", "default": ""},
    }
    module = AnsibleModule(
        argument_spec={
            "gpus": {"type": "list", "elements": "dict", "required": True, "options": gpu},
            "host_driver": {"type": "str", "default": "nvidia"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "containers": {"type": "list", "elements": "int", "default": []},
            "timeout": {"type": "int", "default": 15},
        },
        supports_check_mode=True,
    )
    world = World()
    try:
        gpus = tuple(
            GpuWant(normalise(gpu["address"]), gpu["owner"], gpu["id"].lower(), gpu["model"])
            for gpu in module.params["gpus"]
        )
    except ValueError as wrong:
        module.fail_json(msg=f"gpu_host_gpus: {wrong}")
    desired = BindingDesired(
        gpus=gpus,
        host_driver=module.params["host_driver"],
        state=module.params["state"],
        driver_expected=not module.check_mode,
        containers=tuple(module.params["containers"]),
        timeout_s=module.params["timeout"],
    )
    conclude(module, world, lambda: plan(gather(world, builds=False), desired), HANDLERS)


if __name__ == "__main__":
    main()
