"""The steps of the loop, one function a verb. Each finds what earlier steps left in the run folder, does
nothing twice, and may be killed and called again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from drafthouse.corpus import CorpusReader, Manifest, Prompt, build, prompts
from drafthouse.corpus.shards import MANIFEST
from drafthouse.corpus.template import ChatTemplate
from drafthouse.decode import DecodeSettings, Stepper, decode
from drafthouse.decode.evaluate import Evaluation, answer_text, evaluate_drafter, evaluate_target
from drafthouse.decode.generate import Generation
from drafthouse.decode.stats import acceptance
from drafthouse.drafter import DFlashDrafter, DrafterConfig, TrainResult, load_drafter
from drafthouse.drafter.trainer import DRAFTER
from drafthouse.errors import ConfigError
from drafthouse.loop.answers import Answering
from drafthouse.loop.drafters import drafters_in, fetch_drafter
from drafthouse.loop.folder import RunFolder
from drafthouse.loop.job import FenceWatch, JobContext
from drafthouse.loop.tiny import EMBEDDED, embedded_target, train_embedded
from drafthouse.loop.training import train_kept
from drafthouse.progress import Progress
from drafthouse.states import ExtractSettings, StatesReader, WorkerSummary, run_worker
from drafthouse.states.protocols import Taps
from drafthouse.states.worker import default_worker_id
from drafthouse.store import Store
from drafthouse.store.exclusive import exclusive
from drafthouse.target import Target

CORPUS, ANSWERS, STATES = "corpus", "answers", "states"


def load_target(run: RunFolder, *, weights: bool = True) -> Target:
    """The target of the run: the embedded one, a folder, or the one that was trained from scratch.

    Args:
        weights: False: only what it is, see `Target.load`.
    """
    settings = run.settings.target
    torch.set_num_threads(run.settings.threads)
    if settings.from_scratch:
        if not (run.target_path() / "config.json").exists():
            raise ConfigError("the target has not been trained yet", where=str(run.target_path()), fix="train it first")
        return Target.load(run.target_path(), device=own_device(settings.device), weights=weights)
    path = embedded_target() if settings.path == EMBEDDED else settings.path
    return Target.load(path, device=own_device(settings.device), weights=weights)


def own_device(device: str, environment: Mapping[str, str] = os.environ) -> str:
    """The device of this process: under torchrun every rank of a host has a GPU of its own (LOCAL_RANK)."""
    rank = environment.get("LOCAL_RANK", "")
    return f"cuda:{rank}" if device == "cuda" and rank.isdigit() else device


def check_fit(run: RunFolder, target: Target) -> None:
    """Refuse before anything is written what later steps would refuse.

    Raises:
        CorpusError: the tokenizer has no chat template.
        DrafterError: the drafter's shape does not fit the target, e.g. a tap beyond its last layer.
    """
    ChatTemplate(target.tokenizer)
    drafter_config(run, target)


def train_target(run: RunFolder, progress: Progress) -> dict[str, Any] | None:
    """Train the small target anew if the run file asks for it; None when it does not."""
    if not run.settings.target.from_scratch or (run.target_path() / "training.json").exists():
        return None
    return train_embedded(run.settings.target, run.target_path(), progress)


def build_corpus(run: RunFolder, target: Target, progress: Progress) -> Manifest:
    """Conversations of the run's mixture as token shards with proven masks."""
    return build(run.settings.corpus, target.tokenizer, run.store, CORPUS, "train", progress)


def answering(run: RunFolder) -> Answering:
    """The job that lets the target answer the corpus itself."""
    settings = DecodeSettings(mode="autoregressive", **run.settings.answers.model_dump())
    return Answering(run.store, CORPUS, ANSWERS, settings, run.settings.extract.ttl_s, _still_ours(run))


def _still_ours(run: RunFolder) -> FenceWatch | None:
    """Asks whether this life of the job counts; None outside of a job."""
    job = JobContext.from_environment()
    return job.watch(run.store) if job else None


def drafter_config(run: RunFolder, target: Target) -> DrafterConfig:
    """The run's drafter shape, completed for its target."""
    return run.settings.drafter.for_target(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        mask_token_id=target.mask_token_id,
        identity=target.identity,
        max_position_embeddings=int(target.config.max_position_embeddings),
        eos_token_id=target.eos_ids[0] if target.eos_ids else None,
        pad_token_id=getattr(target.tokenizer, "pad_token_id", None),
    )


