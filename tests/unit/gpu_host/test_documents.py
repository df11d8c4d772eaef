"""docs/provisioning.md says what the code says: sentences, names of rules, tests, variables, commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpu_host import binding, boot_files, driver, passthrough, preflight, runfile, userspace
from gpu_host.gather import gather
from gpu_host.steps import Plan
from gpu_host.userspace_state import Probe
from tests.doubles.host_tree import HostTree
from tests.unit.gpu_host import test_driver as drivers
from tests.unit.gpu_host import test_inventory as inventories
from tests.unit.gpu_host import test_preflight as preflights
from tests.unit.gpu_host import test_userspace as libraries
from tests.unit.gpu_host.host_facts import HOST_CARDS, card, kpro5, kpro5_bound, nodes, wants
from tests.unit.gpu_host.test_passthrough import BOTH

REPOSITORY = Path(__file__).parents[3]
ANSIBLE = REPOSITORY / "ansible"
CODE = ANSIBLE / "module_utils/gpu_host"
ROLES = ANSIBLE / "roles"
DOCUMENT = REPOSITORY / "docs/provisioning.md"
DOCUMENTS = (DOCUMENT, REPOSITORY / "ansible/README.md", REPOSITORY / "inventory/README.md")
ROWS = 30

_RULE = re.compile(r"(?<![\w.])(?<!: )\[([a-z][a-z0-9-]+)\](?![(:\w])")
_TEST = re.compile(r"`((?:\w+/)*test_\w+)\.py((?:::\w+)+)`")


# -- what the planners say, by row of the catalogue --------------------------------------------------------------------


def _refusals(made: Plan, *rules: str) -> list[str]:
    """The refusals of these rules as the terminal shows them, the first of each."""
    first = {refusal.rule: refusal for refusal in reversed(made.refusals)}
    return [f"`[{rule}]` {first[rule].sentence()}" for rule in rules]


def _steps(made: Plan, *actions: str) -> list[str]:
    first = {step.action: step for step in reversed(made.steps)}
    return [first[action].sentence() for action in actions]


def _on_kernel(version: str, kernel: str, *others: str) -> Plan:
    host = replace(drivers.BARE, kernel=kernel, kernels=(*others, kernel), headers=())
    return driver.plan(host, drivers.EMPTY, replace(drivers.DESIRED, version=version))


def _next_kernel() -> list[str]:
    host = replace(drivers.driven(), kernels=(drivers.KERNEL, "7.0.2-1-pve"))
    told = _refusals(driver.plan(host, drivers.settled(), drivers.DESIRED), "next-kernel-unfit")
    pinned = driver.plan(host, drivers.settled(), replace(drivers.DESIRED, pin_kernel=True))
    return [*told, *_steps(pinned, "pin-kernel")]


def _headers() -> list[str]:
    packaged = replace(drivers.BARE, header_packages=("proxmox-headers-7.0",))
    loose = replace(drivers.BARE, headers=(drivers.KERNEL, "7.0.2-custom"))
    return [
        *_steps(driver.plan(packaged, drivers.EMPTY, drivers.DESIRED), "apt-remove"),
        *_refusals(driver.plan(loose, drivers.EMPTY, drivers.DESIRED), "headers-unfit"),
    ]


def _packaged() -> list[str]:
    state = replace(drivers.EMPTY, packages={"nvidia-kernel-dkms": "550.163.01-2"})
    return _refusals(driver.plan(drivers.BARE, state, drivers.DESIRED), "packaged-driver")


def _in_use() -> list[str]:
    host = replace(drivers.driven(version=drivers.OLD), users={drivers.CARD: ("4711 python3",)})
    return _refusals(driver.plan(host, drivers.settled(), drivers.DESIRED), "driver-in-use")


def _secure_boot() -> list[str]:
    host = replace(drivers.BARE, secure_boot=True)
    return _refusals(driver.plan(host, drivers.EMPTY, drivers.DESIRED), "secure-boot")


def _aborted(folder: Path) -> list[str]:
    log = "ERROR: The Nouveau kernel driver is currently in use by your system.\n"
    return [runfile.reason(HostTree(folder).file(runfile.LOG, log).world).splitlines()[0]]


def _probed(rule: str, **probe: Any) -> list[str]:
    answer = replace(Probe(libraries.SEEN, nvml_ok=True, cuda=0), **probe)
    return _refusals(userspace.plan(libraries.HOST, libraries.settled(probe=answer), libraries.DESIRED), rule)


def _other_cards() -> list[str]:
    seen = Probe(libraries.SEEN.replace("41)", "42)"), nvml_ok=True, cuda=0)
    given = replace(libraries.DESIRED, addresses=(libraries.CARD,))
    return _refusals(userspace.plan(libraries.HOST, libraries.settled(probe=seen), given), "wrong-cards")


def _rented_mismatch() -> list[str]:
    host = replace(libraries.HOST, driver_version="570.124.04")
    of_image = libraries.libraries("570.124.06"), libraries.links("570.124.06")
    state = libraries.settled(libraries=of_image[0], resolved=of_image[1])
    return _refusals(
        userspace.plan(host, state, replace(libraries.VERIFY, minimum="570.86.10")), "libraries-do-not-fit"
    )


def _host_differs() -> list[str]:
    host = replace(libraries.HOST, driver_version="580.173.02")
    fleet = inventories.fleet()
    fleet["ct129"]["nvidia_driver_version"] = "580.178"
    return [
        *_refusals(userspace.plan(host, libraries.ROOMY, libraries.DESIRED), "host-driver-differs"),
        *_refusals(Plan(refusals=inventories.judge(fleet)), "two-versions"),
    ]


def _exact_packages() -> list[str]:
    names = dict.fromkeys(libraries.NAMES, (f"{libraries.VERSION}-1ubuntu1",))
    there = userspace.plan(libraries.HOST, replace(libraries.ROOMY, available=names), libraries.BY_APT)
    dropped = {**names, libraries.NAMES[0]: ("580.173.02-1ubuntu1",)}
    gone = userspace.plan(libraries.HOST, replace(libraries.ROOMY, available=dropped), libraries.BY_APT)
    return [*_steps(there, "apt-install", "apt-hold"), *_refusals(gone, "no-exact-version")]


def _passed(rule: str, **changes: Any) -> list[str]:
    return _refusals(passthrough.plan(kpro5_bound(**changes), BOTH), rule)


def _stale_inside(folder: Path) -> list[str]:
    tree = preflights.inside(folder).node("/dev/nvidia-uvm", 511, 0)
    return _refusals(preflight.judge(gather(tree.world), preflights.CONTAINER), "card-not-here")


def _undeclared() -> list[str]:
    rule = boot_files.rules_text({"0000:81:00.0": "vfio-pci"}).splitlines()[-1]
    fewer = replace(wants(), gpus=wants().gpus[:3])
    return [rule, *_refusals(binding.plan(kpro5(), fewer), "undeclared-card")]


def _open() -> list[str]:
    host = kpro5_bound(users={HOST_CARDS[1]: ("4711 python3",)})
    return _refusals(binding.plan(host, wants({HOST_CARDS[1]: "vm"})), "in-use")


def _no_uvm_node() -> list[str]:
    standing = tuple(node for node in nodes(2) if node.path != "/dev/nvidia-uvm")
    return _steps(binding.plan(kpro5_bound(nodes=standing), wants()), "nodes")


def _groups() -> list[str]:
    disks = replace(card("0000:83:00.0", "00ac", 15)[0], vendor="1000", class_code="010700", driver="mpt3sas")
    shared = replace(card(HOST_CARDS[1], "2230", 15)[0], group=15)
    others = tuple(f for f in kpro5().functions if f.address != HOST_CARDS[1])
    return [
        *_refusals(binding.plan(kpro5(functions=(*kpro5().functions, disks)), wants()), "group-not-viable"),
        *_refusals(binding.plan(kpro5(functions=(*others, shared)), wants()), "shared-group"),
    ]


#: Row of the catalogue -> what the document quotes; rows without a sentence are made impossible by a mechanism.
SAID: dict[int, Callable[[Path], list[str]]] = {
    1: lambda _: _refusals(_on_kernel("580.126.09", "6.19.2-1-pve", drivers.KERNEL), "kernel-unfit"),
    2: lambda _: _refusals(_on_kernel("580.126.18", "7.0.2-1-pve"), "kernel-unfit"),
    3: lambda _: [r.what for r in _on_kernel("580.119.02", "7.0.9-1-pve").refusals if r.rule == "kernel-unfit"],
    4: lambda _: _packaged(),
    5: lambda _: _next_kernel(),
    6: lambda _: _headers(),
    7: lambda _: _probed("cuda-999", cuda=999),
    8: lambda _: _passed("node-missing", majors={"nvidia": 195}),
    10: _stale_inside,
    11: lambda _: _passed("node-stale", nodes=nodes(2, uvm=510)),
    12: lambda _: _steps(userspace.plan(libraries.HOST, libraries.ROOMY, libraries.DESIRED), "runfile"),
    13: lambda _: _probed(
        "version-mismatch", nvml="Failed to initialize NVML: Driver/library version mismatch", nvml_ok=False
    ),
    14: lambda _: _rented_mismatch(),
    15: lambda _: _host_differs(),
    16: lambda _: _exact_packages(),
    17: lambda _: _in_use(),
    19: lambda _: _passed("no-quorum", quorate=False),
    20: lambda _: _undeclared(),
    21: lambda _: _open(),
    22: lambda _: _other_cards(),
    23: lambda _: _passed("card-not-driven", gpus=(replace(kpro5_bound().gpus[0], minor=None), kpro5_bound().gpus[1])),
    24: lambda _: _passed("node-missing", nodes=nodes(2)[1:]),
    25: lambda _: _passed("node-is-a-file", nodes=(replace(nodes(2)[0], kind="file"), *nodes(2)[1:])),
    26: lambda _: _secure_boot(),
    27: lambda _: _no_uvm_node(),
    28: lambda _: _probed("not-permitted", nvml="Failed to initialize NVML: Insufficient Permissions", nvml_ok=False),
    29: lambda _: _groups(),
    30: _aborted,
}


# -- the document ------------------------------------------------------------------------------------------------------


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_text(path))


@cache
def _rows() -> dict[int, str]:
    """The rows of the catalogue by number, as Markdown without the escapes that a table needs."""
    lines = re.findall(r"^\| (\d+) \|(.*)\|$", _text(DOCUMENT), re.MULTILINE)
    assert len({number for number, _ in lines}) == len(lines), "a row stands twice"
    return {int(number): row.replace("\\|", "|") for number, row in lines}


def _cited(text: str) -> list[tuple[Path, tuple[str, ...]]]:
    """Tests that a text cites, as a file and the names in it: `gpu_host/test_x.py::test_y` is below tests/unit."""
    assert text.count(".py::") == len(_TEST.findall(text)), "a citation cannot be read"
    found = []
    for name, parts in _TEST.findall(text):
        tier = "" if name.split("/")[0] in ("vm", "roles", "containers") else "unit/"
        found.append((REPOSITORY / f"tests/{tier}{name}.py", tuple(parts.split("::")[1:])))
    return found


def _first_argument(call: ast.Call, rule_names: set[str]) -> set[str]:
    """The rule that a call names; a variable `rule` stands for every name that its module gives it."""
    argument = call.args[0]
    if isinstance(argument, ast.Constant):
        return {str(argument.value)}
    if isinstance(argument, ast.IfExp):
        return {str(branch.value) for branch in (argument.body, argument.orelse) if isinstance(branch, ast.Constant)}
    if isinstance(argument, ast.Name) and argument.id == "rule":
        return rule_names
    # A diagnosis goes on under its own name, and one of an unknown CUDA error is named by its number.
    assert ast.unparse(argument) in ("found.name", "f'cuda-{code}'"), ast.unparse(argument)
    return set()


def _given_to_rule(tree: ast.Module) -> Iterator[str]:
    """Texts that a module assigns to a variable `rule`, alone or first of several, or passes as a parameter `rule`."""
    makers = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[0].arg == "rule"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers:
            yield from _first_argument(node, set())
        if not isinstance(node, ast.Assign):
            continue
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            target, value = target.elts[0], value.elts[0]
        if isinstance(target, ast.Name) and target.id == "rule" and isinstance(value, ast.Constant):
            yield str(value.value)


@cache
def _rules_of_the_code() -> frozenset[str]:
    found: set[str] = set()
    for file in sorted(CODE.glob("*.py")):
        tree = _tree(file)
        given = set(_given_to_rule(tree))
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("Refusal", "Diagnosis")
            ):
                found |= _first_argument(node, given)
    return frozenset(found)


def _explained() -> list[str]:
    """Rules that stand in the first column of a table with the heading `rule`."""
    names = []
    for table in re.findall(r"^\| rule \|.*\n\|---.*\n((?:\|.*\n)+)", _text(DOCUMENT), re.MULTILINE):
        for line in table.splitlines():
            names += re.findall(r"`([a-z0-9-]+)`", line.split("|")[1])
    return names


def test_the_catalogue_has_thirty_rows() -> None:
    assert sorted(_rows()) == list(range(1, ROWS + 1))
    for number, row in _rows().items():
        assert re.search(r"\(https://github\.com/[\w.-]+/[\w.-]+/issues/\d+\)", row), f"row {number} cites no report"
        assert _cited(row), f"row {number} has no proof"


@pytest.mark.parametrize("number", sorted(SAID))
def test_sentences_are_the_planners_own(number: int, tmp_path: Path) -> None:
    for sentence in SAID[number](tmp_path):
        assert sentence in _rows()[number]


def test_the_reader_of_rules_finds_all_kinds() -> None:
    """One of each way in which the code names a rule."""
    assert {"no-quorum", "held-by-vm", "group-not-viable", "next-kernel-unfit", "cuda-999"} <= _rules_of_the_code()


def test_every_rule_of_the_code_is_explained_once() -> None:
    names = _explained()
    assert sorted(set(names)) == sorted(_rules_of_the_code())
    assert len(names) == len(set(names))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.parent.name)
def test_every_rule_that_is_named_exists(document: Path) -> None:
    assert set(_RULE.findall(_text(document))) <= _rules_of_the_code()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.parent.name)
def test_every_cited_test_exists(document: Path) -> None:
    for file, names in _cited(_text(document)):
        scope: list[ast.stmt] = _tree(file).body
        for name in names:
            found = [n for n in scope if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name]
            assert found, f"{file.name} has no {name}"
            scope = found[0].body


# -- variables and commands --------------------------------------------------------------------------------------------


@cache
def _options() -> dict[str, dict[str, Any]]:
    """Role -> its variables, as argument_specs.yml documents them."""
    return {
        file.parents[1].name: yaml.safe_load(_text(file))["argument_specs"]["main"]["options"]
        for file in sorted(ROLES.glob("*/meta/argument_specs.yml"))
    }


def variables_page() -> str:
    """The text of docs/provisioning_variables.md."""
    lines = [
        "# Variables of provisioning",
        "",
        "What has neither a default nor `required` may be left out. Made from the roles' `meta/argument_specs.yml`,",
        "compared with them by a test, and renewed by",
        "",
        "```sh",
        "PYTHONPATH=ansible/module_utils python -m tests.unit.gpu_host.test_documents > docs/provisioning_variables.md",
        "```",
    ]
    for role, options in _options().items():
        lines += ["", f"## {role}", "", "| variable | default | what it is |", "|---|---|---|"]
        for name, option in options.items():
            default = "required" if option.get("required") else _shown(option["default"]) if "default" in option else ""
            choices = f" One of {', '.join(map(str, option['choices']))}." if "choices" in option else ""
            lines.append(f"| `{name}` | {default} | {_prose(option['description'])}{choices} |")
    return "\n".join(lines) + "\n"


def _shown(default: Any) -> str:
    text = default if isinstance(default, str) else yaml.safe_dump(default, default_flow_style=True, width=1000)
    text = text.removesuffix("\n...\n").strip() or '""'
    return f"`{text}`".replace("|", "\\|")


def _prose(description: str | list[str]) -> str:
    text = description if isinstance(description, str) else " ".join(description)
    return re.sub(r"\b[CI]\(([^()]*)\)", r"`\1`", text).strip().replace("|", "\\|")


def test_the_page_of_variables_is_up_to_date() -> None:
    assert _text(REPOSITORY / "docs/provisioning_variables.md") == variables_page()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.parent.name)
def test_every_variable_that_is_named_exists(document: Path) -> None:
    known = {name for options in _options().values() for name in options}
    prefixes = "|".join((*_options(), "gpu_host"))
    named = set(re.findall(rf"(?<![\w/.-])(?:{prefixes})_\w+", _text(document)))
    assert named <= known


def test_every_command_names_what_exists() -> None:
    hosts = {file.stem for file in (REPOSITORY / "inventory/host_vars").glob("*.yml")}
    tags = set(
        re.findall(r"[\[ ](\w+)[\],]", " ".join(re.findall(r"tags: (\[.*\])", _text(ANSIBLE / "playbooks/reset.yml"))))
    )
    commands = [c for path in DOCUMENTS for c in re.findall(r"ansible-playbook ([^`\n#]*)", _text(path))]
    assert len(commands) > 5
    for command in commands:
        words = command.split()
        assert (ANSIBLE / words[0]).is_file(), command
        for option, known in (("-l", hosts), ("--tags", tags)):
            if option in words:
                assert words[words.index(option) + 1] in known, command


if __name__ == "__main__":
    print(variables_page(), end="")
