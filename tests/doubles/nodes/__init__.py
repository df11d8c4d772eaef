"""Nodes of a fleet on this machine: real sshd, own network, own processes, own disks. Needs root and Linux.

    with Fleet(3, tmp_path) as fleet:
        node = fleet["node1"]                   # also fleet.nodes, in order
        node.address, node.port, node.host_key  # host_key: "ssh-ed25519 AAAA…"
        node.kill()                             # SIGKILL of every process of it at once; its port then answers RST
        node.cut(); node.join()                 # its network is gone / back; processes go on (a zombie)
        node.restart()                          # processes gone, same host key, disks and address; sshd is up again
        node.rekey()                            # another host key, as after a rebuild; processes go on
        node.pids()                             # {pid as this process may signal it: command line}; {} when it is dead
        node.execute(["ls", "/srv"])            # runs on the node without ssh, whatever happened to its network
        node.write("/srv/a", b"…")              # likewise, a file
        node.resize("/dev/shm", "4m")           # size of one of its file systems (also Fleet(sizes={"/srv": "8m"}))
        node.first()                            # its pid 1, likewise
        node.path("/srv/a")                     # a file of the living node as this process can open it
        node.log()                              # what its sshd said
        fleet.controller_address                # this machine as the nodes see it: let servers listen here
        fleet.key                               # private key that every node accepts for root
        fleet.inventory                         # folder: hosts.yml, known_hosts, group_vars/, jobs/, profiles/
        fleet.write_inventory(fleet_store=url)  # written again, with further variables for all nodes

A power cut is `cut()` and then `kill()`; the node is back after `join()` and `restart()`.
`Fleet(3, folder, addresses=(1, 1, 2))`: the first two nodes have one address and two ports (and one cable: `cut` takes
both), as containers of one rented machine have.

A node has its own network, mount, pid, uts and ipc namespace. /root, /srv and /var/tmp are its disks and outlive a
restart; /tmp, /run and /dev/shm do not. /etc/ssh is its own; the rest of the file system is this machine's, so that
programs and the virtual environment are there at the same path. There is no systemd in it: pid 1 is sshd.

Everything hangs on one process, the keeper (`keeper.py`), pid 1 of a namespace around all nodes. It ends with the test
process, however that ends, and takes processes, mounts, bridge and cables with it.
"""

from tests.doubles.nodes.fleet import Fleet, missing
from tests.doubles.nodes.node import Node

__all__ = ["Fleet", "Node", "missing"]
