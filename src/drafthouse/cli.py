"""`drafthouse …`: the first of two doors. One function a verb; the work is done in the rooms."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drafthouse import __version__
from drafthouse.config import load
from drafthouse.corpus.cli import app as corpus_sources_app
from drafthouse.dash.cli import dash
from drafthouse.errors import DrafthouseError
from drafthouse.loop.children import QUIET, end_with_parent
from drafthouse.measure.roofline.cli import roofline
from drafthouse.serve.cli import app as serve_app
from drafthouse.verbs import AsJson, progress_of, say

if TYPE_CHECKING:
    from drafthouse.loop.folder import RunFolder

app = typer.Typer(
    name="drafthouse",
    help="""From a bare GPU host to a served model with a speculative drafter trained for it.

    [dim]Examples:[/dim]

      drafthouse demo

      drafthouse corpus build --help
    """,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
corpus_app = typer.Typer(
    no_args_is_help=True,
    help="""Conversations, their tokens, and the target's own answers.

    [dim]Example:[/dim]

      drafthouse corpus build --out runs/demo
    """,
)
corpus_app.add_typer(corpus_sources_app)  # without a name: its verbs stand beside those of a run
target_app = typer.Typer(
    no_args_is_help=True,
    help="""The served model, and the small one of the package.

    [dim]Example:[/dim]

      drafthouse target show
    """,
)
states_app = typer.Typer(
    no_args_is_help=True,
    help="""Hidden states of the target, extracted by workers that may die.

    [dim]Example:[/dim]

      drafthouse states status --out runs/demo
    """,
)
drafter_app = typer.Typer(
    no_args_is_help=True,
    help="""Train drafters and check what was exported.

    [dim]Example:[/dim]

      drafthouse drafter train ours --out runs/demo
    """,
)
store_app = typer.Typer(
    no_args_is_help=True,
    help="""Object stores.

    [dim]Example:[/dim]

      drafthouse store probe runs/demo/store
    """,
)
for name, group in (
    ("corpus", corpus_app),
    ("target", target_app),
    ("states", states_app),
    ("drafter", drafter_app),
    ("store", store_app),
    ("serve", serve_app),
):
    app.add_typer(group, name=name)

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; may be repeated."),
]
RunFile = Annotated[
    Path | None,
    typer.Option("--file", metavar="RUN.yml", help="Run file to begin with; default: the demo's."),
]
Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Run folder.")]
Worker = Annotated[str | None, typer.Option("--worker", help="Name of this worker; default: host, rank and process.")]
DEFAULT_OUT = Path("runs/demo")


@target_app.command("train-tiny")
def train_tiny_verb(
    out: Annotated[Path, typer.Argument(help="Model folder to write.")],
    file: Annotated[Path | None, typer.Option("--file", help="Recipe (YAML); default: the package's own.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Train a small Gated-DeltaNet hybrid from text that every machine has.

    [dim]Examples:[/dim]

      drafthouse target train-tiny runs/tiny --set training.steps=300 --set training.rows=8

      drafthouse target train-tiny runs/tiny --set device=cuda
    """
    from drafthouse.loop.tiny import EMBEDDED_RECIPE, TargetSettings, train_embedded

    settings = load(TargetSettings, file or EMBEDDED_RECIPE, overrides or [])
    report = train_embedded(settings, out, progress_of(as_json))
    guard = report["guard"]
    say(
        report,
        as_json,
        f"{out}: {report['parameters']:,} parameters, {report['tokens']:,} tokens in {report['seconds']} s; held-out"
        f" loss {report['held_out']['assistant_loss']:.3f}, exact match {guard['exact_match']:.0%}, repeated 4-grams"
        f" {guard['repeated_4grams']:.0%}",
    )


