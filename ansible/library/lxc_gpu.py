#!/usr/bin/python
"""Module lxc_gpu: exactly these NVIDIA cards in a Proxmox container."""

from __future__ import annotations

DOCUMENTATION = r"""
module: lxc_gpu
short_description: Give a Proxmox container exactly these NVIDIA cards
description:
  - Runs on the Proxmox host. Cards are named by PCI address; their minors are read from the driver on every run.
  - Uses C(devN) keys through C(pct set) where Proxmox VE knows them, raw LXC keys otherwise.
  - Takes out entries of cards that the container no longer has, and leaves entries of other devices alone.
  - Looks into the running container, so that a change that waits for a restart is not mistaken for one that holds.
options:
  vmid:
    description: Number of the container.
    type: int
    required: true
  addresses:
    description: PCI addresses of its cards.
    type: list
    elements: str
    default: []
  mode:
    description: Access mode of the nodes inside; PVE would give 0660, which no service user can open.
    type: str
    default: "0666"
  gid:
    description: Group inside the container that owns the nodes; root when left out.
    type: int
  form:
    description: C(dev) for devN keys, C(raw) for LXC keys, C(auto) for what this Proxmox VE knows.
    type: str
    choices: [auto, dev, raw]
    default: auto
  restart:
    description: Whether a running container may be stopped and started for the change.
    type: bool
    default: false
  stop_timeout:
    description: How long its services may take to stop, in seconds; it is never stopped by force.
    type: int
    default: 120
  state:
    description: C(absent) takes every NVIDIA node from the container.
    type: str
    choices: [present, absent]
    default: present
  forecast:
    description: >-
      Whether check mode may forecast the minors of cards that no driver drives yet; off, they are refused as in a
      real run.
    type: bool
    default: true
attributes:
  check_mode:
    support: full
    details: Minors of cards that the driver does not drive yet are a forecast.
  diff_mode:
    support: full
author:
  - Drafthouse
"""

EXAMPLES = r"""
- name: Give container 129 both cards
  lxc_gpu:
    vmid: 129
    addresses: ["0000:41:00.0", "0000:42:00.0"]
    restart: true
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
from ansible.module_utils.gpu_host.container_nodes import look_inside
from ansible.module_utils.gpu_host.gather import gather
from ansible.module_utils.gpu_host.module import conclude
from ansible.module_utils.gpu_host.passthrough import PassthroughDesired, plan
from ansible.module_utils.gpu_host.passthrough_steps import HANDLERS
from ansible.module_utils.gpu_host.pci import normalise
from ansible.module_utils.gpu_host.steps import Plan
from ansible.module_utils.gpu_host.world import ContainerWorld, World


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "vmid": {"type": "int", "required": True},
            "addresses": {"type": "list", "elements": "str", "default": []},
            "mode": {"type": "str", "default": "0666"},
            "gid": {"type": "int"},
            "form": {"type": "str", "choices": ["auto", "dev", "raw"], "default": "auto"},
            "restart": {"type": "bool", "default": False},
            "stop_timeout": {"type": "int", "default": 120},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "forecast": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    world = World()
    wanted = dict(module.params)
    try:
        addresses = tuple(normalise(address) for address in wanted.pop("addresses"))
    except ValueError as wrong:
        module.fail_json(msg=f"lxc_gpu_addresses: {wrong}")
    desired = PassthroughDesired(
        addresses=addresses,
        stop_timeout_s=wanted.pop("stop_timeout"),
        predict=wanted.pop("forecast") and module.check_mode,
        **wanted,
    )

    def plan_of() -> Plan:
        facts = gather(world, builds=False)
        container = facts.container(desired.vmid)
        running = container is not None and container.running
        return plan(facts, desired, look_inside(ContainerWorld(world, desired.vmid)) if running else None)

    conclude(module, world, plan_of, HANDLERS)


if __name__ == "__main__":
    main()
