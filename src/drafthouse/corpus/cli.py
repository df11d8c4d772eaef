"""`drafthouse corpus curate | regenerate | tokenise | card`: from data sets to a token corpus, and what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drafthouse.verbs import AsJson, progress_of, say

app = typer.Typer(
    no_args_is_help=True,
    help="""From data sets to a token corpus.

    [dim]Example:[/dim]

      drafthouse corpus curate offline --store data/store
    """,
)

StoreUrl = Annotated[str, typer.Option("--store", metavar="URL", help="Folder, file: or s3: store of the corpus.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key of the file; may be repeated."),
]
Processes = Annotated[
    int | None, typer.Option("--processes", min=1, help="Work side by side; default: one a processor.")
]


@app.command("curate")
def curate_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Curation file, or its name under inventory/corpora.")],
    store: StoreUrl,
    work: Annotated[
        Path | None, typer.Option("--work", metavar="FOLDER", help="Staging; default: .curation beside the store.")
    ] = None,
    overrides: Overrides = None,
    processes: Processes = None,
    as_json: AsJson = False,
) -> None:
    """Read, filter and deduplicate the sources of a curation file; choose, shuffle and seal the conversations.

    A broken-off run goes on where it was; a finished one is only looked up.

    [dim]Examples:[/dim]

      drafthouse corpus curate offline --store data/store

      drafthouse corpus curate mission --store s3://corpora/dflash --work /scratch/curation --processes 16
    """
    from drafthouse.config import load
    from drafthouse.corpus.curate import curate
    from drafthouse.corpus.curation import CurationSettings, curation_file

    path = curation_file(file)
    settings = load(CurationSettings, path, overrides or [])
    made = curate(
        settings,
        store,
        work or _staging(store),
        base=path.parent,
        processes=processes,
        progress=progress_of(as_json),
    )
    train, heldout = made["train"], made["heldout"]
    dropped = sum(sum(counts.values()) for counts in train.drops.values())
    result = {
        "name": settings.name,
        "samples": train.samples,
        "heldout": heldout.samples,
        "kinds": train.kinds,
        "drops": train.drops,
        "short": train.short,
        "digest": train.digest,
    }
    lines = [f"{settings.name}: {train.samples} conversations and {heldout.samples} held out, {dropped} left out"]
    lines += [f"  {kind}: {count}" for kind, count in train.kinds.items()]
    lines += [f"  {kind}: {missing} fewer than its quota" for kind, missing in train.short.items()]
    lines += [f"  {name}: {facts['missing']}" for name, facts in train.sources.items() if "missing" in facts]
    say(result, as_json, "\n".join(lines))


@app.command("regenerate")
def regenerate_(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Set of conversations whose last turns are answered.")],
    store: StoreUrl,
    endpoint: Annotated[
        list[str], typer.Option("--endpoint", metavar="URL", help="OpenAI-compatible server; may be repeated.")
    ],
    model: Annotated[str, typer.Option("--model", help="Name under which the target is served.")],
    run: Annotated[str | None, typer.Option("--as", metavar="NAME", help="Default: NAME-answered.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 = greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", min=0.0, max=1.0)] = 1.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Answers are cut there.")] = 2048,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="enable_thinking of the chat template.")
    ] = None,
    keep_cut: Annotated[bool, typer.Option("--keep-cut", help="Keep answers that were cut at --max-tokens.")] = False,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Requests in flight.")] = 64,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for one answer.")] = 600.0,
    patience: Annotated[float, typer.Option("--patience", help="Seconds without any answer: the end.")] = 120.0,
    worker: Annotated[str | None, typer.Option("--worker", help="Name of this worker; default: host, process.")] = None,
    as_json: AsJson = False,
) -> None:
    """Let a served target answer the questions itself, as one of any number of workers; seal what is complete.

    Answers are kept as they come in: a run that was broken off, or whose endpoint went away, goes on with the rest.

    [dim]Examples:[/dim]

      drafthouse corpus regenerate offline --store data/store --endpoint http://127.0.0.1:30000 --model qwen3.6-27b
    """
    from drafthouse.config import validate
    from drafthouse.corpus.endpoint import EndpointSettings, SamplingSettings
    from drafthouse.corpus.regenerate import Regeneration
    from drafthouse.store import Store

    sampling = validate(
        SamplingSettings,
        {
            "model": model,
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": max_tokens,
            "seed": seed,
            "template_variables": {} if thinking is None else {"enable_thinking": thinking},
        },
        "the sampling",
    )
    served = validate(
        EndpointSettings,
        {"urls": tuple(endpoint), "concurrency": concurrency, "timeout_s": timeout, "patience_s": patience},
        "the endpoint",
    )
    job = Regeneration(Store.open(store), name, run or f"{name}-answered", sampling, keep_cut)
    worked = job.work(served, worker, progress_of(as_json))
    manifest = job.seal()
    result = {**worked, "run": job.run, "samples": manifest.samples, "digest": manifest.digest}
    failed = sum(worked["failures"].values())
    text = (
        f"{job.run}: {manifest.samples} answered conversations; this worker asked {worked['requests']} times,"
        f" {failed} of them in vain, and took over {worked['resumed']} answers"
    )
    say(result, as_json, text)


@app.command("tokenise")
def tokenise_(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Set of conversations.")],
    store: StoreUrl,
    tokenizer: Annotated[Path, typer.Option("--tokenizer", metavar="FOLDER", help="Tokenizer with chat template.")],
    corpus: Annotated[
        str, typer.Option("--as", metavar="NAME", help="Corpus; states are extracted from the one named answers.")
    ] = "answers",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=16, help="Longer samples are dropped.")] = 4096,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="enable_thinking of the chat template.")
    ] = None,
    processes: Processes = None,
    as_json: AsJson = False,
) -> None:
    """Render, tokenise and mask a set of conversations; every mask is proven. A broken-off run goes on.

    [dim]Examples:[/dim]

      drafthouse corpus tokenise offline --store data/store --tokenizer /models/Qwen3.6-27B
    """
    from drafthouse.corpus.tokenise import tokenise

    manifest = tokenise(
        store,
        name,
        corpus,
        tokenizer,
        max_tokens=max_tokens,
        variables={} if thinking is None else {"enable_thinking": thinking},
        processes=processes,
        progress=progress_of(as_json),
    )
    result = {
        "corpus": corpus,
        "samples": manifest.samples,
        "tokens": manifest.tokens,
        "shards": len(manifest.shards),
        "kinds": {kind: count.model_dump() for kind, count in manifest.kinds.items()},
        "drops": manifest.drops,
        "digest": manifest.digest,
    }
    dropped = ", ".join(f"{count} {reason}" for reason, count in manifest.drops.items()) or "none"
    say(
        result,
        as_json,
        f"{corpus}: {manifest.samples} samples, {manifest.tokens} tokens in {len(manifest.shards)} shards"
        f" (dropped: {dropped})",
    )


@app.command("card")
def card_(
    corpus: Annotated[str, typer.Argument(metavar="CORPUS", help="Sealed token corpus, e.g. corpus or answers.")],
    store: StoreUrl,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Gets corpus-card.html and .json.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Count a corpus and write its card, as one HTML file and as JSON.

    [dim]Examples:[/dim]

      drafthouse corpus card answers --store data/store --out data

      drafthouse corpus card corpus --store runs/demo/store --json
    """
    from drafthouse.corpus.card import card_html, card_json, corpus_card
    from drafthouse.corpus.disk import Parts, told
    from drafthouse.store import Store

    made = corpus_card(Store.open(store), corpus, progress_of(as_json))
    with told(out):
        out.mkdir(parents=True, exist_ok=True)
        with Parts() as parts:
            parts.begin(out / "corpus-card.html").write(card_html(made).encode())
            parts.begin(out / "corpus-card.json").write(card_json(made).encode())
    say(made, as_json, str(out / "corpus-card.html"))


def _staging(store: str) -> Path:
    """A folder beside a store on this machine; under the working folder for any other."""
    from drafthouse.store import Store

    inside = Store.open(store).local_path("x")
    return Path(".curation") if inside is None else inside.parent.with_name(f"{inside.parent.name}.curation")
