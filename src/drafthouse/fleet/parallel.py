"""One call for many nodes, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from drafthouse.errors import DrafthouseError, FleetError
from drafthouse.fleet.node import Node
from drafthouse.progress import Progress, Silent

T = TypeVar("T")
AT_ONCE = 8


def each(
    nodes: Sequence[Node], call: Callable[[Node], T], progress: Progress | None = None, description: str = "nodes"
) -> dict[str, T | FleetError]:
    """What `call` returns for every node, in their order; for a node where it fails, the error in its place.

    An error that is no DrafthouseError is a defect: it is raised, when all nodes have had their turn.
    """
    answers: dict[str, T | FleetError] = {}
    defect: Exception | None = None
    with (
        ThreadPoolExecutor(AT_ONCE, thread_name_prefix="node") as pool,
        (progress or Silent()).task(description, float(len(nodes))) as task,
    ):
        names = {pool.submit(call, node): node.name for node in nodes}
        try:
            for future in as_completed(names):
                name = names[future]
                try:
                    answers[name] = future.result()
                except FleetError as error:
                    answers[name] = error
                except DrafthouseError as error:
                    answers[name] = FleetError(str(error), where=name)
                except Exception as error:
                    defect = error
                task.advance(1, name)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if defect is not None:
        raise defect
    return {node.name: answers[node.name] for node in nodes}
