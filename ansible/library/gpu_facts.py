#!/usr/bin/python
"""Ansible module `gpu_facts`: reads a GPU host and judges it; the logic is in module_utils/gpu_host/preflight.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_facts
short_description: Who drives and who holds every GPU of a host, and whether that is what the inventory says
description:
  - Reads sysfs, C(/proc), C(/etc/pve) and C(/lib/modules); runs C(dpkg-query), C(dkms status) and a C(modinfo) for each
    kernel, and C(mokutil) where Secure Boot is on. Changes nothing, in check mode and out of it.
  - With I(kind), fails where the machine is not what the inventory says, with all reasons at once.
options:
  kind:
    description: What the machine is to be; empty reads the facts and judges nothing.
    type: str
    choices: ["", proxmox, container, rented, storage]
    default: ""
  gpus:
    description: Every NVIDIA card of a Proxmox host.
    type: list
    elements: dict
    default: []
    suboptions:
      address:
        description: PCI address of the card's display function.
        type: str
        required: true
      id:
        description: Vendor and device that must be found there.
        type: str
        required: true
      model:
        description: Name of the model, compared with the driver's once it has the card.
        type: str
        default: ""
      owner:
        description: Who uses the card.
        type: str
        choices: [host, vm]
        required: true
  addresses:
    description: Cards that this container has.
    type: list
    elements: str
    default: []
  gpu_count:
    description: How many cards this rented node has; 0 does not ask.
    type: int
    default: 0
  containers:
    description: Containers of this Proxmox host that get cards, number to PCI addresses.
    type: dict
    default: {}
  driver_version:
    description: Driver version for hosts and containers.
    type: str
    default: ""
  driver_minimum:
    description: The oldest version that will do where the driver is somebody else's; I(driver_version) when empty.
    type: str
    default: ""
  kernels:
    description: Kernel ranges on top of the table, driver version or branch to C(min), C(max) and C(source).
    type: dict
    default: {}
  pin_kernel:
    description: Whether a kernel may be pinned, so that an unfit running one is no reason to stop.
    type: bool
    default: false
author: drafthouse
"""

EXAMPLES = r"""
- name: Read the GPUs of this host
  gpu_facts:
  register: found

- name: Refuse a host that is not as declared
  gpu_facts:
    kind: proxmox
    gpus: "{{ gpu_host_gpus }}"
    driver_version: "580.126.09"
"""

