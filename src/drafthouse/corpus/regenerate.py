"""On-policy data: a served target answers the questions of a set itself, shard by shard under leases.

A drafter is accepted when it foresees what the target says, not what a data set says. Any number of workers share
the shards of a set through the store's board; each may die. What a worker had been answered is saved while it goes
on, so that its successor asks only for the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from drafthouse.corpus import conversations as sets
from drafthouse.corpus.conversations import REGENERATION, ConversationManifest, ConversationSet
from drafthouse.corpus.endpoint import Answer, Endpoint, EndpointSettings, SamplingSettings
from drafthouse.corpus.records import Conversation, Message
from drafthouse.corpus.shards import name_is_taken
from drafthouse.errors import CorpusError
from drafthouse.progress import Progress, Silent, Task
from drafthouse.store import Board, Lease, Store

_SHARDS_AT_ONCE = 2  # the second one fills the gaps that the first one's last answers leave
_WAIT_S = 1.0


@dataclass(frozen=True)
class Regeneration:
    """One job of re-answering.

    Attributes:
        store: holds the set, the leases and the result.
        questions: name of the set whose last turns are answered anew.
        run: name of the run on the board, and of the sealed set.
        sampling: how the target answers.
        keep_cut: keep answers that were cut at `max_tokens`. Their end of turn is then learned where the target
            would have gone on, so that they are dropped unless asked for.
        ttl_s: seconds of silence after which others take over a shard.
    """

    store: Store
    questions: str
    run: str
    sampling: SamplingSettings
    keep_cut: bool = False
    ttl_s: float = 120.0

    def work(
        self, endpoint: EndpointSettings, worker: str | None = None, progress: Progress | None = None
    ) -> dict[str, Any]:
        """Answer shards until all are done, by whomever; what this worker asked for and committed.

        Raises:
            CorpusError: the endpoint does not serve the model, or nobody is answered any more.
            StatesError: the run was begun with other questions or sampling.
            StoreError: the store cannot hold leases.
        """
        self.store.probe()
        given = ConversationSet(self.store, self.questions)
        board = self._board()
        board.bind(self._spec(given))
        name = worker or f"{socket.gethostname()}-{os.getpid()}"
        return asyncio.run(_Worker(self, given, board, name, progress or Silent()).run(endpoint))

    def seal(self) -> ConversationManifest:
        """Make the finished shards a set, in the order of the questions.

        Raises:
            CorpusError: shards are missing or damaged, or the name belongs to another set.
        """
        given, board = ConversationSet(self.store, self.questions), self._board()
        if missing := board.remaining(given.shard_names):
            raise CorpusError(
                f"{len(missing)} of {len(given.shard_names)} shards are not answered yet",
                where=self.run,
                fix="run `drafthouse corpus regenerate` until it ends",
            )
        spec, there = self._spec(given), self.store.child(self.run).head(sets.MANIFEST)
        if there is not None:
            known = ConversationSet(self.store, self.run).manifest
            if known.settings != spec:
                raise name_is_taken(self.run)
            return known
        drops = Counter(given.manifest.drops.get(REGENERATION, {}))  # of a set that was answered before
        kinds: Counter[str] = Counter()
        shards = []
        for name in given.shard_names:
            done = board.done(name)
            assert done is not None, "remaining() said so"
            data = board.objects.get(done.key)
            if hashlib.sha256(data).hexdigest() != done.sha256:
                raise CorpusError("an answered shard is damaged", where=done.key, fix="begin a new run")
            answered = sets.unpack_lines(data, done.key)
            drops.update(done.extra["drops"])
            kinds.update(conversation.kind for conversation in answered)
            if answered:
                shards.append(sets.put_shard(self.store.child(self.run), [_line(one) for one in answered]))
        if not shards:
            raise CorpusError("not one question was answered", where=self.run, fix="look at the drops of its shards")
        origin = given.manifest
        manifest = ConversationManifest(
            schema_version=sets.SCHEMA,
            digest=sets.set_digest([shard.sha256 for shard in shards]),
            shards=tuple(shards),
            samples=sum(shard.samples for shard in shards),
            split=origin.split,
            kinds=dict(sorted(kinds.items())),
            sources=origin.sources,
            drops={**origin.drops, REGENERATION: dict(sorted(drops.items()))} if drops else origin.drops,
            short=origin.short,
            settings=spec,
            examples=origin.examples,
        )
        return sets.seal(self.store, self.run, manifest)

    def _board(self) -> Board:
        return Board(self.store, self.run, ttl_s=self.ttl_s)

    def _spec(self, given: ConversationSet) -> dict[str, Any]:
        return {
            "questions": given.manifest.digest,
            "sampling": self.sampling.model_dump(mode="json"),
            "keep_cut": self.keep_cut,
        }


class _Worker:
    """One process' share of a regeneration."""

    def __init__(self, job: Regeneration, given: ConversationSet, board: Board, name: str, progress: Progress) -> None:
        self._job, self._given, self._board, self._name, self._progress = job, given, board, name, progress
        self._committed = self._answered = self._resumed = 0

    async def run(self, settings: EndpointSettings) -> dict[str, Any]:
        async with Endpoint(settings, self._job.sampling) as endpoint:
            await endpoint.check()
            with self._progress.task("answers of the served target", self._given.manifest.samples) as task:
                claiming = asyncio.Lock()
                workers = [asyncio.create_task(self._shards(endpoint, claiming, task)) for _ in range(_SHARDS_AT_ONCE)]
                try:
                    await asyncio.gather(*workers)
                finally:
                    for one in workers:
                        one.cancel()
                    await asyncio.gather(*workers, return_exceptions=True)
            tally = endpoint.tally
        return {
            "shards": self._committed,
            "answered": self._answered,
            "resumed": self._resumed,
            "requests": tally.requests,
            "failures": dict(sorted(tally.failures.items())),
        }

    async def _shards(self, endpoint: Endpoint, claiming: asyncio.Lock, task: Task) -> None:
        names, board = self._given.shard_names, self._board
        while remaining := await asyncio.to_thread(board.remaining, names):
            async with claiming:
                lease = await asyncio.to_thread(board.claim, remaining, self._name)
            if lease is None:
                await asyncio.sleep(min(_WAIT_S, self._job.ttl_s / 5))
                continue
            try:
                await self._shard(endpoint, lease, task)
            except BaseException:
                with contextlib.suppress(Exception):
                    board.release(lease)
                raise

    async def _shard(self, endpoint: Endpoint, lease: Lease, task: Task) -> None:
        questions = await asyncio.to_thread(self._given.shard, lease.shard)
        answers: dict[str, Answer | str] = await asyncio.to_thread(self._saved, lease)
        self._resumed += len(answers)
        task.advance(len(answers))

        async def ask(question: Conversation) -> None:
            answers[question.id] = await endpoint.answer(question)
            self._answered += 1
            task.advance(note=f"{endpoint.tally.requests - self._answered:,} failed tries")

        async with self._alive(lease, answers):
            asked = [asyncio.create_task(ask(question)) for question in questions if question.id not in answers]
            try:
                await asyncio.gather(*asked)
            finally:
                for one in asked:
                    one.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
        drops: Counter[str] = Counter()
        lines: list[bytes] = []
        tokens = 0
        for question in questions:
            answer = answers[question.id]
            if isinstance(answer, str):
                drops[answer] += 1
            elif answer.cut and not self._job.keep_cut:
                drops["cut"] += 1
            else:
                lines.append(_line(question.model_copy(update={"messages": [*question.messages[:-1], answer.message]})))
                tokens += answer.tokens
        mine = await asyncio.to_thread(self._commit, lease, lines, drops, tokens)
        self._committed += mine  # behind the wait: the other shard may have counted meanwhile

    def _commit(self, lease: Lease, lines: list[bytes], drops: Counter[str], tokens: int) -> bool:
        data = sets.pack_lines(lines)
        self._board.objects.put(self._board.data_key(lease), data)
        mine = self._board.commit(
            lease,
            size=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            tokens=tokens,
            extra={"samples": len(lines), "drops": dict(drops)},
        )
        for info in self._board.objects.list(_partial(lease.shard)):
            self._board.objects.delete(info.key)
        return mine

    @asynccontextmanager
    async def _alive(self, lease: Lease, answers: dict[str, Answer | str]) -> AsyncIterator[None]:
        """Heartbeats, each behind the answers that have come in; the last ones are saved however it ends."""
        saved = _Saved(self._board, lease)
        beating = asyncio.create_task(self._beat(lease, saved, answers))
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            with contextlib.suppress(Exception):  # what is being raised matters more
                saved.save(answers)

    async def _beat(self, lease: Lease, saved: _Saved, answers: dict[str, Answer | str]) -> None:
        while True:
            with contextlib.suppress(Exception):  # tried again with the next beat: an outage costs double work at most
                await asyncio.to_thread(saved.save, dict(answers))
                await asyncio.to_thread(self._board.heartbeat, lease, {"shard": lease.shard, "answers": len(answers)})
            await asyncio.sleep(self._job.ttl_s / 4)

    def _saved(self, lease: Lease) -> dict[str, Answer | str]:
        """Answers of those who held this shard before; what they got none for is asked again."""
        answers: dict[str, Answer | str] = {}
        for info in self._board.objects.list(_partial(lease.shard)):
            with contextlib.suppress(ValueError, TypeError):  # half-written by a store without atomic puts
                for name, (message, tokens, cut) in json.loads(self._board.objects.get(info.key)).items():
                    answers[name] = Answer(Message.model_validate(message), tokens, cut)
        return answers


class _Saved:
    """The answers of a shard that is being worked on, in the store; more of them replace fewer, never the reverse."""

    def __init__(self, board: Board, lease: Lease) -> None:
        self._objects, self._key = board.objects, f"{_partial(lease.shard)}/{lease.epoch:06d}"
        self._writing = threading.Lock()  # a slow beat must not overtake the last save
        self._count = 0

    def save(self, answers: dict[str, Answer | str]) -> None:
        values = {
            name: [answer.message.model_dump(mode="json", exclude_defaults=True), answer.tokens, answer.cut]
            for name, answer in answers.items()
            if isinstance(answer, Answer)
        }
        with self._writing:
            if len(values) > self._count:
                self._objects.put(self._key, json.dumps(values).encode())
                self._count = len(values)


def _partial(shard: str) -> str:
    return f"partial/{shard}"


def _line(conversation: Conversation) -> bytes:
    return conversation.model_dump_json(exclude_defaults=True).encode() + b"\n"