def answers(run: RunFolder) -> CorpusReader:
    """The answered corpus.

    Raises:
        ConfigError: it is not sealed yet.
        CorpusError: it is damaged.
    """
    if run.store.child(ANSWERS).head(MANIFEST) is None:
        raise ConfigError(
            "there are no sealed answers yet",
            where=str(run.path),
            fix="run `drafthouse corpus answer`, then `drafthouse corpus seal`",
        )
    return CorpusReader(run.store, ANSWERS)


def extract_settings(run: RunFolder, target: Target) -> ExtractSettings:
    """The run's extraction, with the layers that its drafter reads."""
    layer_ids = tuple(drafter_config(run, target).target_layer_ids)
    return run.settings.extract.model_copy(update={"layer_ids": layer_ids})


def extract(run: RunFolder, target: Target, worker: str | None, progress: Progress) -> WorkerSummary:
    """Work on the hidden states of the answered corpus until all its shards are committed.

    Args:
        target: may be without weights when `extract.engine` names a server.

    Raises:
        FencedError: the job that this worker belongs to was moved elsewhere; its leases are released.
    """
    settings = extract_settings(run, target)
    taps: Taps = target
    if settings.engine.kind == "vllm":
        from drafthouse.states.vllm import VllmTaps

        taps = VllmTaps(target, settings.engine, settings.layer_ids)
    elif settings.engine.kind == "sglang":
        from drafthouse.states.sglang import SglangTaps

        taps = SglangTaps(target, settings.engine, settings.layer_ids)
    return run_worker(run.store, STATES, answers(run), taps, settings, worker, progress, still_ours=_still_ours(run))


def check_recipe(run: RunFolder, name: str) -> None:
    """Raise ConfigError unless the run file has the recipe `name`."""
    if name not in run.settings.train:
        known = ", ".join(sorted(run.settings.train))
        raise ConfigError(f"there is no recipe '{name}'", where="train", fix=f"use one of {known}")


def train_drafter(
    run: RunFolder, target: Target, name: str, progress: Progress, *, mirror: bool = False
) -> TrainResult:
    """Train the drafter `name` by its recipe, from its newest whole checkpoint if there is one.

    In a job of the fleet, and in a run whose store is on S3, checkpoints, curve and drafter are kept in the store
    too, so that another machine goes on where this one ended; see `loop.checkpoints`. SIGTERM ends the training
    with a checkpoint, `stopped` is `asked` then.

    Args:
        mirror: keep them in the run's store, whatever that is.

    Raises:
        ConfigError: the run file has no such recipe, or another process trains this drafter in this folder.
        FencedError: the job was moved elsewhere; nothing is stored any more.
    """
    check_recipe(run, name)
    job, watch = JobContext.from_environment(), _still_ours(run)
    if watch is not None:
        watch()  # before anything else is found wrong: a life that is over ends as such
    elsewhere = (job is not None and job.store_url is not None) or run.store.local_path("drafters") is None
    return train_kept(
        StatesReader(run.store, STATES),
        target,
        drafter_config(run, target),
        run.settings.train[name],
        run.drafter_path(name),
        name,
        store=_kept_in(run) if elsewhere or mirror else None,
        watch=watch,
        who={"worker": default_worker_id(), **({"job": job.job, "node": job.node} if job else {})},
        progress=progress,
        evaluate=_probe(run, target),
    )


def _kept_in(run: RunFolder) -> Store:
    """The store that outlives this machine: the job's, or the run's own."""
    job = JobContext.from_environment()
    return job.store(run.store) if job else run.store


def _probe(run: RunFolder, target: Target) -> Callable[[DFlashDrafter, int], dict[str, Any]] | None:
    """Chain acceptance on a few held-out prompts of their own seed, for the curve."""
    settings = run.settings.probe
    if not settings.prompts:
        return None
    corpus = run.settings.corpus.model_copy(update={"heldout": settings.prompts, "seed": settings.seed})
    questions = prompts(corpus, target.tokenizer)
    plan = run.settings.evaluate.decode_settings(mode="chain")
    stepper = Stepper(target, drafter_config(run, target).target_layer_ids)

    def measure(drafter: DFlashDrafter, step: int) -> dict[str, Any]:
        drafter.eval()
        generations = decode(stepper, drafter, [question.input_ids for question in questions], plan)
        stats = acceptance(generations, [q.kind for q in questions], drafter.config.block_size - 1)
        return {"acceptance": round(stats.micro, 4)}

    return measure


