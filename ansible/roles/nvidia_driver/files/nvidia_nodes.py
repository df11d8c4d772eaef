#!/usr/bin/env python3
"""Create the NVIDIA device nodes before guests start, and say when a container would get another card than its own.

No udev rule makes these nodes: they appear with the first CUDA program or through nvidia-modprobe, and a container
that names a missing node does not start. The number of a node is the order in which the driver found the cards, so it
is compared with what the containers' configurations hold after every boot.

Reads /etc/drafthouse/nvidia-nodes.json: [{"vmid": 129, "addresses": ["0000:41:00.0"]}]. Ends with 1 and one sentence
a finding when something is not as it should be.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

CONTROL_MINOR = 255
WAIT_S = 15.0


def minors(root: Path) -> dict[str, int]:
    """PCI address -> minor of the cards that the driver has initialised."""
    found = {}
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        match = re.search(r"Device Minor:\s*(\d+)", (folder / "information").read_text())
        if match:
            found[folder.name.lower()] = int(match[1])
    return found


def wanted(root: Path) -> dict[int, list[str]]:
    """Container -> PCI addresses of its cards."""
    file = root / "etc/drafthouse/nvidia-nodes.json"
    entries = json.loads(file.read_text()) if file.exists() else []
    return {int(entry["vmid"]): [address.lower() for address in entry["addresses"]] for entry in entries}


def given(root: Path, vmid: int) -> set[int] | None:
    """Minors of the cards that the container's configuration passes in now, None without a configuration."""
    file = root / f"etc/pve/lxc/{vmid}.conf"
    if not file.exists():
        return None
    main = re.split(r"^\[", file.read_text(), maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in main.splitlines() if re.match(r"dev\d+:|lxc\.mount\.entry:", line)]
    return {int(minor) for line in lines for minor in re.findall(r"/dev/nvidia(\d+)\b", line)}


def create(known: dict[str, int]) -> list[str]:
    """Make the nodes of the cards, of the control device and of unified memory; returns what failed."""
    cards = [argument for minor in sorted(known.values()) for argument in ("-c", str(minor))]
    failed = []
    for argv in (["nvidia-modprobe", "-c", str(CONTROL_MINOR), *cards], ["nvidia-modprobe", "-u", "-c", "0"]):
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as failure:
            failed.append(f"{' '.join(argv)}: {failure}")
            continue
        if done.returncode:
            failed.append(f"{' '.join(argv)} ended with {done.returncode}: {(done.stdout + done.stderr).strip()}")
    return failed


def findings(root: Path, known: dict[str, int]) -> list[str]:
    """Containers whose configuration names other cards than theirs."""
    found = []
    for vmid, addresses in sorted(wanted(root).items()):
        missing = [address for address in addresses if address not in known]
        if missing:
            found.append(
                f"container {vmid}: nvidia does not drive {', '.join(missing)}, run vfio_binding for this host"
            )
            continue
        now, right = given(root, vmid), {known[address] for address in addresses}
        if now is not None and now != right:
            found.append(
                f"container {vmid}: its configuration passes in {shown(now)} and since this boot its cards are "
                f"{shown(right)}, run lxc_gpu for this host before the container is used"
            )
    return found


def shown(numbers: set[int]) -> str:
    return ", ".join(f"/dev/nvidia{number}" for number in sorted(numbers)) or "no card"


def main(root: Path = Path("/")) -> int:
    subprocess.run(["modprobe", "nvidia"], capture_output=True, timeout=120, check=False)
    expected = {address for addresses in wanted(root).values() for address in addresses}
    end = time.monotonic() + WAIT_S
    while not expected <= minors(root).keys() and time.monotonic() < end:
        time.sleep(0.2)
    known = minors(root)
    told = [*create(known), *findings(root, known)]
    for sentence in told:
        print(sentence, file=sys.stderr)
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
