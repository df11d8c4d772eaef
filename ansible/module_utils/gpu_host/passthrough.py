"""Which NVIDIA cards a Proxmox container has: exactly these, by PCI address, through whatever minors they have now.

`plan` is pure; how its steps are taken stands in `passthrough_steps`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .binding import claim_fix, claim_text, expected_nodes, is_vfio, running_holder
from .container_nodes import Inside, inside_differs
from .facts import Container, HostFacts
from .lxc_config import NVIDIA_PREFIX, dev_change, dev_value, effective, nvidia_raw_lines, raw_lines
from .nvidia import nvidia_major
from .steps import Plan, Refusal, Step

#: First pve-container with `devN` (Proxmox VE 8.1).
DEVN_SINCE = (5, 0, 7)
DEVN_SINCE_PVE = (8, 1)
UVM_NODES = ("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


@dataclass(frozen=True)
class PassthroughDesired:
    """What the inventory asks for.

    Attributes:
        vmid: number of the container.
        addresses: PCI addresses of its cards.
        mode: access mode of the nodes inside; gid: group inside that owns them, None for root.
        form: `dev` (`devN` keys), `raw` (LXC keys), or `auto` for what this Proxmox VE knows.
        restart: a running container may be stopped and started for the change.
        stop_timeout_s: how long its services may take to stop.
        state: `present`, or `absent` for a container without any NVIDIA node.
        predict: cards that no driver drives yet get the minors that they will have; for check mode, where the steps
            of earlier roles were not taken.
    """

    vmid: int
    addresses: tuple[str, ...] = ()
    mode: str = "0666"
    gid: int | None = None
    form: str = "auto"
    restart: bool = False
    stop_timeout_s: int = 120
    state: str = "present"
    predict: bool = False


def plan(facts: HostFacts, desired: PassthroughDesired, inside: Inside | None = None) -> Plan:
    """Steps that give the container these cards and no other, or all reasons why it is left alone.

    Args:
        inside: what stands in the running container; None when it does not run or cannot be asked.
    """
    absent = desired.state == "absent"
    container = facts.container(desired.vmid)
    refusals = list(_refused_container(facts, desired, container))
    minors: dict[str, int] = {}
    if not absent:
        minors = _minors(facts, desired)
        for address in desired.addresses:
            refusals += _refused_card(facts, desired, address, minors)
        form_refusal = _refused_form(facts, desired)
        refusals += [form_refusal] if form_refusal else []
    nodes: dict[str, tuple[int, int]] = {}
    if not absent and not refusals:
        nodes = _nodes(facts, desired, minors)
        refusals += _refused_nodes(facts, desired, nodes)
    if refusals:
        return Plan(refusals=refusals)
    if container is None:
        return Plan(notes=[f"there is no container {desired.vmid} on {facts.hostname}, so nothing to take from it"])
    return _changes(facts, desired, container, nodes, inside)


def uses_dev_form(facts: HostFacts) -> bool:
    """Whether this Proxmox VE knows `devN`."""
    if facts.pve_container:
        return _version(facts.pve_container) >= DEVN_SINCE
    return _version(facts.pve) >= DEVN_SINCE_PVE


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("~")[0])[:3])


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refused_container(facts: HostFacts, desired: PassthroughDesired, container: Container | None) -> Iterator[Refusal]:
    where = f"container {desired.vmid} on {facts.hostname}"
    if not facts.pve:
        yield Refusal(
            "not-proxmox",
            "this is no Proxmox VE host",
            where,
            "correct lxc_gpu_host, or the kind of the host in gpu_host_kind",
        )
        return
    if facts.quorate is False:
        yield Refusal(
            "no-quorum",
            "the cluster has no quorum, so /etc/pve takes no writes",
            where,
            "bring the other nodes back, or (one node left on purpose) `pvecm expected 1`, and run again",
        )
    if container is None and desired.state == "absent":
        return
    if container is None:
        have = ", ".join(str(c.vmid) for c in facts.containers) or "none"
        yield Refusal(
            "no-such-container",
            f"there is no container of this number here (there are: {have})",
            where,
            "create or migrate it first, or correct lxc_gpu_vmid or lxc_gpu_host",
        )
    elif container.lock:
        yield Refusal(
            "container-locked",
            f"the container is locked ({container.lock})",
            where,
            f"let that task end, or `pct unlock {desired.vmid}` when it is dead",
        )


def _refused_form(facts: HostFacts, desired: PassthroughDesired) -> Refusal | None:
    if desired.form != "dev" or uses_dev_form(facts):
        return None
    return Refusal(
        "no-dev-keys",
        f"pve-container {facts.pve_container or f'of Proxmox VE {facts.pve}'} does not know devN keys",
        f"container {desired.vmid} on {facts.hostname}",
        "set lxc_gpu_form to `auto` or `raw`, or upgrade to Proxmox VE 8.1 or later",
    )


def _refused_card(
    facts: HostFacts, desired: PassthroughDesired, address: str, minors: Mapping[str, int]
) -> Iterator[Refusal]:
    function = facts.function(address)
    where = f"container {desired.vmid}: {address}"
    if function is None or not function.is_gpu:
        here = ", ".join(f.address for f in facts.functions if f.is_gpu) or "none"
        yield Refusal(
            "no-such-card",
            f"there is no NVIDIA card at this address (there are: {here})",
            where,
            "correct lxc_gpu_addresses, or put the card back",
        )
        return
    vmid = running_holder(facts, address)
    if vmid is not None:
        yield Refusal(
            "held-by-running-vm",
            f"VM {vmid} runs with this card",
            where,
            f"shut the VM down (`qm shutdown {vmid}`), or choose another card",
        )
    for claim in facts.claims_on(address):
        yield Refusal(
            "held-by-vm",
            claim_text(claim),
            f"{where} ({claim.file}: {claim.key})",
            f"{claim_fix(claim)}, or choose another card",
        )
    if address not in minors:
        gpu = facts.gpu(address)
        state = f"is on {function.driver}" if function.driver != "nvidia" else "has no minor"
        yield Refusal(
            "card-not-driven",
            f"the card {state}{', its driver could not initialise it' if gpu and not is_vfio(function.driver) else ''}",
            where,
            "set its owner to `host` in gpu_host_gpus and run the role vfio_binding first; "
            "if it was, `dmesg | grep NVRM` tells why the driver does not take it",
        )


def _refused_nodes(
    facts: HostFacts, desired: PassthroughDesired, nodes: Mapping[str, tuple[int, int]]
) -> Iterator[Refusal]:
    """A container with `devN` does not start without the node; a bind mount of the wrong thing starts and fails."""
    if desired.predict:
        return  # The role vfio_binding has only said that it would make them.
    standing = {node.path: node for node in facts.nodes}
    fix = "run the role vfio_binding, which makes the nodes, or `systemctl restart drafthouse-nvidia-nodes`"
    for path in UVM_NODES:
        if path not in nodes and desired.addresses:
            yield Refusal("node-missing", "nvidia-uvm is not loaded, so it has no major", path, fix)
    for path, (major, minor) in nodes.items():
        node = standing.get(path)
        if node is None:
            yield Refusal("node-missing", "the node does not exist on the host", path, fix)
        elif node.kind != "char":
            yield Refusal("node-is-a-file", f"a {node.kind} stands in the place of the device", path, fix)
        elif (node.major, node.minor) != (major, minor):
            yield Refusal(
                "node-stale", f"the node is {node.major}:{node.minor}, its driver is at {major}:{minor}", path, fix
            )


# -- what the container gets -------------------------------------------------------------------------------------------


def _minors(facts: HostFacts, desired: PassthroughDesired) -> dict[str, int]:
    """Address -> minor, as the driver says now; with `predict`, the first free ones for cards that it will get."""
    known = {gpu.address: gpu.minor for gpu in facts.gpus if gpu.minor is not None}
    if desired.predict:
        free = (minor for minor in range(len(known) + len(desired.addresses)) if minor not in known.values())
        for address in sorted(set(desired.addresses) - set(known)):
            known[address] = next(free)
    return {address: known[address] for address in desired.addresses if address in known}


def _nodes(facts: HostFacts, desired: PassthroughDesired, minors: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Path -> numbers of everything that the container needs; without the uvm nodes while their major is unknown."""
    return expected_nodes([minors[address] for address in desired.addresses], facts.majors)


