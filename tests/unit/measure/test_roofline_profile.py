"""From a serving profile to a roofline, and the verb on top of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from drafthouse.errors import DrafthouseError
from drafthouse.measure.roofline import RooflineError, Serving, roofline
from drafthouse.measure.roofline import cli as verb
from drafthouse.measure.roofline.profile import drafter_config, model_config, plan_of, read_profile

REPOSITORY = Path(__file__).parents[3]
PROFILES = REPOSITORY / "inventory" / "profiles"
MTP: dict[str, Any] = {
    "model": {"path": "Qwen/Qwen3.6-27B", "dtype": "bfloat16"},
    "engine": {"name": "sglang"},
    "hardware": {"gpu": "NVIDIA RTX A6000", "gpus": 2},
    "tensor_parallel": 2,
    "context_length": 131_072,
    "speculation": {"method": "mtp", "steps": 3, "topk": 1, "draft_tokens": 4},
}
APP = typer.Typer(pretty_exceptions_enable=False)
APP.command("roofline")(verb.roofline)
APP.command("other")(lambda: None)  # two verbs, so that the first has to be named


def run(*words: str) -> str:
    result = CliRunner().invoke(APP, ["roofline", *words])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    (tmp_path / "mtp.yml").write_text(yaml.safe_dump(MTP), encoding="utf-8")
    return tmp_path


class TestPlan:
    def test_what_a_profile_means(self) -> None:
        plan = plan_of(MTP)
        assert (plan.served, plan.hardware, plan.link) == ("Qwen3.6-27B", "NVIDIA RTX A6000", None)
        assert plan.serving == {
            "tensor_parallel": 2,
            "context": 4096,
            "weights": "bfloat16",
            "draft": "mtp",
            "steps": 3,
            "tree": False,
            "width": 4,
        }
        assert roofline(plan.model, plan.hardware, plan.serving).longest == 4

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"engine": {"kv_cache_dtype": "fp8_e4m3", "mamba_ssm_dtype": "bfloat16"}}, {"kv_cache": "fp8_e4m3"}),
            ({"engine": {"kv_cache_dtype": "auto", "extra_args": {"quantization": "fp8"}}}, {"weights": "fp8"}),
            ({"model": {"path": "Qwen/Qwen3.8-27B-FP8"}}, {"weights": "fp8"}),
            (
                {"speculation": {"method": "mtp", "steps": 3, "topk": 4, "draft_tokens": 16}},
                {"tree": True, "width": 16},
            ),
            ({"speculation": {"method": "none"}}, {"draft": "none"}),
            ({"context_length": 1024}, {"context": 1024}),
        ],
    )
    def test_fields_of_a_profile(self, change: dict[str, Any], expected: dict[str, Any]) -> None:
        found = plan_of(MTP | change).serving
        assert {key: found.get(key) for key in expected} == expected
        assert Serving(**found)

    def test_nvlink_and_a_drafter(self) -> None:
        speculation = {"method": "dflash", "draft": {"path": "z-lab/Qwen3.6-27B-DFlash"}, "block_size": 8}
        plan = plan_of(MTP | {"hardware": {"gpu": "NVIDIA RTX A6000", "nvlink": True}, "speculation": speculation})
        assert plan.link == "nvlink"
        assert plan.drafter is not None
        assert roofline(plan.model, plan.hardware, plan.serving, draft=plan.drafter).longest == 8

    def test_every_profile_of_the_inventory_is_understood(self) -> None:
        understood = []
        for path in sorted(PROFILES.glob("*.yml")):
            profile = dict(read_profile(path.stem, PROFILES))
            if not Path(str((profile.get("speculation") or {}).get("draft", {}).get("path", "/"))).is_absolute():
                # A drafter that a demo run writes is not there before it; any drafter tells whether the rest is read.
                profile["speculation"] = dict(profile["speculation"]) | {"draft": {"path": "z-lab/Qwen3.6-27B-DFlash"}}
            plan = plan_of(profile)
            name = "a6000" if plan.hardware == "probe" else plan.hardware
            found = roofline(plan.model, name, plan.serving, draft=plan.drafter)
            understood.append(found.step_ms > 0)
        assert understood, f"no profile in {PROFILES.name}"
        assert all(understood)

    def test_the_embedded_model(self) -> None:
        config, quantised = model_config("embedded")
        assert quantised is None
        assert roofline(config, "h200", {"context": 64}).memory_bytes < 1e9

    def test_a_folder_says_its_quantisation(self, tmp_path: Path) -> None:
        config = dict(model_config("Qwen/Qwen3.6-27B")[0])
        for method, bits, expected in (("fp8", None, "fp8"), ("gptq", 4, "int4"), ("gptq", 8, "int8")):
            text = config | {"quantization_config": {"quant_method": method, "bits": bits}}
            (tmp_path / "config.json").write_text(json.dumps(text), encoding="utf-8")
            assert model_config(str(tmp_path))[1] == expected

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("{", "not valid JSON"),
            ("[]", "a config.json is an object"),
            ('{"quantization_config": {"quant_method": "exl9"}}', "bytes of quantisation 'exl9' are not known"),
        ],
    )
    def test_a_folder_that_cannot_be_read(self, tmp_path: Path, text: str, words: str) -> None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(RooflineError, match=words):
            model_config(str(tmp_path))

    def test_names_that_are_not_known(self) -> None:
        with pytest.raises(RooflineError, match=r"shape of model 'acme/Nine-9B' is not known.*qwen3\.6-27b"):
            model_config("acme/Nine-9B")
        with pytest.raises(RooflineError, match="shape of drafter 'acme/Draft' is not known"):
            drafter_config("acme/Draft")

    def test_profiles_that_are_none(self, profiles: Path) -> None:
        with pytest.raises(RooflineError, match="no profile is called 'nope'; choose one of those there: mtp"):
            read_profile("nope", profiles)
        (profiles / "list.yml").write_text("- 1\n", encoding="utf-8")
        with pytest.raises(RooflineError, match="a mapping of keys"):
            read_profile("list", profiles)
        (profiles / "broken.yml").write_text("a: [", encoding="utf-8")
        with pytest.raises(RooflineError, match="not valid YAML"):
            read_profile("broken", profiles)
        with pytest.raises(RooflineError, match="has no section 'engine'"):
            plan_of({"model": {"path": "embedded"}}, "short")


class TestVerb:
    def test_json_has_what_is_promised(self, profiles: Path) -> None:
        found = json.loads(run("--profile", "mtp", "--profiles", str(profiles), "--acceptance", "3.1", "--json"))
        assert found["weights_ms"] == pytest.approx(33.36, abs=0.01)
        assert found["step_ms"] == pytest.approx(42.35, abs=0.01)
        assert found["bound_tokens_per_s"] == pytest.approx(3.1 / found["step_ms"] * 1000)
        assert sum(found["shares"].values()) == pytest.approx(1)
        assert "measured" not in found

    def test_a_measured_step_is_set_beside_it(self, profiles: Path) -> None:
        words = ("--profile", "mtp", "--profiles", str(profiles), "--acceptance", "3.1", "--measured-ms", "44.1")
        told = run(*words)
        assert "You are at 96" in told
        assert "The lever left is acceptance length" in told
        assert "at the measured step" in told
        assert json.loads(run(*words, "--json"))["measured"]["share_of_bound"] == pytest.approx(0.96, abs=0.005)

    def test_options_take_precedence_over_the_profile(self, profiles: Path) -> None:
        common = ("--profile", "mtp", "--profiles", str(profiles), "--json")
        nvlink = json.loads(run(*common, "--link", "nvlink"))
        assert nvlink["hardware"]["link"] == "nvlink"
        assert nvlink["step_ms"] < json.loads(run(*common))["step_ms"]
        other = json.loads(run(*common, "--hardware", "h200", "--set", "tensor_parallel=1", "--batch", "3"))
        assert (other["hardware"]["name"], other["serving"]["batch"]) == ("h200", 3)
        drafter = json.loads(
            run(*common, "--drafter", "z-lab/Qwen3.6-27B-DFlash", "--set", "draft=dflash", "--set", "steps=null")
        )
        assert drafter["serving"]["draft"] == "dflash"

    def test_a_sweep_is_set_beside_it(self, profiles: Path, tmp_path: Path) -> None:
        points = [
            {"concurrency": 1, "context": 1024, "tokens_per_s": 73.6, "acceptance": 3.5},
            {"concurrency": 1, "context": 120_000, "step_ms": 53.9, "acceptance": 3.5},
        ]
        path = tmp_path / "sweep.json"
        path.write_text(json.dumps({"points": points}), encoding="utf-8")
        words = ("--profile", "mtp", "--profiles", str(profiles), "--sweep", str(path))
        short, long = json.loads(run(*words, "--json"))["sweep"]
        assert short["measured_ms"] == pytest.approx(3.5 / 73.6 * 1000)
        assert long["tokens_per_s"] == pytest.approx(3.5 / 53.9 * 1000)
        assert short["share_of_bound"] == pytest.approx(long["share_of_bound"], abs=0.02)
        assert "share_of_bound" in run(*words)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("[]", "no list of points"),
            ('{"a": 1}', "no list of points"),
            ("[1]", "no list of points"),
            ("{", "is not JSON"),
            ('[{"concurrency": 1}]', "point 0 of the sweep: has neither tokens_per_s nor step_ms"),
            ('[{"concurrency": "many", "tokens_per_s": 5}]', "point 0 of the sweep: holds what is no number"),
            ('[{"tokens_per_s": 5, "acceptance": 9}]', "at most 4 tokens"),
        ],
    )
    def test_a_sweep_that_is_none(self, profiles: Path, tmp_path: Path, text: str, words: str) -> None:
        path = tmp_path / "sweep.json"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(RooflineError, match=words):
            run("--profile", "mtp", "--profiles", str(profiles), "--sweep", str(path))

    def test_wrong_words(self, profiles: Path, tmp_path: Path) -> None:
        with pytest.raises(RooflineError, match="neither a profile nor hardware is given"):
            run()
        with pytest.raises(RooflineError, match="no hardware is called 'v100'"):
            run("--hardware", "v100")
        with pytest.raises(RooflineError, match="is no time of a step"):
            run("--hardware", "h200", "--measured-ms", "0")
        with pytest.raises(DrafthouseError, match="unknown key 'wide'"):
            run("--hardware", "h200", "--set", "wide=1")
        with pytest.raises(RooflineError, match="cannot be read"):
            run("--hardware", "h200", "--sweep", str(tmp_path / "absent.json"))

    def test_nothing_is_written_when_a_word_is_wrong(self, tmp_path: Path) -> None:
        with pytest.raises(RooflineError):
            run("--hardware", "h200", "--measured-ms", "-1", "--out", str(tmp_path / "page"))
        assert not (tmp_path / "page").exists()
