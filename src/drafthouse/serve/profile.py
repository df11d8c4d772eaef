"""A serving profile: which model, which engine in which exact version, how it is launched and how it is proven.

One YAML file describes one served model. Values that an engine calls by different names stand once, under the
field's own name (`context_length`, `tensor_parallel`, speculation); what only one engine knows stands under
`engine`. Nothing here knows what works together: that is `preflight`, so that a profile which cannot work is
loaded, explained and translated instead of being a syntax error.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from drafthouse.config import Settings

EMBEDDED = "embedded"
Flag = bool | int | float | str
MambaStrategy = Literal["auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"]
StateDtype = Literal["float32", "bfloat16", "float16"]
# What the engines call `tensor_parallel`, `context_length`, … must not be given a second time by hand.
_FLAG_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
_VERSION = re.compile(r"\d+(\.\d+)+([a-z0-9.+]+)?")


class ModelSource(Settings):
    """Where weights come from."""

    path: str = Field(min_length=1, description="model folder, hub id, or 'embedded' for the small target")
    revision: str | None = Field(None, description="hub commit (40 hexadecimal digits), tag or branch; none: a folder")

    @property
    def pinned(self) -> bool:
        """True when the revision is a commit, which cannot move."""
        return bool(self.revision and re.fullmatch(r"[0-9a-f]{40}", self.revision))

    @property
    def local(self) -> bool:
        """True when `path` is a folder or the embedded model, not a hub id."""
        return self.path == EMBEDDED or self.path.startswith(("/", "./", "../", "~", "runs/"))


class Model(ModelSource):
    """The served model."""

    served_name: str = Field(min_length=1, description="name in requests; must not contain ':' for SGLang")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "bfloat16"


class _Triple(Settings):
    steps: int | None = Field(None, ge=1, description="draft passes a round; SGLang's num_steps, vLLM's tokens")
    topk: int | None = Field(None, ge=1, description="branches a step; 1 is a chain")
    draft_tokens: int | None = Field(None, ge=1, description="width of the verify pass, the known token included")


class NoSpeculation(Settings):
    """Plain decoding."""

    method: Literal["none"] = "none"


class Mtp(_Triple):
    """The model's own multi-token-prediction layer (SGLang: NEXTN, vLLM: mtp)."""

    method: Literal["mtp"] = "mtp"


class _Drafted(_Triple):
    draft: ModelSource = Field(description="the drafter's folder or hub id")
    attention_backend: str | None = Field(None, description="of the drafter")
    kv_cache_dtype: str | None = Field(None, description="of the drafter; fp8_e4m3 halves its pool")


class Dflash(_Drafted):
    """A DFlash block drafter (arXiv 2602.06036)."""

    method: Literal["dflash"] = "dflash"
    block_size: int | None = Field(None, ge=2, description="B; none: the drafter's config decides")
    window_size: int | None = Field(None, ge=1, description="keys that the drafter sees; at least the block")


class Eagle3(_Drafted):
    """An EAGLE-3 drafter (arXiv 2503.01840)."""

    method: Literal["eagle3"] = "eagle3"


Speculation = Annotated[NoSpeculation | Mtp | Dflash | Eagle3, Field(discriminator="method")]


class _Engine(Settings):
    version: str = Field(description="exact version, e.g. 0.5.23")
    device: Literal["cuda", "cpu"] = "cuda"
    python: str = Field("python3", min_length=1, description="interpreter that has the engine")
    attention_backend: str | None = None
    kv_cache_dtype: str | None = Field(None, description="of the target's attention cache; none: the model's")
    mamba_ssm_dtype: StateDtype | None = Field(None, description="of recurrent states; none: the model's config")
    chunked_prefill: int | None = Field(None, gt=0, description="tokens of one prefill step")
    custom_all_reduce: bool = Field(True, description="off: NCCL, whose behaviour does not depend on a P2P probe")
    language_model_only: bool = Field(False, description="do not load the vision tower")
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    extra_args: dict[str, Flag] = Field(
        default_factory=dict,
        description="further flags without dashes; true: the bare flag, false: left out",
    )

    @field_validator("version")
    @classmethod
    def _exact(cls, value: str) -> str:
        if not _VERSION.fullmatch(value):
            raise ValueError(f"'{value}' is not an exact version such as 0.5.23 (quote it in YAML)")
        return value

    @field_validator("extra_args")
    @classmethod
    def _names(cls, value: dict[str, Flag]) -> dict[str, Flag]:
        wrong = [name for name in value if not _FLAG_NAME.fullmatch(name)]
        if wrong:
            raise ValueError(f"'{wrong[0]}' is not a flag's name: write it without leading dashes, in lower case")
        return value


class Sglang(_Engine):
    """SGLang (flags as of 0.5.23)."""

    name: Literal["sglang"] = "sglang"
    mem_fraction_static: float | None = Field(None, gt=0, lt=1, description="weights + pools; none: its heuristic")
    page_size: int | None = Field(None, ge=1)
    radix_cache: bool = True
    overlap_schedule: bool = True
    mamba_radix_cache_strategy: MambaStrategy = "auto"
    mamba_full_memory_ratio: float | None = Field(None, gt=0, description="recurrent : attention pool; none: 0.9")
    mamba_track_interval: int | None = Field(None, ge=1, description="tokens between state snapshots; none: 256")
    max_mamba_cache_size: int | None = Field(None, ge=1, description="state slots; none: from the memory ratio")
    linear_attn_backend: str | None = Field(None, description="of prefill and decode; none: triton")
    linear_attn_decode_backend: str | None = None
    prefill_graph: Literal["full", "breakable", "disabled"] | None = Field(
        None, description="CUDA graph of prefill; none lets SGLang switch it off where it does not work"
    )
    decode_graph: Literal["full", "breakable", "disabled"] | None = None
    decode_graph_max_batch: int | None = Field(None, ge=1)
    pipeline_parallel: int = Field(1, ge=1)


