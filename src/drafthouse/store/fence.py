"""Fences: which life (epoch) of a job counts. Declaring a higher one ends all lower ones, reachable or not.

A fence is a create-only object ``fence/<job>/<epoch>``, never removed. A process that holds an epoch looks before
whatever others will rely on; one that cannot look cannot publish either, because both need the store. (Kleppmann,
"How to do distributed locking", 2016: a token that rises, checked where the data goes.)
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from drafthouse.errors import FleetError, StoreError
from drafthouse.store.body import to_body
from drafthouse.store.keys import check_key, number_of, numbered
from drafthouse.store.objects import ObjectInfo, Store


class FencedError(FleetError):
    """This job has been moved elsewhere: a higher epoch was declared."""

    exit_code = 76


class Fence:
    """The epochs of one job, counted from 1; 0 stands for "none declared yet".

    Args:
        store: where the fleet keeps its records; it must honour conditional puts (`Store.probe`).
        job: name of the job, one key segment.
    """

    def __init__(self, store: Store, job: str) -> None:
        if "/" in job:
            raise StoreError(f"the job's name '{job}' holds a '/'", fix="use one word")
        self.job = job
        self._fences = store.child(f"fence/{check_key(job)}")

    def newest(self) -> int:
        """The highest epoch that was declared, 0 when there is none: one listing."""
        return max(self._declared(), default=0)

    def raise_to(self, epoch: int, body: Mapping[str, Any]) -> bool:
        """Declare `epoch`; `body` (JSON-able) is for people who look. True iff this call declared it.

        False when it was declared before or a higher one is there: epochs only rise. Of callers that race for one
        epoch exactly one gets True. Of callers that race for different ones both may, and `check` tells the lower
        one at once.

        Raises:
            StoreError: `epoch` is below 1.
        """
        if epoch < 1:
            raise StoreError(f"epoch {epoch} cannot be declared", where=self._fences.url, fix="epochs begin at 1")
        if self.newest() >= epoch:
            return False
        # The token makes racing bodies differ, so that `create` can tell whose landed.
        return self._fences.create(numbered(epoch), to_body({**body, "epoch": epoch, "token": secrets.token_hex(16)}))

    def since(self, epoch: int) -> datetime | None:
        """Since when `epoch` is over: the store's time of the first fence above it; None while there is none.

        What a process of `epoch` wrote at that time or later does not count. S3 tells whole seconds.
        """
        # Not the time of the lowest: after a race a higher epoch may have been declared first.
        return min((info.last_modified for number, info in self._declared().items() if number > epoch), default=None)

    def check(self, epoch: int) -> None:
        """Return when `epoch` still counts: one listing.

        Raises:
            FencedError: a higher epoch was declared.
        """
        newest = self.newest()
        if newest > epoch:
            raise FencedError(
                f"epoch {epoch} of this job is over: epoch {newest} was declared",
                where=self._fences.url,
                fix="nothing is to be done here, the job runs elsewhere now",
            )

    def _declared(self) -> dict[int, ObjectInfo]:
        return {number: info for info in self._fences.list() if (number := number_of(info.key)) is not None}
