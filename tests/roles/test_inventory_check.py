"""The inventory's check through Ansible itself: the fleet passes, a contradiction stops every play that follows."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.roles.runs import ANSIBLE, Run, run


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ANSIBLE.parent / "inventory", tmp_path / "inventory"))


def check(inventory: Path, *arguments: str) -> Run:
    return run("ansible-playbook", f"--inventory={inventory / 'hosts.yml'}", "playbooks/inventory.yml", *arguments)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def test_the_fleet_passes(inventory: Path) -> None:
    done = check(inventory)
    assert done.rc == 0, done.text


def test_every_contradiction_is_told_with_file_and_key_whatever_the_limit(inventory: Path) -> None:
    edit(inventory / "host_vars/ct129.yml", '"0000:42:00.0"', '"0000:81:00.0"')
    edit(inventory / "host_vars/ct129.yml", "lxc_gpu_vmid", "lxc_gpu_vmdi")
    edit(inventory / "group_vars/all.yml", "580.126.09", "999.1")
    edit(inventory / "hosts.yml", "10.20.0.9", "10.20.0.5")
    done = check(inventory, "--limit", "rented1")
    assert done.rc != 0
    message = re.sub(r"\s+", " ", done.text)
    for sentence in (
        "ct129.yml: lxc_gpu_addresses[1]: ct129 wants 0000:81:00.0, which belongs to virtual machines",
        "inventory/host_vars/ct129.yml: lxc_gpu_vmid: ct129 has the number None",
        "inventory/host_vars/ct129.yml: lxc_gpu_vmdi: no role knows the variable lxc_gpu_vmdi; write lxc_gpu_vmid",
        "inventory/group_vars/all.yml: nvidia_driver_version: no range of kernels is known for driver '999.1'",
        "inventory/hosts.yml: ansible_host: kpro5 and depot are both reached at 10.20.0.5 port 22",
    ):
        assert sentence in message, message
    assert done.counts("rented1")["failed"] == 1


def test_a_variable_in_a_folder_of_files_is_found(inventory: Path) -> None:
    folder = inventory / "host_vars/kpro5"
    folder.mkdir()
    shutil.move(inventory / "host_vars/kpro5.yml", folder / "cards.yml")
    edit(folder / "cards.yml", "owner: vm", "owner: nobody")
    done = check(inventory)
    assert done.rc != 0
    assert "inventory/host_vars/kpro5/cards.yml: gpu_host_gpus[2].owner" in re.sub(r"\s+", " ", done.text)