class Vllm(_Engine):
    """vLLM (flags as of 0.33.0), and its CPU build as device `cpu`."""

    name: Literal["vllm"] = "vllm"
    gpu_memory_utilization: float | None = Field(None, gt=0, lt=1, description="none: 0.9")
    prefix_caching: bool | None = Field(None, description="none: the engine's default, which is on")
    gdn_prefill_backend: str | None = None
    enforce_eager: bool = False
    cpu_kvcache_gib: int | None = Field(None, ge=1, description="memory of the cache, on a CPU")
    pipeline_parallel: int = Field(1, ge=1)


Engine = Annotated[Sglang | Vllm, Field(discriminator="name")]


class Hardware(Settings):
    """What the profile is made for; the node's own facts take precedence where they are known."""

    gpu: str = Field(description="name as nvidia-smi prints it, or 'cpu'")
    gpus: int = Field(ge=0)
    memory_mib: int | None = Field(None, gt=0, description="of one GPU, MiB as nvidia-smi counts them")
    compute_capability: tuple[int, int] | None = Field(None, description="e.g. [8, 6] for GA102")
    nvlink: bool = False


class Health(Settings):
    """How a supervisor asks whether the server lives."""

    path: str = "/health"
    interval_s: int = Field(30, gt=0)
    timeout_s: int = Field(30, gt=0, description="above SGLang's own 20 s: its /health generates a token")
    start_period_s: int = Field(900, gt=0, description="loading and graph capture")
    retries: int = Field(3, gt=0)


class Container(Settings):
    """How the engine runs as a container."""

    image: str = Field(min_length=1, description="name with tag or digest")
    ipc_host: bool = Field(True, description="share the host's /dev/shm; else `shm_gib` counts")
    shm_gib: int | None = Field(None, ge=1)
    memlock_unlimited: bool = True
    volumes: dict[str, str] = Field(default_factory=dict, description="host path or volume → absolute path inside")

    @field_validator("volumes")
    @classmethod
    def _absolute(cls, value: dict[str, str]) -> dict[str, str]:
        for inside in value.values():
            if not PurePosixPath(inside.partition(":")[0]).is_absolute():
                raise ValueError(f"'{inside}' must be an absolute path inside the container")
        return value

    @model_validator(mode="after")
    def _tagged(self) -> Self:
        last = self.image.rsplit("/", 1)[-1]
        if "@sha256:" not in self.image and ":" not in last:
            raise ValueError(f"image '{self.image}' needs a tag or a digest: a bare name means whatever is newest")
        return self


class Question(Settings):
    """A prompt whose answer is known."""

    prompt: str = Field(min_length=1)
    answers: tuple[str, ...] = Field(min_length=1, description="any of these in the answer, case ignored, is right")
    max_tokens: int = Field(256, ge=1, description="thinking included")


class CanarySpec(Settings):
    """What a served model must prove before traffic reaches it."""

    questions: tuple[Question, ...] = Field(min_length=1)
    min_right: float = Field(1.0, ge=0, le=1, description="share of questions that must be answered right")
    min_distinct: float = Field(0.3, ge=0, le=1, description="distinct words / words; degenerate output is below")
    min_acceptance: float | None = Field(
        None, description="acceptance length must be ABOVE this; none: 1 with speculation, else not looked at"
    )
    json_schema: bool = Field(True, description="one request with a JSON schema")
    resume_words: int = Field(4_000, ge=0, description="length of the long prefix that is resumed; 0: not tried")
    timeout_s: float = Field(120, gt=0, description="of one request")
    enabled: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="e.g. {enable_thinking: false}")


class Profile(Settings):
    """One served model."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="equal to the file's name without .yml")
    description: str = ""
    model: Model
    engine: Engine
    hardware: Hardware
    host: str = "127.0.0.1"
    port: int = Field(30_000, ge=1, le=65_535)
    tensor_parallel: int = Field(1, ge=1)
    context_length: int = Field(gt=0, description="tokens of one request, prompt and answer")
    max_running_requests: int | None = Field(None, ge=1, description="none: the engine's default")
    speculation: Speculation = Field(default_factory=NoSpeculation)
    environment: dict[str, str] = Field(default_factory=dict, description="of the server's process; no secrets")
    health: Health = Field(default_factory=Health)
    container: Container | None = None
    canary: CanarySpec

    @field_validator("environment")
    @classmethod
    def _no_secrets(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"'{name}' is no name of an environment variable")
            if re.search(r"(TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY)$", name):
                raise ValueError(f"'{name}' looks like a secret: keep it in the node's own environment file")
        return value

    @property
    def speculates(self) -> bool:
        return not isinstance(self.speculation, NoSpeculation)

    @property
    def draft(self) -> ModelSource | None:
        """The drafter's source, for the methods that have one."""
        return self.speculation.draft if isinstance(self.speculation, (Dflash, Eagle3)) else None

    @property
    def address(self) -> str:
        """Where the server is asked on its own node."""
        return f"http://{'127.0.0.1' if self.host in ('0.0.0.0', '::') else self.host}:{self.port}"

    @property
    def world_size(self) -> int:
        """GPUs that the profile occupies."""
        return self.tensor_parallel * self.engine.pipeline_parallel
