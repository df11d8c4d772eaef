"""What a worker says of itself (`states.presence`), typed; what is missing or odd in it is left out."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from drafthouse.dash.collect import fields
from drafthouse.dash.collect.numbers import number, whole
from drafthouse.dash.model import GpuView

LONGEST_TTL_S = 1e7
"""Nobody waits for months before a shard is taken over."""
_GPU_FIELDS = frozenset(GpuView.model_fields)


class Words:
    """One telling, made by the worker at `at` by the store's clock.

    Attributes:
        held: shard -> tokens that are captured of it.
        ttl_s: after how long a silence its leases are taken over.
        failed: why it gave up.
        odd: fields that do not hold what a worker says.
    """

    def __init__(self, at: datetime, said: Mapping[str, Any]) -> None:
        self.at = at
        self.node, self.device = _text(said.get("node")), _text(said.get("device"))
        self.waiting, self.failed = _text(said.get("waiting")), _text(said.get("failed"))
        ttl_s, held, gpus = said.get("ttl_s"), said.get("held"), said.get("gpus")
        self.ttl_s = number(ttl_s) if _is_ttl(ttl_s) else None
        self.held = {str(shard): whole(count) or 0 for shard, count in held.items()} if isinstance(held, dict) else {}
        self.odd = fields.odd(said, _SAID)
        job = _text(said.get("job"))
        self.gpus = tuple(
            gpu
            for one in (gpus if isinstance(gpus, list) else ())
            if isinstance(one, dict) and (gpu := _gpu(one, job, at)) is not None
        )


def _is_ttl(value: Any) -> bool:
    return 0 < (number(value) or 0.0) <= LONGEST_TTL_S


def _is_held(value: Any) -> bool:
    return isinstance(value, dict) and all(count is None or fields.count(count) for count in value.values())


def _is_gpus(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict) and _gpu(one, None, _ANY_TIME) is not None for one in value
    )


_ANY_TIME = datetime.min
_SAID: Mapping[str, fields.Right] = {
    **dict.fromkeys(("node", "job", "device", "waiting", "failed"), fields.text),
    "ttl_s": _is_ttl,
    "held": _is_held,
    "gpus": _is_gpus,
}


def _gpu(values: Mapping[str, Any], job: str | None, at: datetime) -> GpuView | None:
    known = {name: value for name, value in values.items() if name in _GPU_FIELDS}
    try:
        return GpuView.model_validate(
            {**known, "index": values.get("index") or 0, "job": job, "source": "heartbeat", "at": at}
        )
    except ValidationError:
        return None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
