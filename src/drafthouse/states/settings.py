"""Settings of an extraction: what is captured, in which batches, and how much may wait to be written."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from drafthouse.config import Settings


class EngineSettings(Settings):
    """Who computes the states. It decides how fast, and nothing of what comes out but the last bits."""

    kind: Literal["transformers", "vllm", "sglang"] = Field(
        "transformers", description="transformers: in this process; vllm, sglang: a server on this node"
    )
    url: str = Field("http://127.0.0.1:8000", description="address of the server")
    storage: Path | None = Field(
        None,
        description="folder that the server writes to, best in /dev/shm: vllm's shared_storage_path,"
        " sglang's DRAFTHOUSE_STATES",
    )
    timeout_s: float = Field(300.0, gt=0, description="of one request to the server")

    @model_validator(mode="after")
    def _check(self) -> EngineSettings:
        if self.kind != "transformers" and self.storage is None:
            raise ValueError("engine.storage is missing: give the folder that the server writes to")
        return self


class ExtractSettings(Settings):
    """`layer_ids`, `dtype` and `max_tokens` decide what comes out and are part of the run's specification;
    the others only decide how fast, and may change between workers and restarts."""

    layer_ids: tuple[int, ...] = Field((), description="decoder layers whose outputs are kept, rising; 0 is first")
    dtype: Literal["bf16", "fp8"] = Field(
        "bf16", description="element type of the states in the shards; fp8: e4m3 with a scale a token and layer"
    )
    engine: EngineSettings = Field(default_factory=EngineSettings)
    max_tokens: int = Field(4096, ge=1, description="longer samples are cut to their first max_tokens tokens")
    rows: int = Field(256, ge=1, description="samples of one batch, at most")
    batch_tokens: int = Field(16384, ge=1, description="rows times padded length of one batch, at most")
    pad_multiple: int = Field(64, ge=1, description="batches are padded to a multiple of this many tokens, at most")
    ttl_s: float = Field(600.0, gt=0, description="seconds of silence after which others take over a shard")
    writer_bytes: int = Field(2 * 2**30, ge=2**20, description="states in host memory that wait to be written")
    writer_threads: int = Field(2, ge=1, description="threads that write states to the scratch directory")
    shards_in_flight: int = Field(2, ge=1, description="finished shards that may wait for their upload")
    scratch: str | None = Field(None, description="directory for unfinished shards; none: the system's")
    disk_high: float = Field(0.90, gt=0, le=1, description="claim no shard while a disk is this full")
    disk_low: float = Field(0.85, gt=0, le=1, description="claim again when it is at most this full")
    shm_high: float = Field(0.80, gt=0, le=1, description="the same for file systems in memory, as /dev/shm")
    shm_low: float = Field(0.75, gt=0, le=1, description="the same for file systems in memory, as /dev/shm")
    disk_wait_s: float = Field(600.0, ge=0, description="seconds to wait for space before giving up")

    @model_validator(mode="after")
    def _check(self) -> ExtractSettings:
        if list(self.layer_ids) != sorted({*self.layer_ids}) or any(i < 0 for i in self.layer_ids):
            raise ValueError(f"layer_ids must rise strictly from 0 or more, not {list(self.layer_ids)}")
        if self.disk_low > self.disk_high:
            raise ValueError(f"disk_low {self.disk_low} must not be above disk_high {self.disk_high}")
        if self.shm_low > self.shm_high:
            raise ValueError(f"shm_low {self.shm_low} must not be above shm_high {self.shm_high}")
        if self.batch_tokens < self.max_tokens:
            raise ValueError(f"batch_tokens {self.batch_tokens} cannot hold one sample of max_tokens {self.max_tokens}")
        return self
