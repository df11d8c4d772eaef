"""`fab …`: the second of two doors. Names and arguments of tasks; the work is done in `drafthouse.fleet`.

Everything reads the inventory that Ansible reads (`--inventory`, default ./inventory). Credentials of the store and
the values of secrets come from the environment of whoever calls.
"""

from __future__ import annotations

from invoke import Collection

from drafthouse.fleet import tasks

namespace = Collection.from_module(tasks)
