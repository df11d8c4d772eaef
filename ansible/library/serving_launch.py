#!/usr/bin/python
"""Ansible module: what serves a model on a host; the logic is in module_utils/gpu_host/serving.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_launch
short_description: One serving profile on a host, as a systemd unit or a container
description:
  - Starts what the action C(serving_plan) rendered, and ends what runs in its place.
  - A launch that is the same as the one that runs is left alone. Check mode shows the unit's difference.
options:
  profile:
    description: Name of the profile; needed unless I(state) is C(absent).
    type: str
    default: ""
  form:
    description: How it runs.
    type: str
    choices: [systemd, container]
    default: systemd
  unit:
    description: Text of the unit.
    type: str
    default: ""
  drop_in:
    description: Text of what the host adds to the unit.
    type: str
    default: ""
  argv:
    description: The C(docker run) command.
    type: list
    elements: str
    default: []
  image:
    description: The image of the container, which is there before what runs now is ended.
    type: str
    default: ""
  environment:
    description: Names and values of the environment file, as JSON; none when empty.
    type: str
    default: ""
  state:
    description:
      - C(proven) notes that what was started has passed its canary. C(former) goes back to what passed last, or to
        nothing.
    type: str
    choices: [present, absent, proven, former]
    default: present
author: drafthouse
"""

EXAMPLES = r"""
- name: Let nothing be served here
  serving_launch:
    state: absent
"""

RETURN = r"""
plan:
  description: C(steps), C(refusals), C(notes) and C(due) (what runs has not been proven here yet).
  type: dict
  returned: unless I(state) is C(proven)
done:
  description: A sentence for each step taken.
  type: list
  elements: str
  returned: changed
profile:
  description: What runs now; empty for nothing.
  type: str
  returned: unless I(state) is C(proven)
"""

import json

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_host.module import conclude
from ansible.module_utils.gpu_host.serving import (
    PROVEN_ENVIRONMENT,
    Launch,
    environment_text,
    gather_state,
    note,
    note_proof,
    plan,
    sha256,
    writes_environment,
)
from ansible.module_utils.gpu_host.world import World

LAUNCH = {
    "profile": {"type": "str", "default": ""},
    "form": {"type": "str", "choices": ["systemd", "container"], "default": "systemd"},
    "unit": {"type": "str", "default": ""},
    "drop_in": {"type": "str", "default": ""},
    "image": {"type": "str", "default": ""},
    "argv": {"type": "list", "elements": "str", "default": []},
    "environment": {"type": "str", "default": "", "no_log": True},
}
STATE = {"type": "str", "choices": ["present", "absent", "proven", "former"], "default": "present"}


def main() -> None:
    module = AnsibleModule(
        argument_spec={**LAUNCH, "state": STATE},
        supports_check_mode=True,
        required_if=[("state", "present", ("profile",))],
    )
    values, world = dict(module.params), World()
    state = values.pop("state")
    if state == "proven":
        module.exit_json(changed=not module.check_mode and note_proof(world))
    launch, text = None, ""
    if state == "former":
        launch, text = gather_state(world).proven, world.read(PROVEN_ENVIRONMENT) or ""
    elif state == "present":
        try:
            text = environment_text(json.loads(values["environment"] or "{}"))
        except ValueError as wrong:
            module.fail_json(msg=f"sglang_environment: {wrong}")
        values["environment"] = sha256(text) if text else ""
        launch = Launch(**{**values, "argv": tuple(values["argv"])})
    profile = launch.profile if launch is not None else ""
    conclude(
        module,
        world,
        lambda: plan(gather_state(world, *([profile] if profile else [])), launch),
        {"environment": writes_environment(text), "note": note},
        profile=profile,
    )


if __name__ == "__main__":
    main()
