"""The tasks of `fab`: arguments, help, and how a result is printed. Every task that changes something has `--dry-run`,
which prints the plan that would be carried out."""

from __future__ import annotations

import functools
import json as jsons
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from invoke import Context, Exit, task
from rich.console import Console, RenderableType

from drafthouse.errors import DrafthouseError
from drafthouse.fleet import operations, show
from drafthouse.fleet.controller import Controller
from drafthouse.fleet.inventory import Inventory
from drafthouse.fleet.jobs import jobs
from drafthouse.fleet.survey import rests, tidy
from drafthouse.fleet.survey import survey as look
from drafthouse.fleet.trust import scan
from drafthouse.fleet.trust import trust as pin
from drafthouse.progress import Progress, Silent, Terminal

T = TypeVar("T")
_HELP = {
    "inventory": "folder of hosts.yml, jobs/ and profiles/ (default: inventory)",
    "json": "print the result as JSON and nothing else",
    "dry_run": "print the plan and change nothing",
    "job": "name of a file in inventory/jobs/",
    "node": "name in the inventory",
    "from_": "node to leave",
    "to": "node to go to",
    "force": "do it although the old node answers",
}


def _task(**help_more: str) -> Callable[[Callable[..., None]], Any]:
    """`invoke.task` with our help texts; what a user can cause becomes one sentence and exit code 2."""

    def wrap(body: Callable[..., None]) -> Any:
        @functools.wraps(body)
        def run(*args: Any, **values: Any) -> None:
            try:
                body(*args, **values)
            except DrafthouseError as error:
                sentence = " ".join(str(error).split())
                raise Exit(f"error: {sentence}", code=error.exit_code) from error

        names = body.__code__.co_varnames[1 : body.__code__.co_argcount]
        known = {**_HELP, **help_more}
        return task(run, help={name: known[name] for name in names if name in known})

    return wrap


@contextmanager
def _open(inventory: str, json: bool) -> Iterator[Controller]:
    with Controller.open(Path(inventory), progress=_progress(json)) as controller:
        yield controller


def _progress(json: bool) -> Progress:
    return Silent() if json else Terminal(Console(stderr=True))


def _print(json: bool, value: Any, shown: RenderableType) -> None:
    if json:
        sys.stdout.write(jsons.dumps(value, indent=1, default=str) + "\n")
    else:
        Console(highlight=False).print(shown)


@_task(node="names or groups, comma separated (default: all)", job="also judge whether this job would fit")
def probe(c: Context, node: str = "all", job: str = "", inventory: str = "inventory", json: bool = False) -> None:
    """Say what nodes are: GPUs and topology, driver, disk, memory, engine, clock; and whether a job would fit.

    Examples:

      fab probe --node rented1

      fab probe --job train-qwen --json
    """
    from drafthouse.fleet.probe.fleet import inspect
    from drafthouse.fleet.probe.show import table

    fleet = Inventory.load(Path(inventory))
    found = inspect(fleet, fleet.nodes(node), _job(fleet, job) if job else None, _progress(json))
    reports = {name: one if isinstance(one, Exception) else one.report for name, one in found.items()}
    unfit = {
        name: [finding.sentence for finding in one.misfits]
        for name, one in found.items()
        if not isinstance(one, Exception) and one.misfits
    }
    value = {name: {"error": str(one)} if isinstance(one, Exception) else one.as_dict() for name, one in found.items()}
    _print(json, value, table(reports, unfit))
    failed = [name for name, one in found.items() if isinstance(one, Exception) or name in unfit]
    if failed:
        raise Exit(f"error: {', '.join(failed)}: see above", code=2)


