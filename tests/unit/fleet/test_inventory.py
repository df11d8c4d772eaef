"""The fleet's nodes, as Ansible's own program lists them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from drafthouse.errors import FleetError
from drafthouse.fleet.inventory import Inventory

EXAMPLE = Path(__file__).parents[3] / "inventory"
KNOWN = Path("/home/operator/.ssh/known_hosts")


def listing(**hosts: dict[str, Any]) -> dict[str, Any]:
    """What ansible-inventory says about hosts of one group."""
    return {
        "_meta": {"hostvars": hosts},
        "all": {"children": ["ungrouped", "rented"]},
        "rented": {"hosts": list(hosts)},
    }


def inventory(**hosts: dict[str, Any]) -> Inventory:
    return Inventory.of(Path("inventory"), listing(**hosts), KNOWN)


@pytest.fixture(scope="module")
def example() -> Inventory:
    return Inventory.load(EXAMPLE)


def test_the_example_is_read_through_ansible(example: Inventory) -> None:
    rented = example.node("rented1")
    assert (rented.host, rented.port, rented.user, rented.kind, rented.gpu_count) == (
        "203.0.113.40", 41022, "root", "rented", 4,
    )  # fmt: skip
    assert rented.groups == ("rented",)
    assert rented.known_as == "[203.0.113.40]:41022"
    assert example.node("kpro5").known_as == "10.20.0.5"
    assert example.node("ct129").gpu_count == 2
    assert example.node("kpro5").vars["nvidia_driver_version"] == "580.126.09"
    assert example.fleet_store is not None
    assert example.fleet_store.startswith("s3://")


def test_nodes_are_named_by_name_and_group_and_out_of_service_only_when_named(example: Inventory) -> None:
    def names(pattern: str | None = None) -> list[str]:
        return [node.name for node in example.nodes(pattern)]

    assert names() == names("all") == ["ct129", "depot", "kpro5", "rented1"]
    assert names("rented, kpro5,rented1") == ["rented1", "kpro5"]
    assert names("kpro6") == names("decommissioned") == ["kpro6"]
    assert example.node("kpro6").decommissioned
    assert not example.node("kpro5").decommissioned


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("kpro55", r"there is no node 'kpro55'; did you mean kpro5"),
        ("rented1,contaners", r"there is no node 'contaners'; did you mean containers"),
        ("zzz", r"there is no node 'zzz'; known are ct129, depot"),
    ],
)
def test_an_unknown_name_is_told_with_the_near_ones(example: Inventory, pattern: str, sentence: str) -> None:
    with pytest.raises(FleetError, match=sentence):
        example.nodes(pattern)
    with pytest.raises(FleetError, match="there is no node"):
        example.node("kpro55")
    with pytest.raises(FleetError, match=r"'rented' is a group \(rented1\)"):
        example.node("rented")


def test_known_hosts_of_the_folder_come_first(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "inventory"))
    (folder / "known_hosts").touch()
    assert Inventory.load(folder).known_hosts == folder / "known_hosts"
    (folder / "hosts.yml").write_text("all: {hosts: [unclosed")
    with pytest.raises(FleetError, match=r"hosts\.yml: ansible-inventory refuses it \(.+\); correct the file"):
        Inventory.load(folder)


def test_without_a_folder_or_without_ansible_the_sentence_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FleetError, match=r"there is no inventory; change to the repository"):
        Inventory.load(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(FleetError, match=r"ansible-inventory is not installed; pip install"):
        Inventory.load(EXAMPLE)


def test_an_ansible_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ansible-inventory"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("drafthouse.fleet.inventory.ANSIBLE_S", 0.2)
    with pytest.raises(FleetError, match=r"ansible-inventory took longer than 0\.2 s"):
        Inventory.load(EXAMPLE)


def test_two_nodes_on_one_address_are_two_by_their_ports() -> None:
    address = {"ansible_host": "203.0.113.7"}
    both = inventory(a={**address, "ansible_port": 40001}, b={**address, "ansible_port": 40002})
    assert [node.known_as for node in both.nodes()] == ["[203.0.113.7]:40001", "[203.0.113.7]:40002"]
    with pytest.raises(FleetError, match=r"a and b are both reached at 203\.0\.113\.7 port 22"):
        inventory(a=address, b={**address, "ansible_port": 22})


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"ansible_port": "22x"}, r"n: ansible_port: '22x' is not a number"),
        ({"ansible_port": 0}, r"n: ansible_port: 0 is no port"),
        ({"ansible_port": True}, r"n: ansible_port: True is not a number"),
        ({"ansible_host": "-oProxyCommand=x"}, r"n: ansible_host: '-oProxyCommand=x' cannot be used"),
        ({"ansible_host": "{{ other }}"}, r"templates are not resolved here"),
        ({"ansible_host": "a\nb"}, r"n: ansible_host: 'a\\nb' cannot be used"),
        ({"ansible_user": "$(touch x)"}, r"n: ansible_user: '\$\(touch x\)' cannot be used"),
        ({"price_per_hour": "much"}, r"n: price_per_hour: 'much' is not a number"),
        ({"gpu_host_gpu_count": -1}, r"n: gpu_host_gpu_count: -1 is not a number from 0 on"),
    ],
)
def test_variables_that_make_no_node_are_told(variables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FleetError, match=sentence):
        inventory(n=variables)


def test_a_name_that_is_none_is_refused() -> None:
    for name in ("a b", "../x", "$(touch x)", "a\nb", "-n"):
        with pytest.raises(FleetError, match="is no name for a node"):
            inventory(**{name: {}})


def test_what_a_node_may_be_told() -> None:
    variables = {"ansible_host": "h", "ansible_ssh_private_key_file": "~/key", "price_per_hour": 1.5}
    node = inventory(n={**variables, "node_store": "s3://b/p", "job_root": "/data"}).node("n")
    assert node.key_file == Path("~/key").expanduser()
    assert (node.price_per_hour, node.store, node.vars["job_root"]) == (1.5, "s3://b/p", "/data")
    cards = [{"owner": "host"}, {"owner": "vm"}, {"owner": "host"}]
    assert inventory(n={"gpu_host_gpus": cards}).node("n").gpu_count == 2
    assert inventory(n={}).node("n").gpu_count is None


def test_the_fleet_has_one_store() -> None:
    assert inventory(a={}, b={}).fleet_store is None
    assert inventory(a={"fleet_store": "s3://x"}, b={"ansible_host": "b"}).fleet_store == "s3://x"
    with pytest.raises(FleetError, match="fleet_store differs between a and b"):
        inventory(a={"fleet_store": "s3://x"}, b={"fleet_store": "s3://y"})


def test_groups_reach_through_their_children() -> None:
    nested = listing(a={}, b={})
    nested |= {"outer": {"children": ["rented", "empty"], "hosts": ["a"]}}
    found = Inventory.of(Path("inventory"), nested, KNOWN)
    assert [node.name for node in found.nodes("outer")] == ["a", "b"]
    assert found.node("b").groups == ("outer", "rented")
