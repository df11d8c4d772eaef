"""What the inventory says of a container arrives at the modules that act for it on its host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ANSIBLE = Path(__file__).parents[3] / "ansible"
#: Test double of both modules: remembers its arguments, and finds nothing to do.
MODULE = """#!{python}
# WANT_JSON
import json, sys
given = json.load(open(sys.argv[1]))
with open({record!r}, "a") as file:
    words = {{key: value for key, value in given.items() if not key.startswith("_ansible")}}
    file.write(json.dumps([{name!r}, words]) + "\\n")
print(json.dumps({{"changed": False, "plan": {{"steps": [], "wants_runfile": False}}}}))
"""
SETTINGS = {
    "lxc_gpu_mode": "0660",
    "lxc_gpu_gid": 44,
    "lxc_gpu_form": "raw",
    "lxc_gpu_restart": True,
    "lxc_gpu_stop_timeout_s": 300,
    "nvidia_userspace_packages": ["libnvidia-compute-580"],
    "nvidia_userspace_ffmpeg": False,
    "nvidia_userspace_remove_foreign": True,
    "nvidia_userspace_probe": False,
}


def run(folder: Path, tasks: str) -> dict[int, dict[str, dict[str, Any]]]:
    """vmid -> module -> its arguments: these tasks ran for a container with settings and for one without."""
    record = folder / "record"
    for name in ("lxc_gpu", "nvidia_userspace"):
        text = MODULE.format(python=sys.executable, record=str(record), name=name)
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    containers = {"ct129": {"lxc_gpu_vmid": 129, "lxc_gpu_addresses": ["0000:41:00.0"], **SETTINGS}}
    containers["ct130"] = {"lxc_gpu_vmid": 130, "lxc_gpu_addresses": []}
    groups = {"proxmox": {"hosts": {"kpro5": local}}, "containers": {"hosts": containers}}
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": groups}}), encoding="utf-8")
    loop = {"loop": "{{ groups['containers'] | map('extract', hostvars) }}", "loop_control": {"loop_var": "container"}}
    play = {
        "hosts": "kpro5",
        "gather_facts": False,
        "vars": {"nvidia_driver_version": "580.126.09", "nvidia_driver_source": "runfile"},
        "tasks": [{"include_tasks": str(ANSIBLE / "playbooks/tasks" / tasks), **loop}],
    }
    (folder / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")},
        "ANSIBLE_LIBRARY": str(folder),
        "ANSIBLE_ROLES_PATH": str(ANSIBLE / "roles"),
        "ANSIBLE_INJECT_FACT_VARS": "false",
        "ANSIBLE_LOCAL_TEMP": str(folder / "local"),
        "ANSIBLE_REMOTE_TEMP": str(folder / "remote"),
    }
    program = str(Path(sys.executable).parent / "ansible-playbook")
    argv = [program, "--inventory", str(folder / "hosts.yml"), str(folder / "play.yml")]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for name, given in map(json.loads, record.read_text(encoding="utf-8").splitlines()):
        found.setdefault(int(given["vmid"]), {})[name] = given
    return found


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, dict[str, Any]]]:
    return run(tmp_path_factory.mktemp("container"), "container.yml")


def test_a_containers_own_settings_are_its_own(given: dict[int, dict[str, dict[str, Any]]]) -> None:
    passthrough, userspace = given[129]["lxc_gpu"], given[129]["nvidia_userspace"]
    assert passthrough["addresses"] == userspace["addresses"] == ["0000:41:00.0"]
    assert [passthrough[key] for key in ("mode", "gid", "form", "restart")] == ["0660", 44, "raw", True]
    assert passthrough["stop_timeout"] == 300
    assert userspace["packages"] == ["libnvidia-compute-580"]
    assert [userspace[key] for key in ("ffmpeg", "remove_foreign", "probe")] == [False, True, False]


def test_a_container_without_settings_has_the_roles_defaults(given: dict[int, dict[str, dict[str, Any]]]) -> None:
    """And nothing of the container before it in the loop."""
    passthrough, userspace = given[130]["lxc_gpu"], given[130]["nvidia_userspace"]
    defaults = {
        name: yaml.safe_load((ANSIBLE / f"roles/{name}/defaults/main.yml").read_text(encoding="utf-8"))
        for name in ("lxc_gpu", "nvidia_userspace")
    }
    for argument in ("mode", "form", "restart"):
        assert passthrough[argument] == defaults["lxc_gpu"][f"lxc_gpu_{argument}"], argument
    assert "gid" not in passthrough
    for argument in ("packages", "ffmpeg", "remove_foreign", "probe"):
        assert userspace[argument] == defaults["nvidia_userspace"][f"nvidia_userspace_{argument}"], argument
    assert userspace["source"] == "runfile"


def test_every_setting_of_a_container_is_handed_over() -> None:
    """A new option of the role lxc_gpu that the playbook forgets would be silently the default for every container."""
    specs = yaml.safe_load((ANSIBLE / "roles/lxc_gpu/meta/argument_specs.yml").read_text(encoding="utf-8"))
    options = set(specs["argument_specs"]["main"]["options"]) - {"lxc_gpu_host", "lxc_gpu_previous_host"}
    tasks = yaml.safe_load((ANSIBLE / "playbooks/tasks/container.yml").read_text(encoding="utf-8"))
    assert set(tasks[0]["vars"]) == options


def test_the_way_back_may_restart_the_containers_that_allow_it(tmp_path: Path) -> None:
    given = run(tmp_path, "reset_container.yml")
    told = {vmid: [given[vmid]["lxc_gpu"][key] for key in ("state", "restart", "stop_timeout")] for vmid in given}
    assert told == {129: ["absent", True, 300], 130: ["absent", False, 120]}
    assert given[129]["nvidia_userspace"]["state"] == "absent"
