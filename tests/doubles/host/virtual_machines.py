"""`qm` of a host tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_host.world import Result

if TYPE_CHECKING:
    from tests.doubles.host.kernel import TreeWorld


def qm(world: TreeWorld, argv: list[str]) -> Result | str:
    if argv[1] == "list":
        rows = [path.rsplit("/", 1)[1].removesuffix(".conf") for path in world.glob("/etc/pve/qemu-server/*.conf")]
        return "".join(f"{vmid:>10} {_status(world, vmid)}\n" for vmid in rows)
    text = world.read(f"/etc/pve/qemu-server/{argv[2]}.conf")
    if text is None:
        return Result(2, "", f"Configuration file 'nodes/x/qemu-server/{argv[2]}.conf' does not exist\n")
    if argv[1] == "status":
        return f"status: {_status(world, argv[2])}\n"
    if argv[1] == "config":
        return text.split("\n[", 1)[0]
    return Result(1, "", f"ERROR: unknown command 'qm {argv[1]}'\n")


def _status(world: TreeWorld, vmid: str) -> str:
    return "running" if world.exists(f"/run/qemu-server/{vmid}.pid") else "stopped"
