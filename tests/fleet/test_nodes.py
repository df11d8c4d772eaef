"""The nodes that the other tests here run on: they die, hang and come back as machines do, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from drafthouse.fleet.connection import NodeConnection
from drafthouse.fleet.inventory import Inventory
from drafthouse.fleet.node import Node as FleetNode
from drafthouse.fleet.parallel import each
from drafthouse.store import Store
from tests.doubles.nodes import Fleet, Node
from tests.fixtures_s3 import s3_url
from tests.patience import until

HOLDS_A_FLEET = """
import sys, time
from pathlib import Path
from tests.doubles.nodes import Fleet
with Fleet(1, Path(sys.argv[1])) as fleet:
    pid = next(iter(fleet.nodes[0].pids()))
    print(pid, fleet._link, flush=True)
    time.sleep(60)
"""


def ssh(fleet: Fleet, node: Node, *argv: str) -> subprocess.CompletedProcess[str]:
    options = ["-F", "none", "-i", str(fleet.key), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
    options += ["-o", f"UserKnownHostsFile={fleet.inventory / 'known_hosts'}", "-p", str(node.port)]
    return subprocess.run(
        ["ssh", *options, f"root@{node.address}", *argv], capture_output=True, text=True, timeout=30, check=False
    )


def hostname(node: FleetNode, known_hosts: Path) -> str:
    with NodeConnection(node, known_hosts) as connection:
        return connection.run(["hostname"]).stdout


def test_a_node_is_a_machine_of_its_own_with_this_machines_programs(fleet: Fleet) -> None:
    one, other = fleet.nodes[:2]
    one.write("/srv/mine", b"1")
    done = ssh(
        fleet, one, f"hostname; ls /srv/mine; {sys.executable} -c 'import drafthouse; print(drafthouse.__name__)'"
    )
    assert done.stdout.split() == ["node1", "/srv/mine", "drafthouse"], done.stderr
    assert not other.path("/srv/mine").exists()
    assert not Path("/srv/mine").exists()


def test_the_written_inventory_is_read_through_ansible_and_leads_to_the_nodes(fleet: Fleet) -> None:
    fleet.write_inventory(fleet_store="file:///srv/store")
    inventory = Inventory.load(fleet.inventory)
    assert inventory.fleet_store == "file:///srv/store"
    answers = each(inventory.nodes(), lambda node: hostname(node, inventory.known_hosts))
    assert answers == {"node1": "node1\n", "node2": "node2\n", "node3": "node3\n"}


def test_death_takes_processes_and_memory_and_leaves_disks_and_the_host_key(healthy: Fleet) -> None:
    node = healthy.nodes[0]
    node.write("/srv/kept", b"disk")
    node.write("/dev/shm/lost", b"memory")
    assert ssh(healthy, node, "setsid sleep 1000 > /dev/null 2>&1 < /dev/null &").returncode == 0
    # ssh has answered when the shell has forked; the child may still be called `sh`, or `setsid`.
    until(lambda: "sleep 1000" in node.pids().values(), "the node's `sleep`")
    node.kill()
    assert node.pids() == {}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((node.address, node.port), timeout=5)
    node.restart()
    assert ssh(healthy, node, "cat /srv/kept; ls -A /dev/shm").stdout == "disk"


def test_a_cut_node_goes_on_and_nobody_hears_of_it(healthy: Fleet) -> None:
    node = healthy.nodes[1]
    node.cut()
    with pytest.raises(OSError, match=r"timed out|No route"):
        socket.create_connection((node.address, node.port), timeout=0.5)
    assert node.execute(["hostname"]).stdout == "node2\n"
    node.join()
    node.await_sshd()
    assert ssh(healthy, node, "hostname").stdout == "node2\n"


def test_a_rebuilt_node_has_another_key(healthy: Fleet) -> None:
    node = healthy.nodes[2]
    before = node.host_key
    node.rekey()
    assert node.host_key != before
    assert "HOST IDENTIFICATION HAS CHANGED" in ssh(healthy, node, "true").stderr
    healthy.write_inventory()
    assert ssh(healthy, node, "true").returncode == 0


def test_two_nodes_share_an_address_and_their_cable_but_nothing_else(tmp_path: Path, fleet: Fleet) -> None:
    with Fleet(2, tmp_path, addresses=(1, 1), sizes={"/srv": "1m"}) as shared:
        one, other = shared.nodes
        assert one.address == other.address
        assert one.port != other.port
        assert [ssh(shared, node, "hostname").stdout for node in shared.nodes] == ["node1\n", "node2\n"]
        full = ssh(shared, other, "head -c 2m /dev/zero > /srv/big")
        assert "No space left" in full.stderr
        one.kill()
        assert ssh(shared, other, "hostname").stdout == "node2\n"


def test_nothing_outlives_the_process_that_made_the_nodes(tmp_path: Path, fleet: Fleet) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDS_A_FLEET, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    pid, link = holder.stdout.readline().split()
    network = Path("/sys/class/net") / link
    assert network.exists()
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    until(lambda: not network.exists(), "the end of the nodes' network")
    until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the node's first process")


@pytest.mark.s3
def test_nodes_reach_the_s3_server(fleet: Fleet, fleet_s3: str) -> None:
    url = s3_url(fleet_s3)
    program = f"from drafthouse.store import Store; Store.open({url!r}).create('from', b'node')"
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    variables = [f"{name}={os.environ[name]}" for name in names]
    done = fleet.nodes[0].execute(["env", *variables, sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    assert Store.open(url).get("from") == b"node"
