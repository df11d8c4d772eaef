"""What the serving actions share: the profile on the controller, and a node that is asked through Ansible's connection.

Actions are not given module_utils by Ansible's loader, so the package is taken from beside this folder.
"""

from __future__ import annotations

import base64
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

ANSIBLE = Path(__file__).resolve().parents[1]
if str(ANSIBLE / "module_utils") not in sys.path:
    sys.path.insert(0, str(ANSIBLE / "module_utils"))

from gpu_host.world import Result, answers_of, asking

try:
    from drafthouse.errors import DrafthouseError
    from drafthouse.serve.collect import folder_facts, gpus_of_smi, libavutil_majors, nvlink_of_topology, p2p_of_matrix
    from drafthouse.serve.facts import Facts, FolderFacts, HostFacts
    from drafthouse.serve.load import load_profile
    from drafthouse.serve.profile import Profile
except ImportError as missing:
    raise AnsibleActionFail(
        f"the controller's Python cannot import drafthouse ({missing}): install it with `pip install '.[provision]'` "
        "into the environment that ansible-playbook runs in"
    ) from missing

#: A driver that hangs must not hang the play.
_SMI = ("timeout", "30", "nvidia-smi")
_CARDS = "--query-gpu=name,memory.total,memory.free,compute_cap,driver_version"
_QUESTIONS = {
    "gpus": (*_SMI, _CARDS, "--format=csv,noheader,nounits"),
    "topology": (*_SMI, "topo", "-m"),
    "peers": (*_SMI, "topo", "-p2p", "r"),
    "shm": ("df", "--block-size=1", "--output=size", "/dev/shm"),
    "glibc": ("getconf", "GNU_LIBC_VERSION"),
    "libraries": ("ldconfig", "-p"),
}


def profile_of(arguments: dict[str, Any]) -> Profile:
    """The profile that a task names by `profile`, `profiles` (folder of names) and `overrides`.

    Raises:
        AnsibleActionFail: with the one sentence that `drafthouse serve` would print.
    """
    try:
        return load_profile(arguments["profile"], list(arguments.get("overrides") or ()), Path(arguments["profiles"]))
    except DrafthouseError as wrong:
        raise AnsibleActionFail(str(wrong)) from wrong


def command(action: ActionBase, argv: Sequence[str], stdin: bytes | None = None) -> Result:
    """Run a command on the node."""
    said = action._low_level_execute_command(shlex.join(argv), in_data=stdin)
    return Result(said["rc"], said["stdout"], said["stderr"])


def python_of(variables: dict[str, Any] | None) -> str:
    """The node's Python, as Ansible found it."""
    return str((variables or {}).get("ansible_facts", {}).get("python", {}).get("executable") or "python3")


def facts_of(action: ActionBase, python: str, own: bool, model: str, draft: str) -> Facts:
    """What the node knows; what it does not know stays unknown and is said.

    Args:
        python: the node's.
        own: the engine runs on the node's own libraries, not on those of an image.
        model, draft: folders on the node, empty for unknown ones.
    """
    questions = list(_QUESTIONS.values())
    answers = answers_of(questions, command(action, ["sh", "-c", asking(questions)]).out)
    said = {
        name: answers[argv].out if argv in answers and answers[argv].ok else "" for name, argv in _QUESTIONS.items()
    }
    gpus, driver = gpus_of_smi(said["gpus"])
    shm = said["shm"].split()
    host = HostFacts(
        gpus=gpus,
        driver=driver,
        nvlink=nvlink_of_topology(said["topology"]),
        p2p=p2p_of_matrix(said["peers"]),
        shm_bytes=int(shm[-1]) if shm and shm[-1].isdecimal() else None,
        glibc=(said["glibc"].split() or [None])[-1] if own else None,
        libavutil=libavutil_majors(said["libraries"]) if own else None,
    )
    return Facts(
        host=host,
        model=_folder(action, python, model) if model else None,
        draft=_folder(action, python, draft, round_trip=True) if draft else None,
    )


#: On the node: name -> (size, beginning) of what describes a checkpoint; of weights the header only, as base64.
_DESCRIBE = """
import base64, json, os, sys
most, found = 1 << 26, {}
for name in sorted(os.listdir(sys.argv[1])):
    weights = name.endswith(".safetensors")
    if weights or name.endswith(".json"):
        with open(os.path.join(sys.argv[1], name), "rb") as file:
            head = file.read(8 if weights else most)
            if weights:
                head += file.read(min(int.from_bytes(head, "little"), most))
            found[name] = (os.fstat(file.fileno()).st_size, base64.b64encode(head).decode())
print(json.dumps(found))
"""


def _folder(action: ActionBase, python: str, folder: str, round_trip: bool = False) -> FolderFacts:
    """As `drafthouse serve check` reads a folder: one of the same names and sizes is made here, without the weights."""
    said = command(action, [python, "-c", _DESCRIBE, folder])
    if not said.ok:
        return FolderFacts(problem=f"{folder} cannot be read on the node: {said.tail(1)}")
    with tempfile.TemporaryDirectory() as scratch:
        for name, (size, head) in json.loads(said.out).items():
            with (Path(scratch) / Path(name).name).open("wb") as file:
                file.write(base64.b64decode(head))
                file.truncate(size)
        return folder_facts(Path(scratch), round_trip=round_trip)