RETURN = r"""
gpu_host:
  description: >-
    The snapshot, C(HostFacts) of module_utils/gpu_host/facts.py as JSON types. Nothing is put among Ansible's own
    facts: register the result.
  type: dict
  returned: when the machine was not refused
  contains:
    hostname: {description: Name of the machine., type: str}
    kernel: {description: Running kernel release., type: str}
    kernels: {description: Installed kernel releases., type: list, elements: str}
    headers: {description: Kernel releases with headers., type: list, elements: str}
    header_packages: {description: Installed packages with kernel headers., type: list, elements: str}
    pinned_kernel: {description: What C(proxmox-boot-tool kernel pin) holds., type: str}
    pve: {description: Version of pve-manager; empty where this is no Proxmox VE host., type: str}
    pve_container: {description: Version of pve-container., type: str}
    quorate: {description: Whether C(/etc/pve) takes writes; null where this is no Proxmox VE host., type: bool}
    secure_boot: {description: Whether the firmware enforces signatures; null when it cannot be told., type: bool}
    init: {description: Name of process 1., type: str}
    virtualization: {description: "What the machine runs in: C(none), C(kvm), C(lxc), C(docker), …", type: str}
    engine: {description: Version of the Docker Engine., type: str}
    toolkit: {description: Version of the NVIDIA container toolkit., type: str}
    cmdline: {description: Kernel command line., type: str}
    iommu: {description: Whether the kernel runs with an IOMMU., type: bool}
    functions:
      description: >-
        Every PCI function with C(address), C(class_code), C(vendor), C(device), C(subsystem), C(driver), C(override)
        (driver_override), C(group) (IOMMU group) and C(boot_vga).
      type: list
      elements: dict
    claims:
      description: >-
        Every VM entry that names a device, with C(vmid), C(key), C(section) (C(main), C(pending), C(snapshot NAME)),
        C(value), C(addresses) (functions here), C(mapping), C(running), C(onboot) and C(file).
      type: list
      elements: dict
    reserved: {description: PCI function to the VM that runs or starts with it., type: dict}
    containers:
      description: >-
        Every container with C(vmid), C(running), C(unprivileged), C(onboot), C(lock), C(file) and C(entries), its
        device lines with C(key), C(value), C(path) and C(section).
      type: list
      elements: dict
    driver_version: {description: Version of the loaded NVIDIA module., type: str}
    driver_kind: {description: "C(open) or C(proprietary), empty when none is loaded.", type: str}
    module_versions: {description: Kernel release to the version of its NVIDIA module on disk., type: dict}
    dkms: {description: "C(dkms status) as C(module), C(version), C(kernel), C(state).", type: list, elements: dict}
    gpus:
      description: >-
        Cards that the NVIDIA driver has, with C(address), C(minor) (null while not initialised), C(model), C(uuid).
      type: list
      elements: dict
    majors: {description: Character devices, name to major., type: dict}
    nodes:
      description: What stands at /dev/nvidia*, with C(path), C(kind), C(major), C(minor).
      type: list
      elements: dict
    firmware: {description: Driver versions whose firmware is on disk., type: list, elements: str}
    settings: {description: Boot files where an assignment can hide, path to text., type: dict}
    users: {description: PCI function to processes that have it open., type: dict}
    packages: {description: Installed NVIDIA packages, name to version., type: dict}
    modules: {description: "Loaded modules among nvidia*, nouveau, vfio*.", type: list, elements: str}
cards:
  description: A row for each NVIDIA card, with C(address), C(model), C(id), C(driver), C(group), C(owner), C(holders).
  type: list
  elements: dict
  returned: always
table:
  description: The same as aligned lines of text.
  type: list
  elements: str
  returned: always
plan:
  description: C(refusals) with C(rule), C(what), C(where), C(fix), and C(notes).
  type: dict
  returned: always
"""

from dataclasses import replace

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_host.driver_state import MOK_KEY
from ansible.module_utils.gpu_host.gather import gather
from ansible.module_utils.gpu_host.preflight import PreflightDesired, cards, judge, table
from ansible.module_utils.gpu_host.world import World

CARD = {
    "address": {"type": "str", "required": True},
    "id": {"type": "str", "required": True},
    "model": {"type": "str", "default": ""},
    "owner": {"type": "str", "choices": ["host", "vm"], "required": True},
}
ARGUMENTS = {
    "kind": {"type": "str", "choices": ["", "proxmox", "container", "rented", "storage"], "default": ""},
    "gpus": {"type": "list", "elements": "dict", "options": CARD, "default": []},
    "addresses": {"type": "list", "elements": "str", "default": []},
    "gpu_count": {"type": "int", "default": 0},
    "containers": {"type": "dict", "default": {}},
    "driver_version": {"type": "str", "default": ""},
    "driver_minimum": {"type": "str", "default": ""},
    "kernels": {"type": "dict", "default": {}},
    "pin_kernel": {"type": "bool", "default": False},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    world = World()
    try:
        desired = PreflightDesired.of(module.params)
    except ValueError as wrong:
        module.fail_json(msg=str(wrong))
    facts = gather(world)
    if facts.secure_boot:
        enrolled = "already enrolled" in world.run(["mokutil", "--test-key", MOK_KEY], 20).out
        desired = replace(desired, mok_enrolled=enrolled)
    found, rows = judge(facts, desired), cards(facts, desired)
    shown = {"changed": False, "plan": found.as_dict(), "cards": rows, "table": table(rows)}
    for note in found.notes:
        module.warn(note)
    if found.refused:
        # Without the facts: a failed task prints all that it returns, and the reasons would drown in them.
        module.fail_json(msg=found.refusal_text(), **shown)
    module.exit_json(gpu_host=facts.as_dict(), **shown)


if __name__ == "__main__":
    main()
