"""Training as a job does it: alone in its folder, ended by SIGTERM with a checkpoint, and kept in a store."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from drafthouse.drafter import DrafterConfig, TrainResult, train
from drafthouse.drafter.parallel import joined
from drafthouse.drafter.trainer import Evaluate, StatesSource, TargetHead, TrainSettings, run_spec
from drafthouse.loop.checkpoints import Copies
from drafthouse.loop.job import FenceWatch
from drafthouse.progress import Progress
from drafthouse.states.worker import told_to_stop
from drafthouse.store import Store
from drafthouse.store.exclusive import exclusive


def train_kept(
    reader: StatesSource,
    head: TargetHead,
    config: DrafterConfig,
    settings: TrainSettings,
    folder: Path,
    recipe: str,
    *,
    store: Store | None,
    watch: FenceWatch | None = None,
    who: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    evaluate: Evaluate | None = None,
) -> TrainResult:
    """`drafter.train` in `folder`, from the newest checkpoint in it or in `store`.

    SIGTERM (in the main thread) ends it after the step that it is in, with a checkpoint that is stored before this
    returns; `stopped` is `asked` then. Of several ranks on one node (torchrun) the first one does all that.

    Args:
        recipe: name of the drafter.
        store: keeps checkpoints, curve and drafter for other machines, see `loop.checkpoints`; None: nothing is kept.
        watch: the fence of the job that this belongs to.
        who: for people who read what is kept.

    Raises:
        ConfigError: another process works on this drafter in this folder.
        DrafterError: as `drafter.train`, or the store holds a run of other settings.
        FencedError: the job was moved elsewhere; nothing is stored any more.
        StoreError: the store cannot be reached at the start, or did not take the last checkpoint at the end.
    """
    with joined(head.device) as ranks, told_to_stop() as told, ExitStack() as stack:
        copies = None
        if ranks.first:  # it writes for all of them
            stack.enter_context(exclusive(folder, f"works on the drafter '{recipe}'"))
            if store is not None:
                spec, keep = run_spec(config, settings, reader.spec), settings.keep_checkpoints
                copies = Copies(store, recipe, folder, spec, steps=settings.steps, keep=keep, watch=watch, who=who)
                stack.enter_context(copies)
                found = copies.finished(head.device) if ranks.world == 1 else None
                if found is not None:
                    return found
                copies.restore()
        ranks.wait()  # for what the first one has put into the folder

        def stop() -> bool:
            if copies is not None:
                copies.check()
            return told.is_set()

        result = train(
            reader,
            head,
            config,
            settings,
            folder,
            progress=progress,
            evaluate=evaluate,
            stop=stop,
            observer=copies,
        )
        if copies is not None:
            copies.finish(result)
        return result
