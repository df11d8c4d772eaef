"""SGLang's own resolver: the protocol with a stand-in, and the verdicts of the real one where it is installed.

Name an interpreter that has SGLang 0.5.23 (no GPU is needed) in DRAFTHOUSE_SGLANG_PYTHON to run the real part.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from drafthouse.serve.errors import ProfileError
from drafthouse.serve.facts import Facts, Resolution
from drafthouse.serve.findings import errors
from drafthouse.serve.flags import FLAGS
from drafthouse.serve.launch import launch_line
from drafthouse.serve.preflight import preflight
from drafthouse.serve.resolver import resolve
from tests.unit.serve import clean
from tests.unit.serve.clean import CPU, DFLASH, MTP, VLLM_MTP

REAL = os.environ.get("DRAFTHOUSE_SGLANG_PYTHON")
VISION = {
    "model_type": "qwen3_5",
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 5120,
    "in_channels": 3,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [],
}

# As much of SGLang's package as the child touches.
STAND_IN = {
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/utils.py": "is_cuda = lambda: False\n",
    "sglang/srt/runtime_context.py": """
class override_platform:
    def __init__(self, **facts): self.facts = facts
    def install(self): print("noise on standard output", self.facts["device_capability"])
""",
    "sglang/srt/arg_groups/__init__.py": "",
    "sglang/srt/arg_groups/memory_hook.py": "get_device_memory_capacity = None\n",
    "sglang/srt/arg_groups/overrides.py": "def resolution_result(a, name): return getattr(a, name, None)\n",
    "sglang/srt/server_args.py": """
import argparse, json
from sglang.srt.arg_groups import memory_hook

class Arguments:
    def __init__(self, argv): self.argv = argv
    def resolve_once(self):
        value = lambda flag: self.argv[self.argv.index(flag) + 1] if flag in self.argv else None
        self.context_length = value("--context-length")
        self.page_size = value("--page-size")
        if self.page_size == "48":
            assert False
        if self.page_size == "64":
            json.loads("no GPU")
        self.attention_backend = self.argv
        self.mem_fraction_static = memory_hook.get_device_memory_capacity and memory_hook.get_device_memory_capacity()
    def check_server_args(self): pass

def prepare_server_args(argv):
    if "--no-such-flag" in argv:
        argparse.ArgumentParser(prog="sglang").error("unrecognized arguments: --no-such-flag")
    return Arguments(argv)