def _changes(
    facts: HostFacts,
    desired: PassthroughDesired,
    container: Container,
    nodes: Mapping[str, tuple[int, int]],
    inside: Inside | None,
) -> Plan:
    result = Plan(notes=list(_notes(facts, desired, container, nodes)))
    raw = desired.form == "raw" or (desired.form == "auto" and not uses_dev_form(facts))
    paths = [*nodes, *(path for path in UVM_NODES if nodes and path not in nodes)]
    as_dev = {} if raw else {path: dev_value(path, desired.mode, desired.gid) for path in paths}
    as_raw = raw_lines(nodes) if raw else []
    steps = [*_dev_steps(container, as_dev), *_raw_steps(facts, container, as_raw)]
    leftover = _empty_files(desired.vmid, inside)
    stale = inside_differs(nodes, inside) if container.running and inside is not None else ""
    if not steps and not leftover and not stale:
        return result
    why = "its configuration changes" if steps else stale or "an empty file stood in the place of a device"
    if not container.running:
        result.steps = steps
    elif desired.restart:
        timeout = {"timeout_s": desired.stop_timeout_s}
        stop = Step("container-stop", str(desired.vmid), f"{why}, and it may be restarted", timeout)
        start = Step("container-start", str(desired.vmid), "it ran before", {**timeout, "nodes": _numbers(nodes)})
        result.steps = [*leftover, stop, *steps, start]
    else:
        result.steps = steps
        result.notes.append(
            f"container {desired.vmid} runs and has to be restarted ({why}): `pct reboot {desired.vmid}`, "
            "or set lxc_gpu_restart to true"
        )
    return result