@_task(
    fingerprint="what the provider or the machine's console says (SHA256:...)",
    replace="put it in the place of the key that was pinned before: the node was rebuilt",
)
def trust(c: Context, node: str, fingerprint: str = "", replace: bool = False, inventory: str = "inventory") -> None:
    """Pin the host key of a node. Without --fingerprint it is only shown: compare it with what the provider says.

    Examples:

      fab trust --node rented1

      fab trust --node rented1 --fingerprint SHA256:...
    """
    fleet = Inventory.load(Path(inventory))
    target = fleet.node(node)
    if not fingerprint:
        key = scan(target)
        print(
            f"{node} shows {key.type} {key.fingerprint}\n"
            f"pin it: fab trust --node {node} --fingerprint {key.fingerprint}"
        )
        return
    key = pin(target, fleet.known_hosts, fingerprint, replace=replace)
    print(f"{node}: {key.type} {key.fingerprint} is trusted")


@_task()
def plan(c: Context, job: str, node: str = "", inventory: str = "inventory", json: bool = False) -> None:
    """Print what `deploy` would do, and change nothing.

    Example:

      fab plan --job serve-qwen --node ct129
    """
    with _open(inventory, json) as controller:
        found = operations.deploy(controller, job, node=node or None, dry_run=True)
    _print(json, found.as_dict(), show.report(found))


@_task()
def deploy(
    c: Context,
    job: str,
    node: str = "",
    dry_run: bool = False,
    inventory: str = "inventory",
    json: bool = False,
) -> None:
    """Start a job, or put its changed file into effect; it counts once it has shown that it works.

    Examples:

      fab deploy --job serve-qwen --node ct129

      fab deploy --job extract-qwen --dry-run
    """
    with _open(inventory, json) as controller:
        found = _reported(json, lambda: operations.deploy(controller, job, node=node or None, dry_run=dry_run))
    _print(json, found.as_dict(), show.report(found))


@_task(job="only this job (default: all that live there)")
def migrate(
    c: Context,
    from_: str,
    to: str,
    job: str = "",
    dry_run: bool = False,
    inventory: str = "inventory",
    json: bool = False,
) -> None:
    """Move every job of a node to another: nothing is lost, nothing is done twice.

    Examples:

      fab migrate --from rented1 --to ct129 --dry-run

      fab migrate --from rented1 --to ct129
    """
    with _open(inventory, json) as controller:
        found = _reported(json, lambda: operations.migrate(controller, from_, to, job=job or None, dry_run=dry_run))
    _print(json, [one.as_dict() for one in found], _all(found))


@_task(job="only this job (default: all that lived there)")
def recover(
    c: Context,
    from_: str,
    to: str,
    job: str = "",
    force: bool = False,
    dry_run: bool = False,
    inventory: str = "inventory",
    json: bool = False,
) -> None:
    """The node is gone: fence off what may still run there and go on elsewhere.

    Example:

      fab recover --from rented1 --to ct129
    """
    with _open(inventory, json) as controller:
        found = _reported(
            json,
            lambda: operations.recover(controller, from_, to, job=job or None, force=force, dry_run=dry_run),
        )
    _print(json, [one.as_dict() for one in found], _all(found))


@_task()
def rollback(c: Context, job: str, dry_run: bool = False, inventory: str = "inventory", json: bool = False) -> None:
    """Go back to the newest earlier life of a job that worked: its image and settings, on its node.

    Example:

      fab rollback --job serve-qwen --dry-run
    """
    with _open(inventory, json) as controller:
        found = _reported(json, lambda: operations.rollback(controller, job, dry_run=dry_run))
    _print(json, found.as_dict(), show.report(found))


@_task()
def stop(c: Context, job: str, dry_run: bool = False, inventory: str = "inventory", json: bool = False) -> None:
    """End a job: ask it to stop, wait its grace, end exactly its processes.

    Example:

      fab stop --job extract-qwen
    """
    with _open(inventory, json) as controller:
        found = operations.stop(controller, job, dry_run=dry_run)
    _print(json, found.as_dict(), show.report(found))


@_task(node="names or groups, comma separated (default: all)")
def status(c: Context, node: str = "all", inventory: str = "inventory", json: bool = False) -> None:
    """Say where every job lives and what the nodes answer. Needs no node for what is recorded.

    Examples:

      fab status

      fab status --node rented --json
    """
    with _open(inventory, json) as controller:
        found = look(controller, node)
    _print(json, found.as_dict(), show.survey(found))


