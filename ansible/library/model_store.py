#!/usr/bin/python
"""Ansible module: one model's files on a host, verified against its manifest."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_store
short_description: A model's files on a host, verified by sha256
description:
  - Fetches what is missing of a model, resumes what was broken off, and gives a file its place only after its sha256
    has been compared with the manifest.
  - A file with another hash moves to C(.quarantine) below the model's folder and is fetched anew.
  - Refuses before the first byte when the disk would become too full or the source lacks a file.
options:
  root:
    description: Folder of the model store.
    type: path
    required: true
  name:
    description: Name of the model, its folder below I(root).
    type: str
    required: true
  revision:
    description: Revision of the model, its folder below the name.
    type: str
    default: main
  source:
    description: Base address C(https://), C(s3://bucket/prefix), or a folder of the host.
    type: str
    default: ""
  manifest:
    description: Text of the manifest, lines of sha256, size in bytes and path.
    type: str
    default: ""
  state:
    description: Whether the model should be there.
    type: str
    choices: [present, absent]
    default: present
  endpoint:
    description: Address of the S3 service.
    type: str
    default: https://s3.amazonaws.com
  region:
    description: Region of the S3 service.
    type: str
    default: us-east-1
  access_key:
    description: Access key of the S3 service; empty for an open bucket.
    type: str
    default: ""
  secret_key:
    description: Secret key of the S3 service.
    type: str
    default: ""
  token:
    description: Bearer token for an http source.
    type: str
    default: ""
  stall_bytes_per_s:
    description: A transfer that is slower than this for I(stall_s) is broken off and taken up again.
    type: int
    default: 50000
  stall_s:
    description: Seconds of a stall.
    type: int
    default: 30
  keep_free:
    description: Bytes that must stay free on the disk.
    type: int
    default: 10737418240
  rehash:
    description: Read every file again, even those that were verified and are unchanged.
    type: bool
    default: false
author: Drafthouse
"""

EXAMPLES = r"""
- name: Have the target on the host
  model_store:
    root: /var/lib/drafthouse/models
    name: Qwen3.6-27B
    revision: main
    source: s3://models/Qwen3.6-27B
    endpoint: http://10.20.0.9:8333
    manifest: "{{ lookup('file', 'Qwen3.6-27B.manifest') }}"
"""

RETURN = r"""
folder:
  description: Where the model lies.
  type: str
  returned: always
plan:
  description: Steps and refusals.
  type: dict
  returned: always
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_host.model_files import ModelDesired, handlers, look, parse_manifest, plan
from ansible.module_utils.gpu_host.module import conclude
from ansible.module_utils.gpu_host.world import World


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "name": {"type": "str", "required": True},
            "revision": {"type": "str", "default": "main"},
            "source": {"type": "str", "default": ""},
            "manifest": {"type": "str", "default": ""},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "endpoint": {"type": "str", "default": "https://s3.amazonaws.com"},
            "region": {"type": "str", "default": "us-east-1"},
            "access_key": {"type": "str", "default": "", "no_log": True},
            "secret_key": {"type": "str", "default": "", "no_log": True},
            "token": {"type": "str", "default": "", "no_log": True},
            "stall_bytes_per_s": {"type": "int", "default": 50_000},
            "stall_s": {"type": "int", "default": 30},
            "keep_free": {"type": "int", "default": 10 << 30},
            "rehash": {"type": "bool", "default": False},
        },
        required_if=[("state", "present", ("source", "manifest"))],
        supports_check_mode=True,
    )
    values = dict(module.params)
    text, absent = values.pop("manifest"), values.pop("state") == "absent"
    for key in ("name", "revision"):
        if any(part in ("", ".", "..") for part in values[key].split("/")):
            module.fail_json(msg=f"{key}: {values[key]!r} leaves the model store; give a plain name")
    try:
        files = parse_manifest(text, f"manifest of {values['name']}") if not absent else ()
    except ValueError as error:
        module.fail_json(msg=str(error))
    desired = ModelDesired(files=files, absent=absent, **values)
    world = World()
    conclude(module, world, lambda: plan(look(world, desired), desired), handlers(desired), folder=desired.folder)


if __name__ == "__main__":
    main()