""",
    "sglang-0.5.23.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that holds the target's config.json and nothing else."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**clean.CONFIG, "vision_config": VISION}), encoding="utf-8")
    return folder


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(clean.drafter_config()), encoding="utf-8")
    return folder


class TestProtocol:
    @pytest.fixture(autouse=True)
    def _stand_in(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, text in STAND_IN.items():
            path = tmp_path / "site" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))

    def ask(self, model: Path, *overrides: str, name: str = MTP, draft: Path | None = None) -> Resolution | None:
        return resolve(clean.profile(name, *overrides), Facts(), model=model, draft=draft, python=sys.executable)

    def test_what_it_resolved(self, model: Path) -> None:
        found = self.ask(model)
        assert found is not None
        assert (found.version, found.error, found.unjudged) == ("0.5.23", None, None)
        assert found.resolved is not None
        assert found.resolved["context_length"] == "131072"
        assert found.resolved["mem_fraction_static"] == 49_140, "the memory of the profile's GPU was told"

    def test_folders_take_the_place_of_names_on_a_hub(self, model: Path, draft: Path) -> None:
        found = self.ask(model, name=DFLASH, draft=draft)
        assert found is not None
        assert found.resolved is not None
        line = found.resolved["attention_backend"]
        assert str(model) in line
        assert str(draft) in line
        assert "revision" not in line
        assert "z-lab" not in line
        assert "'--device', 'cuda'" in line

    @pytest.mark.parametrize(
        ("override", "error", "unjudged"),
        [
            (
                "engine.extra_args.no-such-flag=true",
                "argument parser: sglang: error: unrecognized arguments: --no-such-flag",
                None,
            ),
            ("engine.page_size=48", "AssertionError (server_args.py:12)", None),
            ("engine.page_size=64", None, "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (decoder.py:"),
        ],
    )
    def test_verdicts(self, model: Path, override: str, error: str | None, unjudged: str | None) -> None:
        found = self.ask(model, override)
        assert found is not None
        assert found.resolved is None
        assert found.error == error
        assert (found.unjudged or "").startswith(unjudged or "")
        assert (found.unjudged is None) == (unjudged is None)

    def test_it_is_the_last_word(self, model: Path) -> None:
        profile = clean.profile(MTP)
        facts = clean.facts(profile).model_copy(update={"resolution": self.ask(model, "engine.page_size=48")})
        assert [finding.id for finding in errors(preflight(profile, facts))] == ["resolver-refuses"]


class TestNobodyToAsk:
    def test_no_sglang(self, model: Path) -> None:
        assert resolve(clean.profile(MTP), Facts(), model=model, python=sys.executable) is None

    def test_no_interpreter(self, model: Path) -> None:
        assert resolve(clean.profile(MTP), Facts(), model=model, python="no-such-python") is None

    def test_another_engine(self, model: Path) -> None:
        for name in (VLLM_MTP, CPU):
            assert resolve(clean.profile(name), Facts(), model=model, python=sys.executable) is None

    def test_no_line_to_judge(self, model: Path) -> None:
        profile = clean.profile(MTP, "engine.extra_args.cuda-graph-bs=1")
        with pytest.raises(ProfileError):
            launch_line(profile)
        assert resolve(profile, Facts(), model=model, python=sys.executable) is None

    def test_a_program_that_says_something_else(self, model: Path) -> None:
        assert resolve(clean.profile(MTP), Facts(), model=model, python="true") is None


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason="DRAFTHOUSE_SGLANG_PYTHON names no interpreter with SGLang")
class TestReal:
    """The table's verdicts on launch lines are SGLang's own."""

    def said(self, model: Path, draft: Path, name: str, *overrides: str) -> Resolution:
        profile = clean.profile(name, *overrides)
        found = resolve(profile, clean.facts(profile), model=model, draft=draft, python=REAL)
        assert found is not None
        return found

    def test_the_mission_s_line(self, model: Path, draft: Path) -> None:
        found = self.said(model, draft, MTP, "engine.mem_fraction_static=null", "max_running_requests=null").resolved
        assert found is not None
        assert found["speculative_algorithm"] == "EAGLE"
        assert found["mamba_radix_cache_strategy"] == "extra_buffer"
        assert found["mem_fraction_static"] == pytest.approx(0.78605078125)
        assert found["max_running_requests"] == 48

    def test_dflash(self, model: Path, draft: Path) -> None:
        found = self.said(model, draft, DFLASH).resolved
        assert found is not None
        assert (found["speculative_algorithm"], found["speculative_num_draft_tokens"]) == ("DFLASH", 16)

    @pytest.mark.parametrize(
        ("finding", "name", "overrides"),
        [
            ("spec-triple-incomplete", MTP, ("speculation.topk=null",)),
            ("spec-triple-incomplete", MTP, ("speculation.steps=null", "speculation.topk=null")),
            ("no-buffer-overlap", MTP, ("engine.mamba_radix_cache_strategy=no_buffer",)),
            (
                "no-buffer-page",
                MTP,
                (
                    "engine.mamba_radix_cache_strategy=no_buffer",
                    "engine.overlap_schedule=false",
                    "engine.page_size=16",
                ),
            ),
            ("track-interval-page", MTP, ("engine.page_size=48",)),
            ("track-interval-drafts", MTP, ("engine.mamba_track_interval=2",)),
            ("chunk-page", MTP, ("engine.page_size=16", "engine.chunked_prefill=1000")),
            ("trtllm-mha-gpu", MTP, ("engine.attention_backend=trtllm_mha",)),
            ("served-name-colon", MTP, ("model.served_name='a:b'",)),
            ("language-model-only", MTP, ("engine.language_model_only=true",)),
            ("replayssm-strategy", MTP, ("engine.extra_args.enable-linear-replayssm=true",)),
            ("dflash-block-differs", DFLASH, ("speculation.draft_tokens=8",)),
            ("dflash-window", DFLASH, ("speculation.window_size=8",)),
            ("dflash-pipeline", DFLASH, ("engine.pipeline_parallel=2",)),
        ],
    )
    def test_it_refuses_what_preflight_refuses(
        self, model: Path, draft: Path, finding: str, name: str, overrides: tuple[str, ...]
    ) -> None:
        profile = clean.profile(name, *overrides)
        assert finding in {found.id for found in errors(preflight(profile, clean.facts(profile)))}
        assert self.said(model, draft, name, *overrides).error is not None

    def test_it_knows_none_of_the_retired_flags(
        self, model: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from drafthouse.serve import launch
        from drafthouse.serve.flags import Translation

        # Untranslated, as the profile has them.
        monkeypatch.setattr(launch, "translated", lambda profile: Translation(dict(profile.engine.extra_args), {}, ()))
        for rule in FLAGS["sglang"]:
            value = rule.only or ("1" if rule.refuse or rule.new_value is None else "true")
            profile = clean.profile(
                MTP, "engine.mamba_radix_cache_strategy=auto", f"engine.extra_args={{{rule.old}: {value}}}"
            )
            found = resolve(profile, clean.facts(profile), model=model, draft=draft, python=REAL)
            assert found is not None
            assert found.error is not None, rule.old