def _dev_steps(container: Container, wanted: Mapping[str, str]) -> list[Step]:
    change = dev_change(effective(container), wanted)
    if change is None:
        return []
    told = [f"{key}={value}" for key, value in change.set.items()] + [f"no {key}" for key in change.delete]
    detail = {
        "set": dict(change.set),
        "delete": list(change.delete),
        "undo_set": dict(change.undo_set),
        "undo_delete": list(change.undo_delete),
    }
    return [Step("pct-set", str(container.vmid), ", ".join(told), detail)]


def _raw_steps(facts: HostFacts, container: Container, wanted: list[str]) -> list[Step]:
    ours = {nvidia_major(facts.majors), *(n for name, n in facts.majors.items() if name.startswith("nvidia"))}
    have = nvidia_raw_lines(container.entries, facts.majors, ours)
    drop = [line for line in have if line not in wanted]
    add = [line for line in wanted if line not in have]
    if not drop and not add:
        return []
    why = "; ".join([f"- {line}" for line in drop] + [f"+ {line}" for line in add])
    return [Step("raw-lines", container.file, why, {"drop": drop, "add": add})]


def _numbers(nodes: Mapping[str, tuple[int, int]]) -> dict[str, list[int]]:
    return {path: list(numbers) for path, numbers in nodes.items()}


def _empty_files(vmid: int, inside: Inside | None) -> list[Step]:
    """What a bind mount with `create=file` left inside: an empty file that outlives the container's restart."""
    return [
        Step("remove-inside", f"{vmid}:{node.path}", "a file stands in the place of a device", {"path": node.path})
        for node in (inside or {}).values()
        if node.kind == "file"
    ]


def _notes(
    facts: HostFacts, desired: PassthroughDesired, container: Container, nodes: Mapping[str, tuple[int, int]]
) -> Iterator[str]:
    undriven = [a for a in desired.addresses if facts.gpu(a) is None] if desired.state == "present" else []
    if undriven:
        yield f"the minors of {', '.join(undriven)} are a forecast: the host's driver does not drive them yet"
    for other in facts.containers:
        shared = {entry.path for entry in other.entries if entry.section == "main"} & {
            path for path in nodes if path not in UVM_NODES and path != f"{NVIDIA_PREFIX}ctl"
        }
        if other.vmid != desired.vmid and shared:
            yield f"container {other.vmid} lists {', '.join(sorted(shared))} as well: both see the same card"
    snapshots = sorted({e.section for e in container.entries if e.path.startswith(NVIDIA_PREFIX) and " " in e.section})
    if snapshots:
        yield f"a rollback of container {container.vmid} to {', '.join(snapshots)} brings old NVIDIA entries back"