@_task(
    lines="how many of the last lines", follow="go on until it has ended", epoch="of which life (default: the current)"
)
def logs(
    c: Context, job: str, lines: int = 100, follow: bool = False, epoch: int = 0, inventory: str = "inventory"
) -> None:
    """Print what a job has said.

    Examples:

      fab logs --job train-qwen

      fab logs --job train-qwen --follow
    """
    with _open(inventory, True) as controller:
        life = operations.life_of(controller, job, epoch or None)
        runtime = controller.runtime(life, life.node)
        for line in runtime.logs(controller.connect(life.node), life.unit, lines=lines, follow=follow):
            sys.stdout.write(line.rstrip("\n") + "\n")
            sys.stdout.flush()


@_task(command="what to run; it is split into words as a shell would, and no shell sees it")
def exec(c: Context, job: str, command: str, inventory: str = "inventory") -> None:
    """Run a command where a job runs: in its container, or in its environment.

    Example:

      fab exec --job serve-qwen --command nvidia-smi
    """
    with _open(inventory, True) as controller:
        life = operations.life_of(controller, job, None)
        runtime = controller.runtime(life, life.node)
        answer = runtime.exec(controller.connect(life.node), life.unit, shlex.split(command))
    sys.stdout.write(answer.stdout)
    sys.stderr.write(answer.stderr)
    if answer.exit:
        raise Exit(code=answer.exit)


@_task(via="a node that has the image; default: the registry, then this machine")
def pull_image(c: Context, job: str, node: str = "", via: str = "", inventory: str = "inventory") -> None:
    """Bring a job's image to a node ahead of time, by digest; through ssh where it reaches no registry.

    Example:

      fab pull-image --job train-qwen --node rented1
    """
    with _open(inventory, False) as controller:
        print(operations.provide(controller, job, node or None, via or None))


@_task(node="names or groups, comma separated (default: all)", keep="ended units of a job to keep for their logs")
def gc(
    c: Context,
    node: str = "all",
    keep: int = 2,
    dry_run: bool = False,
    inventory: str = "inventory",
    json: bool = False,
) -> None:
    """Tidy up: end units whose life is over (a node that came back), remove what has long ended.

    Examples:

      fab gc --dry-run

      fab gc --node rented1
    """
    with _open(inventory, json) as controller:
        found = rests(look(controller, node), keep=keep)
        failures = [] if dry_run else tidy(controller, found)
    _print(json, {"rests": [rest.__dict__ for rest in found], "failures": failures}, show.tidying(found))
    if failures:
        raise Exit(f"error: {'; '.join(failures)}", code=2)


@_task(newest="how many entries")
def audit(c: Context, newest: int = 30, inventory: str = "inventory", json: bool = False) -> None:
    """Print who did what, newest last.

    Example:

      fab audit --newest 10
    """
    with _open(inventory, json) as controller:
        entries = operations.audit_entries(controller, newest)
    _print(json, entries, show.audit(entries))


@_task(reason="why; it is written into the audit log")
def unlock(c: Context, job: str, reason: str, inventory: str = "inventory") -> None:
    """Take a job's lock away from an operator who is gone.

    Example:

      fab unlock --job train-qwen --reason 'laptop died during deploy'
    """
    with _open(inventory, True) as controller:
        holder = controller.break_lock(job, reason)
    print(f"{job}: nobody held its lock" if holder is None else f"{job}: taken from {holder.who} ({holder.action})")


def _job(fleet: Inventory, name: str) -> Any:
    known = jobs(fleet)
    if name not in known:
        raise Exit(f"error: there is no job '{name}'; known are {', '.join(sorted(known)) or 'none'}", code=2)
    return known[name]


def _reported(json: bool, call: Callable[[], T]) -> T:
    """The result of `call`; of one that failed half-way, its report is printed before the sentence."""
    try:
        return call()
    except operations.OperationError as error:
        _print(json, error.report.as_dict(), show.report(error.report))
        raise


def _all(found: list[operations.Report]) -> RenderableType:
    from rich.console import Group

    return Group(*(show.report(one) for one in found))