@target_app.command("show")
def target_show(
    path: Annotated[str, typer.Argument(help="Model folder, or 'embedded'.")] = "embedded",
    as_json: AsJson = False,
) -> None:
    """Say what a target is: identity, layers, sizes.

    [dim]Examples:[/dim]

      drafthouse target show

      drafthouse target show /models/Qwen3.6-27B --json
    """
    from drafthouse.loop.tiny import EMBEDDED, embedded_target
    from drafthouse.target import Target

    target = Target.load(embedded_target() if path == EMBEDDED else path)
    kinds = {kind: target.layer_types.count(kind) for kind in sorted(set(target.layer_types))}
    facts = {
        "identity": target.identity,
        "parameters": target.parameters,
        "layers": target.num_layers,
        "layer_types": kinds,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "eos_ids": list(target.eos_ids),
        "mask_token_id": target.mask_token_id,
    }
    say(facts, as_json, "\n".join(f"{key:<14} {value}" for key, value in facts.items()))


@corpus_app.command("build")
def corpus_build(
    out: Out = DEFAULT_OUT, file: RunFile = None, overrides: Overrides = None, as_json: AsJson = False
) -> None:
    """Begin a run: turn its sources into token shards with proven loss masks.

    [dim]Examples:[/dim]

      drafthouse corpus build --out runs/demo

      drafthouse corpus build --out runs/small --set corpus.samples=256 --json
    """
    from drafthouse.loop import steps
    from drafthouse.loop.folder import RunFolder

    run = RunFolder.begin(out, file, overrides or [])
    target = steps.load_target(run)
    steps.check_fit(run, target)
    run.keep()
    manifest = steps.build_corpus(run, target, progress_of(as_json))
    kinds = ", ".join(f"{kind} {count.samples}" for kind, count in manifest.kinds.items())
    drops = ", ".join(f"{number} {reason}" for reason, number in manifest.drops.items()) or "none"
    say(
        manifest.model_dump(mode="json", by_alias=True),
        as_json,
        f"{manifest.samples} samples, {manifest.tokens} tokens in {len(manifest.shards)} shards ({kinds});"
        f" dropped: {drops}",
    )


@corpus_app.command("answer")
def corpus_answer(
    out: Out = DEFAULT_OUT, worker: Worker = None, overrides: Overrides = None, as_json: AsJson = False
) -> None:
    """Let the target answer the corpus itself, as one of any number of workers.

    [dim]Examples:[/dim]

      drafthouse corpus answer --out runs/demo

      drafthouse corpus answer --out runs/demo --worker second &
    """
    from drafthouse.loop import steps

    run = _run(out, overrides)
    target = steps.load_target(run)
    job = steps.answering(run)
    committed = job.work(target, worker, progress_of(as_json))
    say({"committed": committed}, as_json, f"{committed} shards answered by this worker")


@corpus_app.command("seal")
def corpus_seal(out: Out = DEFAULT_OUT, as_json: AsJson = False) -> None:
    """Make the finished answers a corpus that states can be extracted from.

    [dim]Example:[/dim]

      drafthouse corpus seal --out runs/demo
    """
    from drafthouse.loop import steps

    run = _run(out)
    manifest = steps.answering(run).seal(steps.load_target(run))
    say(
        manifest.model_dump(mode="json", by_alias=True),
        as_json,
        f"{manifest.samples} samples, digest {manifest.digest}",
    )


@states_app.command("extract")
def states_extract(
    out: Out = DEFAULT_OUT, worker: Worker = None, overrides: Overrides = None, as_json: AsJson = False
) -> None:
    """Extract hidden states until the run is complete, as one of any number of workers.

    Workers may be started and killed at any time, on any machine that reaches the store; under torchrun each rank
    is a worker of its own.

    [dim]Examples:[/dim]

      drafthouse states extract --out runs/demo

      torchrun --standalone --nproc-per-node=2 -m drafthouse.cli states extract --out runs/demo

      drafthouse states extract --out runs/qwen --set extract.engine='{kind: sglang, storage: /dev/shm/states}'
    """
    from dataclasses import asdict

    from drafthouse.loop import steps

    run = _run(out, overrides)
    here = run.settings.extract.engine.kind == "transformers"
    summary = steps.extract(run, steps.load_target(run, weights=here), worker, progress_of(as_json))
    say(
        asdict(summary),
        as_json,
        f"{summary.worker}: {summary.shards} shards, {summary.tokens} tokens in {summary.seconds:.1f} s"
        f" ({summary.rate:.0f} tokens/s, waited {summary.waited_s:.1f} s; {summary.redone} taken over from others)",
    )


