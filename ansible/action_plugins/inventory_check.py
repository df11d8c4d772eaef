"""Action `inventory_check`: judge the whole inventory on the controller, before any host is touched.

An action and not a module, because it reads every host's variables and the inventory's own files, which only the
controller has.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from ansible.plugins.action import ActionBase

# Action plugins are not given module_utils by the collection loader: the package is taken from beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))

from gpu_host.inventory import Host, Inventory, contradictions


class ActionModule(ActionBase):
    """Fails with one sentence a contradiction; changes nothing, in check mode or without."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        variables = task_vars or {}
        folder = Path(variables["inventory_dir"])
        hosts = {
            name: Host(name, tuple(values.get("group_names", ())), dict(values))
            for name, values in variables["hostvars"].items()
        }
        roles = Path(variables["playbook_dir"]) / "roles"
        if not roles.is_dir():
            roles = Path(variables["playbook_dir"]).parent / "roles"
        found = contradictions(Inventory(hosts, _Origins(folder), _known(roles)))
        result["contradictions"] = [{"rule": r.rule, "where": r.where, "what": r.what, "fix": r.fix} for r in found]
        if found:
            result["failed"] = True
            result["msg"] = "\n".join(refusal.sentence() for refusal in found)
        return result


class _Origins:
    """Which file of the inventory a host's key stands in: the closest one, as Ansible's precedence has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._keys: dict[Path, set[str]] = {}

    def __call__(self, host: Host, key: str) -> str:
        near = [self.folder / "host_vars" / host.name]
        near += [self.folder / "group_vars" / group for group in (*reversed(host.groups), "all")]
        for base in near:
            files = [base.with_name(f"{base.name}{suffix}") for suffix in (".yml", ".yaml")]
            files += sorted(base.glob("*.y*ml")) if base.is_dir() else []
            for file in files:
                if key in self._of(file):
                    return self._shown(file)
        # Neither host_vars nor group_vars has it: the hosts file does, or the key is missing and belongs there.
        written = sorted(self.folder.glob("*.y*ml"))
        if key.startswith("ansible_") and written:
            return self._shown(written[0])
        return self._shown(near[0].with_name(f"{host.name}.yml"))

    def _of(self, file: Path) -> set[str]:
        if file not in self._keys:
            text = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
            self._keys[file] = set(text) if isinstance(text, dict) else set()
        return self._keys[file]

    def _shown(self, file: Path) -> str:
        return str(file.relative_to(self.folder.parent))


def _known(roles: Path) -> dict[str, frozenset[str]]:
    """Role -> variables of its argument_specs; the shared ones (`gpu_host_*`) are documented by `preflight`."""
    known: dict[str, set[str]] = {}
    for file in sorted(roles.glob("*/meta/argument_specs.yml")):
        specs = yaml.safe_load(file.read_text(encoding="utf-8")).get("argument_specs", {})
        names = {name for entry in specs.values() for name in entry.get("options", {})}
        known.setdefault(file.parents[1].name, set()).update(names)
    every = frozenset(name for names in known.values() for name in names)
    return dict.fromkeys((*known, "gpu_host"), every)
