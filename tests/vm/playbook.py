"""Playbooks of `ansible/` against the virtual machine, as an operator runs them, under an inventory of the machine."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .machine import CARD_ID, Machine

ANSIBLE = Path(__file__).parents[2] / "ansible"
HOST, CONTAINER, VMID = "kpro5", "ct129", 129
CARDS = tuple(f"0000:{bus:02x}:00.0" for bus in range(1, 5))
#: The first two go to the host and into the container, the others stay with the virtual machines.
HOSTS_CARDS, VMS_CARDS = CARDS[:2], CARDS[2:]
LIMIT_S = 1500


@dataclass(frozen=True)
class Run:
    """What one ansible-playbook said.

    Attributes:
        status: exit status.
        output: everything it printed.
        seconds: how long it took.
    """

    status: int
    output: str
    seconds: float

    def count(self, what: str) -> int:
        """A number of the recap of the host: `ok`, `changed`, `failed`, `unreachable`."""
        recap = re.search(rf"^{HOST}\s*:.*\b{what}=(\d+)", self.output, re.MULTILINE)
        assert recap, self.output[-3000:]
        return int(recap[1])


@dataclass
class Playbooks:
    """Runs playbooks with the installer's double in the controller's cache.

    Attributes:
        folder: for the inventory and ssh's sockets; a short path.
        version, sha256: of the installer in `cache`.
        times: what was run, and for how many seconds.
    """

    machine: Machine
    folder: Path
    cache: Path
    version: str
    sha256: str
    times: list[tuple[str, float]] = field(default_factory=list)

    def inventory(self, **host_variables: Any) -> Path:
        """Write the inventory; keywords replace variables of the host."""
        ssh = " ".join(["-F", "/dev/null", "-o", shlex.quote(f"UserKnownHostsFile={self.machine.known_hosts}")])
        host = {
            "ansible_host": "127.0.0.1",
            "ansible_port": self.machine.port,
            "ansible_ssh_private_key_file": str(self.machine.image.key),
            "ansible_ssh_common_args": ssh,
            "gpu_host_kind": "proxmox",
            "gpu_host_gpus": [
                {"address": address, "id": CARD_ID, "owner": "host" if address in HOSTS_CARDS else "vm"}
                for address in CARDS
            ],
            "nvidia_driver_cache": str(self.cache),
            "nvidia_driver_sha256": self.sha256,
            **host_variables,
        }
        container = {
            "ansible_host": "10.20.0.129",
            "gpu_host_kind": "container",
            "lxc_gpu_host": HOST,
            "lxc_gpu_vmid": VMID,
            "lxc_gpu_addresses": list(HOSTS_CARDS),
            # Devices of a running container wait for its next start, as on Proxmox VE 8.
            "lxc_gpu_restart": True,
            # Debian's archive cannot be reached from the machine.
            "nvidia_userspace_ffmpeg": False,
        }
        groups = {"proxmox": {"hosts": {HOST: host}}, "containers": {"hosts": {CONTAINER: container}}}
        shared = {"ansible_user": "root", "nvidia_driver_version": self.version}
        target = self.folder / "hosts.yml"
        target.write_text(yaml.safe_dump({"all": {"vars": shared, "children": groups}}))
        return target

    def run(self, playbook: str, *arguments: str, **host_variables: Any) -> Run:
        """Run a playbook of `ansible/` for the host, and nothing of the user's own settings."""
        argv = [str(Path(sys.executable).with_name("ansible-playbook")), playbook, "-l", HOST]
        argv += ["-i", str(self.inventory(**host_variables)), *arguments]
        begun = time.monotonic()
        done = subprocess.run(
            argv,
            cwd=ANSIBLE,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        seconds = time.monotonic() - begun
        self.times.append((" ".join((playbook, *arguments)), seconds))
        return Run(done.returncode, done.stdout, seconds)

    def site(self, *arguments: str, **host_variables: Any) -> Run:
        return self.run("site.yml", *arguments, **host_variables)

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
        mine = {
            "ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.folder),
            "ANSIBLE_LOCAL_TEMP": str(self.folder / "ansible"),
            "ANSIBLE_TIMEOUT": "60",
        }
        return {**kept, **mine}
