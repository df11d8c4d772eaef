"""Arguments that the modules for the driver and for its libraries have in common, as AnsibleModule takes them."""

from __future__ import annotations

from typing import Any

#: Which version, from where, and whether it is only looked at.
DRIVER: dict[str, dict[str, Any]] = {
    "version": {"type": "str", "required": True},
    "state": {"type": "str", "choices": ["present", "absent", "verified"], "default": "present"},
    "minimum": {"type": "str", "default": ""},
    "source": {"type": "str", "choices": ["runfile", "apt"], "default": "runfile"},
    "runfile": {"type": "str", "default": ""},
    "sha256": {"type": "str", "default": ""},
    "packages": {"type": "list", "elements": "str", "default": []},
}