def evaluate(run: RunFolder, target: Target, name: str, progress: Progress) -> dict[str, Any]:
    """Decode the held-out prompts with the target alone and with the drafter `name`; keep the result."""
    settings = run.settings.evaluate
    drafter = load_trained(run, target, name)
    questions = prompts(run.settings.corpus, target.tokenizer)
    alone = evaluate_target(target, questions, settings, progress)
    evaluation = evaluate_drafter(target, drafter, questions, alone, settings, progress)
    result = {
        "prompts": len(questions),
        "guard": alone.guard,
        "autoregressive": {
            "tokens": sum(sum(g.rounds) for g in alone.generations),
            "target_passes": sum(g.target_passes for g in alone.generations),
        },
        **_summary(evaluation),
        "samples": [
            {
                "id": questions[i].id,
                "kind": questions[i].kind,
                "prompt": answer_text(target, questions[i].input_ids.tolist()),
                "reference": questions[i].reference,
                "runs": {
                    f"{name}/{mode}": _marked(target, generations[i])
                    for mode, generations in evaluation.generations.items()
                },
            }
            for i in _shown(questions, settings.samples)
        ],
    }
    run.write(f"evaluation-{name}", result)
    return result


def load_trained(run: RunFolder, target: Target, name: str) -> DFlashDrafter:
    """The exported drafter `name` of the run, wherever it was trained: in the run folder or kept in the store.

    Raises:
        ConfigError: it is not trained yet.
        DrafterError: it is damaged, or of another target.
    """
    folder = run.drafter_path(name) / DRAFTER
    if not folder.exists():
        _fetch_trained(run, name)
    if not folder.exists():
        raise ConfigError(
            f"the drafter '{name}' is not trained yet",
            where=str(run.path),
            fix=f"run `drafthouse drafter train {name}`",
        )
    return load_drafter(
        folder,
        target_identity=target.identity,
        num_layers=target.num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
    )


def _fetch_trained(run: RunFolder, name: str) -> None:
    drafters = drafters_in(_kept_in(run), name)
    newest = next(iter(drafters.counting()), None)
    if newest is not None:
        folder = run.drafter_path(name)
        with exclusive(folder, f"works on the drafter '{name}'"):
            fetch_drafter(drafters, newest, folder)


def _summary(evaluation: Evaluation) -> dict[str, Any]:
    values = asdict(evaluation)
    values.pop("generations")
    values["seconds"] = {mode: round(seconds, 3) for mode, seconds in evaluation.seconds.items()}
    return values


def _shown(questions: list[Prompt], count: int) -> list[int]:
    """Indices of sample texts: the first prompt of every kind, then the second, ..."""
    by_kind: dict[str, list[int]] = {}
    for index, question in enumerate(questions):
        by_kind.setdefault(question.kind, []).append(index)
    depth = max(len(indices) for indices in by_kind.values())
    order = [indices[i] for i in range(depth) for indices in by_kind.values() if i < len(indices)]
    return order[:count]


def _marked(target: Target, generation: Generation) -> dict[str, Any]:
    """Tokens of a text with their source and round; pieces of one character become one."""
    tokens: list[dict[str, Any]] = []
    pending: list[int] = []
    for token, (source, number) in zip(generation.tokens, generation.sources(), strict=True):
        pending.append(token)
        text = target.tokenizer.decode(pending, skip_special_tokens=False)
        if not text.endswith("\ufffd"):
            tokens.append({"text": text, "source": source, "round": number})
            pending = []
    return {"tokens": tokens, "rounds": generation.target_passes + 1}


def wall_clock(run: RunFolder, target: Target) -> dict[str, Any]:
    """Seconds of the three modes at batch 1 on a few prompts, our drafter, in one process; measured once."""
    known = run.read("wall-clock")
    if known is not None:
        return known
    settings = run.settings.evaluate
    questions = prompts(run.settings.corpus, target.tokenizer)
    chosen = [questions[i].input_ids for i in _shown(questions, settings.wall_clock_prompts)]
    drafter = load_trained(run, target, "ours")
    stepper = Stepper(target, drafter.config.target_layer_ids)
    modes = {}
    for mode in ("autoregressive", "chain", "tree"):
        plan = settings.decode_settings(mode=mode, budget=settings.budget).model_copy(update={"rows": 1})
        decode(stepper, drafter, chosen[:1], plan)  # first calls pay for allocations
        began = time.perf_counter()
        generations = decode(stepper, drafter, chosen, plan)
        seconds = time.perf_counter() - began
        modes[mode] = {
            "tokens": sum(len(g.tokens) for g in generations),
            "seconds": round(seconds, 4),
            "target_passes": sum(g.target_passes for g in generations) + len(generations),
        }
    result = {"threads": torch.get_num_threads(), "batch": 1, "modes": modes}
    run.write("wall-clock", result)
    return result
