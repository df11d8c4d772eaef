"""An inventory that contradicts itself is refused with the file and the key; the example fleet is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gpu_host.inventory import Host, Inventory, contradictions

A6000 = "10de:2230"


def fleet() -> dict[str, dict[str, Any]]:
    """Two hosts, one container, one rented node; nothing wrong with it."""
    return {
        "kpro5": {
            "groups": ["proxmox"],
            "gpu_host_kind": "proxmox",
            "ansible_host": "10.20.0.5",
            "nvidia_driver_version": "580.126.09",
            "gpu_host_gpus": [
                {"address": "0000:41:00.0", "id": A6000, "owner": "host"},
                {"address": "0000:42:00.0", "id": A6000, "owner": "host"},
                {"address": "0000:81:00.0", "id": "10de:2204", "owner": "vm"},
            ],
        },
        "kpro6": {"groups": ["proxmox", "decommissioned"], "gpu_host_kind": "proxmox", "ansible_host": "10.20.0.6"},
        "ct129": {
            "groups": ["containers"],
            "gpu_host_kind": "container",
            "ansible_host": "10.20.0.129",
            "nvidia_driver_version": "580.126.09",
            "lxc_gpu_host": "kpro5",
            "lxc_gpu_vmid": 129,
            "lxc_gpu_addresses": ["0000:41:00.0", "0000:42:00.0"],
        },
        "rented1": {
            "groups": ["rented"],
            "gpu_host_kind": "rented",
            "ansible_host": "203.0.113.40",
            "ansible_port": 41022,
        },
    }


def judge(hosts: dict[str, dict[str, Any]]) -> list[Any]:
    built = {
        name: Host(name, tuple(values["groups"]), {k: v for k, v in values.items() if k != "groups"})
        for name, values in hosts.items()
    }
    known = {"lxc_gpu": frozenset({"lxc_gpu_host", "lxc_gpu_vmid", "lxc_gpu_addresses"})}
    return contradictions(Inventory(built, lambda host, key: f"inventory/host_vars/{host.name}.yml", known))


def test_the_example_fleet_has_no_contradiction() -> None:
    assert judge(fleet()) == []


def second_container(hosts: dict[str, Any], **changes: Any) -> None:
    hosts["ct130"] = {**copy.deepcopy(hosts["ct129"]), "ansible_host": "10.20.0.130", "lxc_gpu_vmid": 130, **changes}


CASES: list[tuple[str, Any, str, str]] = [
    ("unknown-kind", lambda h: h["rented1"].pop("gpu_host_kind"), "rented1.yml: gpu_host_kind", "has no kind"),
    ("unknown-kind", lambda h: h["rented1"].update(gpu_host_kind="cloud"), "gpu_host_kind", "'cloud'"),
    (
        "bad-address",
        lambda h: h["kpro5"]["gpu_host_gpus"][2].update(address="81:00"),
        "kpro5.yml: gpu_host_gpus[2].address",
        "'81:00'",
    ),
    (
        "bad-address",
        lambda h: h["kpro5"]["gpu_host_gpus"][2].update(address="0000:81:00.9"),
        "gpu_host_gpus[2].address",
        "no PCI address",
    ),
    (
        "bad-card-id",
        lambda h: h["kpro5"]["gpu_host_gpus"][2].pop("id"),
        "gpu_host_gpus[2].id",
        "nothing can be checked",
    ),
    (
        "unknown-owner",
        lambda h: h["kpro5"]["gpu_host_gpus"][2].update(owner="lxc"),
        "gpu_host_gpus[2].owner",
        "belongs to 'lxc'",
    ),
    (
        "two-owners",
        lambda h: h["kpro5"]["gpu_host_gpus"].append({"address": "0000:41:00.0", "id": A6000, "owner": "vm"}),
        "kpro5.yml: gpu_host_gpus[3]",
        "two entries, [0] and [3]",
    ),
    (
        "two-owners",
        lambda h: h["ct129"].update(lxc_gpu_addresses=["0000:81:00.0"]),
        "ct129.yml: lxc_gpu_addresses[0]",
        "belongs to virtual machines",
    ),
    (
        "two-owners",
        lambda h: second_container(h, lxc_gpu_addresses=["0000:42:00.0"]),
        "ct130.yml: lxc_gpu_addresses[0]",
        "given to ct129 and to ct130",
    ),
    (
        "two-owners",
        lambda h: h["ct129"]["lxc_gpu_addresses"].append("0000:41:00.0"),
        "ct129.yml: lxc_gpu_addresses[2]",
        "given to ct129 twice",
    ),
    (
        "unknown-card",
        lambda h: h["ct129"].update(lxc_gpu_addresses=["0000:99:00.0"]),
        "ct129.yml: lxc_gpu_addresses[0]",
        "kpro5 does not have",
    ),
    ("unknown-host", lambda h: h["ct129"].update(lxc_gpu_host="kpro9"), "ct129.yml: lxc_gpu_host", "'kpro9'"),
    ("unknown-host", lambda h: h["ct129"].update(lxc_gpu_host="rented1"), "lxc_gpu_host", "no Proxmox host"),
    ("unknown-host", lambda h: h["ct129"].pop("lxc_gpu_host"), "lxc_gpu_host", "names no host"),
    (
        "host-out-of-service",
        lambda h: h["ct129"].update(lxc_gpu_host="kpro6", lxc_gpu_addresses=[]),
        "lxc_gpu_host",
        "decommissioned",
    ),
    ("bad-vmid", lambda h: h["ct129"].update(lxc_gpu_vmid="129"), "lxc_gpu_vmid", "'129'"),
    (
        "one-number-two-containers",
        lambda h: second_container(h, lxc_gpu_vmid=129, lxc_gpu_addresses=[]),
        "ct130.yml: lxc_gpu_vmid",
        "both container 129",
    ),
    (
        "one-door-two-nodes",
        lambda h: h["kpro6"].update(ansible_host="10.20.0.5"),
        "kpro6.yml: ansible_host",
        "kpro6 and kpro5 are both reached at 10.20.0.5 port 22",
    ),
    (
        "no-kernel-range",
        lambda h: [h[n].update(nvidia_driver_version="999.1") for n in ("kpro5", "ct129")],
        "kpro5.yml: nvidia_driver_version",
        "'999.1'",
    ),
    (
        "two-versions",
        lambda h: h["ct129"].update(nvidia_driver_version="580.126.10"),
        "ct129.yml: nvidia_driver_version",
        "its host kpro5",
    ),
    (
        "unknown-variable",
        lambda h: h["ct129"].update(lxc_gpu_adresses=[]),
        "ct129.yml: lxc_gpu_adresses",
        "no role knows",
    ),
]


@pytest.mark.parametrize(("rule", "change", "where", "what"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_a_contradiction_is_told_with_file_and_key(rule: str, change: Any, where: str, what: str) -> None:
    hosts = fleet()
    change(hosts)
    found = judge(hosts)
    assert [r.rule for r in found] == [rule]
    assert where in found[0].where
    assert what in found[0].what
    assert found[0].fix
    assert "\n" not in found[0].sentence()


def test_all_contradictions_are_told_at_once() -> None:
    hosts = fleet()
    hosts["ct129"].update(lxc_gpu_host="kpro9")
    hosts["rented1"].update(gpu_host_kind="cloud")
    assert [r.rule for r in judge(hosts)] == ["unknown-kind", "unknown-host"]


def test_two_nodes_on_one_address_with_different_ports_are_two_nodes() -> None:
    hosts = fleet()
    hosts["rented2"] = {**hosts["rented1"], "ansible_port": 41023}
    assert judge(hosts) == []


def test_a_misspelt_variable_gets_the_right_name() -> None:
    hosts = fleet()
    hosts["ct129"].update(lxc_gpu_adresses=[])
    assert judge(hosts)[0].fix == "write lxc_gpu_addresses"


def test_a_range_in_the_inventory_makes_an_unknown_driver_known() -> None:
    hosts = fleet()
    for name in ("kpro5", "ct129"):
        hosts[name].update(nvidia_driver_version="999.1")
    hosts["kpro5"]["nvidia_driver_kernels"] = {"999.1": {"min": "6.1", "max": "7.3"}}
    assert judge(hosts) == []


def test_a_host_without_cards_for_containers_needs_no_driver() -> None:
    hosts = fleet()
    hosts["ct129"].update(lxc_gpu_addresses=[])
    for card in hosts["kpro5"]["gpu_host_gpus"]:
        card["owner"] = "vm"
    for name in ("kpro5", "ct129"):
        hosts[name].update(nvidia_driver_version="999.1")
    assert judge(hosts) == []
