"""What the virtual machine shows of itself, read by one command each: a login costs more than the answer."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from .machine import Machine

_DRIVERS = """
for folder in /sys/bus/pci/devices/0000:0[1-4]:00.*; do
    driver=none; [ -e $folder/driver ] && driver=$(readlink $folder/driver)
    echo ${folder##*/} ${driver##*/}
done
"""
#: Everything that provisioning writes to; sizes, modes and times of change tell whether anything did.
_PLACES = "/boot /etc /lib/modules /usr/bin /usr/lib/x86_64-linux-gnu /usr/local /usr/src /var/cache /var/lib/dkms"
#: Opens each path for reading and writing: `char` for a device that opened, `file` for a plain file, else the error.
_OPEN = """
import errno, json, os, stat, sys
said = {}
for path in sys.argv[1:]:
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError as failure:
        said[path] = errno.errorcode[failure.errno]
    else:
        said[path] = "char" if stat.S_ISCHR(os.fstat(handle).st_mode) else "file"
        os.close(handle)
print(json.dumps(said))
"""


def drivers(machine: Machine) -> dict[str, str]:
    """PCI function of a card -> the driver that it is bound to, `none` without one."""
    return dict(line.split() for line in machine.out(_DRIVERS).splitlines())  # type: ignore[misc]


def fingerprint(machine: Machine) -> str:
    """A digest of all files that provisioning could have written, and of what the cards are bound to."""
    places = f"find {_PLACES} -xdev -printf '%p %m %s %T@ %l\\n'"
    return machine.out(f"{{ {places}; {_DRIVERS} }} 2>/dev/null | sort | sha256sum")


@dataclass(frozen=True)
class Container:
    """A running container of the machine."""

    machine: Machine
    vmid: int

    def out(self, *argv: str) -> str:
        """What a program inside printed; it must end with 0."""
        return self.machine.out(f"pct exec {self.vmid} -- {shlex.join(argv)}")

    def opens(self, *paths: str) -> dict[str, str]:
        """Path -> `char`, `file`, or the name of the error with which opening it ended."""
        answer: dict[str, str] = json.loads(self.out("python3", "-c", _OPEN, *paths))
        return answer

    def make_node(self, path: str, major: int, minor: int) -> str:
        """A device node made inside, as root of a container may; returns the path."""
        self.out("mknod", "-m", "666", path, "c", str(major), str(minor))
        return path