@states_app.command("status")
def states_status(out: Out = DEFAULT_OUT, as_json: AsJson = False) -> None:
    """Say where every shard of the run stands.

    [dim]Example:[/dim]

      drafthouse states status --out runs/demo
    """
    from collections import Counter
    from dataclasses import asdict

    from drafthouse.loop import steps
    from drafthouse.store import Board

    run = _run(out)
    board = Board(run.store, steps.STATES, ttl_s=run.settings.extract.ttl_s)
    states = board.states(steps.answers(run).shard_names)
    counts = Counter(state.status for state in states.values())
    say(
        {"counts": counts, "shards": {name: asdict(state) for name, state in states.items()}},
        as_json,
        f"{len(states)} shards: " + ", ".join(f"{count} {status}" for status, count in sorted(counts.items())),
    )


@drafter_app.command("train")
def drafter_train(
    recipe: Annotated[str, typer.Argument(help="Name under `train` in the run file.")],
    out: Out = DEFAULT_OUT,
    overrides: Overrides = None,
    mirror: Annotated[
        bool,
        typer.Option(
            "--mirror", help="Keep checkpoints, curve and drafter in the run's store too, even if that is a folder."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train one drafter of the run, going on from its newest whole checkpoint.

    SIGTERM ends it with a checkpoint and exit status 0; a job that was moved elsewhere ends with 76.

    [dim]Examples:[/dim]

      drafthouse drafter train ours --out runs/demo

      drafthouse drafter train baseline --out runs/demo --json
    """
    from drafthouse.loop import steps

    run = _run(out, overrides)
    result = steps.train_drafter(run, steps.load_target(run), recipe, progress_of(as_json), mirror=mirror)
    facts = {
        "steps": result.steps,
        "tokens": result.tokens,
        "loss": result.loss,
        "seconds": round(result.seconds, 2),
        "resumed_from": result.resumed_from,
        "stopped": result.stopped,
        "drafter": str(result.drafter) if result.drafter else None,
    }
    where = f"in {result.drafter}" if result.drafter else "stopped with a checkpoint; start it again to go on"
    say(facts, as_json, f"{recipe}: {result.steps} steps, loss {result.loss:.3f}, {where}")


@drafter_app.command("check")
def drafter_check(
    folder: Annotated[Path, typer.Argument(help="Folder with config.json and model.safetensors.")],
    target_path: Annotated[
        str | None, typer.Option("--target", help="Model folder that it must fit, or 'embedded'.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read a drafter as an engine would and say whether it is whole and fits its target.

    [dim]Example:[/dim]

      drafthouse drafter check runs/demo/drafters/ours/drafter --target embedded
    """
    from drafthouse.drafter import load_drafter
    from drafthouse.loop.tiny import EMBEDDED, embedded_target
    from drafthouse.target import Target

    wanted: dict[str, Any] = {}
    if target_path is not None:
        target = Target.load(embedded_target() if target_path == EMBEDDED else target_path)
        wanted = {
            "target_identity": target.identity,
            "num_layers": target.num_layers,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
        }
    drafter = load_drafter(folder, **wanted)
    config = drafter.config
    say(
        {
            "config": config.model_dump(mode="json"),
            "parameters": sum(p.numel() for p in drafter.parameters()),
        },
        as_json,
        f"{folder}: whole; {config.num_hidden_layers} layers, block {config.block_size}, taps"
        f" {list(config.target_layer_ids)}",
    )


@app.command("evaluate")
def evaluate_verb(
    out: Out = DEFAULT_OUT,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", help="Recipe name; may be repeated; default: all.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Decode held-out prompts: the target alone, then chain and tree with every drafter.

    [dim]Examples:[/dim]

      drafthouse evaluate --out runs/demo

      drafthouse evaluate --out runs/demo --drafter ours --json
    """
    from drafthouse.loop import steps

    run = _run(out, overrides)
    names = drafter or list(run.settings.train)
    for name in names:
        steps.check_recipe(run, name)
    target = steps.load_target(run)
    results = {name: steps.evaluate(run, target, name, progress_of(as_json)) for name in names}
    lines = [
        f"{name}: chain {r['modes']['chain']['micro']:.2f}, tree {r['modes']['tree']['micro']:.2f} tokens a pass;"
        f" {min(r['identical'].values())} of {r['prompts']} texts identical"
        for name, r in results.items()
    ]
    say(results, as_json, "\n".join(lines))


@app.command("report")
def report_verb(out: Out = DEFAULT_OUT, as_json: AsJson = False) -> None:
    """Write report.json and report.html from what the steps left in the run folder.

    [dim]Example:[/dim]

      drafthouse report --out runs/demo
    """
    from drafthouse.loop import steps
    from drafthouse.loop.report import make_report

    run = _run(out)
    facts = run.read("facts") or {"command": "drafthouse report"}
    json_path, page = make_report(run, steps.load_target(run), facts)
    say({"report": str(json_path), "page": str(page)}, as_json, f"{page}")


@app.command("demo")
def demo_verb(
    out: Out = DEFAULT_OUT,
    file: RunFile = None,
    overrides: Overrides = None,
    from_scratch: Annotated[
        bool,
        typer.Option("--from-scratch", help="Train the small target too instead of using the package's."),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out instead of beginning anew.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """The whole loop on this machine: corpus, answers, states, two drafters, decoding, report.

    One of the extraction workers is killed on purpose half-way; nothing is lost.

    [dim]Examples:[/dim]

      drafthouse demo

      drafthouse demo --out runs/mine --set corpus.samples=512 --set train.ours.steps=300

      drafthouse demo --resume
    """
    from drafthouse.loop.demo import Demo
    from drafthouse.loop.folder import RunFolder
    from drafthouse.loop.report import summary

    wanted = [*(overrides or []), *(["target.from_scratch=true"] if from_scratch else [])]
    run = RunFolder.begin(out, file, wanted, anew=not resume)
    report, page = Demo(run, progress_of(as_json)).go()
    found = summary(report)
    shards, target = found["shards"], found["target"]
    lines = [
        "",
        report["verdict"],
        f"shards: {shards['committed']} of {shards['expected']} committed, {shards['lost']} lost,"
        f" {shards['duplicated']} duplicated, {shards['redone']} redone"
        + (f" after {shards['killed_worker']} was killed" if shards["killed_worker"] else ""),
        f"target: right on {target['exact_match']:.0%} of the held-out prompts, repeated 4-grams"
        f" {target['repeated_4grams']:.0%}",
        "seconds: " + ", ".join(f"{step} {value:g}" for step, value in found["seconds"].items()),
        f"report: {page}",
    ]
    say(found, as_json, "\n".join(lines))


@app.command("export")
def export_verb(
    recipe: Annotated[str, typer.Argument(help="Name under `train` in the run file.")],
    to: Annotated[Path, typer.Argument(help="Folder to write for the engine; an earlier export in it is replaced.")],
    out: Out = DEFAULT_OUT,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16 or float32.")] = "bfloat16",
    steps: Annotated[
        int, typer.Option("--gate-steps", min=0, help="Steps to learn one text by heart; 0: leave that proof out.")
    ] = 300,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Write a trained drafter for SGLang and vLLM, if it passes the gate.

    It is taken from the run folder, or from the store where a job has kept it. The gate: tensor names and shapes, the
    config read back, equal distributions of the pass that trains and the one that decodes, and a drafter of the same
    shape that learns one text by heart and is then accepted in whole blocks.

    [dim]Examples:[/dim]

      drafthouse export ours /srv/models/ours-dflash --out runs/demo

      drafthouse export ours runs/demo/export --out runs/demo --gate-steps 0 --json
    """
    from drafthouse.errors import ConfigError
    from drafthouse.loop import steps as run_steps
    from drafthouse.loop.export import export
    from drafthouse.loop.gate import as_dict

    if dtype not in {"bfloat16", "float32"}:
        raise ConfigError(f"'{dtype}' is no element type for weights", where="--dtype", fix="bfloat16 or float32")
    run = _run(out, overrides)
    run_steps.check_recipe(run, recipe)
    target = run_steps.load_target(run)
    found = export(run, target, recipe, to, dtype=dtype, steps=steps, progress=progress_of(as_json))  # type: ignore[arg-type]
    widest = max(one.distance for one in found.parity)
    facts: dict[str, Any] = {
        "folder": str(found.folder),
        "tensors": found.tensors,
        "parity": [as_dict(one) for one in found.parity],
        "by_heart": None if found.by_heart is None else as_dict(found.by_heart),
    }
    lines = [
        f"{found.folder}: {found.tensors} tensors, {dtype}, read back",
        f"training and decoding pass: at most {widest:.2g} apart (total variation)",
    ]
    if found.by_heart is not None:
        learned = found.by_heart
        lines.append(
            f"one text by heart: {learned.steps} steps, passes emitted {list(learned.rounds)}"
            f" (a block is {learned.block_size})"
        )
    say(facts, as_json, "\n".join(lines))


app.command("roofline")(roofline)
app.command("dash")(dash)


@store_app.command("probe")
def store_probe(
    url: Annotated[str, typer.Argument(help="file:PATH, memory://NAME or s3://BUCKET/PREFIX?endpoint=…&region=…")],
    as_json: AsJson = False,
) -> None:
    """Check that a store can be trusted: reachable, writable, and honest about conditional puts.

    Credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY).

    [dim]Examples:[/dim]

      drafthouse store probe runs/demo/store

      drafthouse store probe 's3://states/qwen?endpoint=http://192.0.2.10:8333'
    """
    from drafthouse.store import Store

    store = Store.open(url)
    store.probe()
    say({"url": store.url, "conditional_puts": True}, as_json, f"{store.url}: create-only puts are honoured")


@store_app.command("janitor")
def store_janitor(
    url: Annotated[str, typer.Argument(help="file:PATH, memory://NAME or s3://BUCKET/PREFIX?endpoint=…&region=…")],
    run: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="This run's lost data and rests; default: rests only.")
    ] = None,
    quiet_s: Annotated[float, typer.Option("--quiet", metavar="SECONDS", min=300, help="Spare what is younger.")] = 600,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what killed workers left: data that lost, half-written files, unfinished multipart uploads.

    What may still count is never touched. On S3 it needs an access key in the environment; without one, give the
    bucket a lifecycle rule AbortIncompleteMultipartUpload.

    [dim]Examples:[/dim]

      drafthouse store janitor runs/demo/store --run demo --dry-run

      drafthouse store janitor 's3://states/qwen?endpoint=http://192.0.2.10:8333' --run qwen
    """
    from drafthouse.errors import StoreError
    from drafthouse.store import Board, Store

    store = Store.open(url)
    if run is None:
        removed = store.sweep(older_than_s=quiet_s, dry_run=dry_run)
    else:
        board = Board(store, run, ttl_s=quiet_s)
        if board.spec() is None:
            raise StoreError(f"there is no run '{run}'", where=store.url, fix="correct the URL or --run")
        removed = board.janitor(dry_run=dry_run)
    verb = "would be removed" if dry_run else "removed"
    text = "\n".join([*removed, f"{store.url}: {len(removed)} rests {verb}"])
    say({"url": store.url, "run": run, "removed": removed, "dry_run": dry_run}, as_json, text)


@app.command("version")
def version_verb(as_json: AsJson = False) -> None:
    """Print the version.

    [dim]Example:[/dim]

      drafthouse version
    """
    say({"version": __version__}, as_json, __version__)


def _run(out: Path, overrides: list[str] | None = None) -> RunFolder:
    from drafthouse.loop.folder import RunFolder

    return RunFolder.open(out, overrides=overrides or [])


def main() -> None:
    """Entry point: an error that a user can cause is one sentence on stderr and exit code 2."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    end_with_parent()
    try:
        app()
    except DrafthouseError as error:
        sentence = " ".join(str(error).split())  # a library's reason in it may have several lines
        sys.stderr.write(f"error: {sentence}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
