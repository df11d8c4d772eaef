from __future__ import annotations

import itertools
import json
import shlex
import subprocess
from pathlib import Path

import pytest

from drafthouse.serve.errors import ProfileError
from drafthouse.serve.flags import FLAGS, VARIABLES, translate
from drafthouse.serve.launch import (
    LaunchLine,
    drafted_tokens,
    health_command,
    launch_line,
    model_path,
    render_container,
    render_shell,
    render_systemd,
    vllm_speculative_config,
)
from tests.unit.serve import clean
from tests.unit.serve.clean import CPU, DFLASH, MTP, NAMES, VLLM_DFLASH, VLLM_MTP


def flags(name: str, *overrides: str) -> dict[str, str]:
    """Value by flag of a launch line; bare flags have an empty one."""
    argv = launch_line(clean.profile(name, *overrides)).argv
    found: dict[str, str] = {}
    for word, after in zip(argv, (*argv[1:], "--"), strict=True):
        if word.startswith("--"):
            found[word] = "" if after.startswith("--") else after
    return found


class TestSglang:
    def test_the_mission_s_line(self) -> None:
        line = launch_line(clean.profile(MTP))
        assert line.argv[:5] == ("python3", "-m", "sglang.launch_server", "--model-path", "Qwen/Qwen3.6-27B")
        found = flags(MTP)
        assert found["--speculative-algorithm"] == "NEXTN"
        assert found["--speculative-num-steps"] == "3"
        assert found["--speculative-eagle-topk"] == "1"
        assert found["--speculative-num-draft-tokens"] == "4"
        assert found["--mamba-radix-cache-strategy"] == "extra_buffer"
        assert found["--context-length"] == "131072"
        assert found["--tp-size"] == "2"
        assert found["--disable-custom-all-reduce"] == ""
        assert "--enable-metrics" in found
        assert line.env == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def test_dflash(self) -> None:
        found = flags(DFLASH, "speculation.window_size=2048", "speculation.kv_cache_dtype=fp8_e4m3")
        assert found["--speculative-algorithm"] == "DFLASH"
        assert found["--speculative-draft-model-path"] == "z-lab/Qwen3.6-27B-DFlash"
        assert found["--speculative-dflash-block-size"] == "16"
        assert found["--speculative-draft-window-size"] == "2048"
        assert found["--speculative-draft-kv-cache-dtype"] == "fp8_e4m3"
        assert "--speculative-num-steps" not in found

    def test_without_speculation_nothing_speaks_of_it(self) -> None:
        assert not [flag for flag in flags(MTP, "speculation={method: none}") if "specul" in flag]

    def test_what_is_switched_off(self) -> None:
        found = flags(MTP, "engine.radix_cache=false", "engine.overlap_schedule=false", "engine.device=cpu")
        assert {"--disable-radix-cache", "--disable-overlap-schedule"} <= found.keys()
        assert found["--device"] == "cpu"
        assert launch_line(clean.profile(MTP, "engine.device=cpu")).env == {}

    def test_further_flags(self) -> None:
        found = flags(MTP, "engine.extra_args={log-level: debug, log-requests: true, skip-server-warmup: false}")
        assert found["--log-level"] == "debug"
        assert found["--log-requests"] == ""
        assert "--skip-server-warmup" not in found


class TestVllm:
    def test_mtp(self) -> None:
        line = launch_line(clean.profile(VLLM_MTP))
        assert line.argv[1:5] == ("-m", "vllm.entrypoints.cli.main", "serve", "Qwen/Qwen3.6-27B")
        found = flags(VLLM_MTP)
        assert json.loads(found["--speculative-config"]) == {"method": "mtp", "num_speculative_tokens": 3}
        assert found["--max-num-seqs"] == "8"
        assert "--no-enable-prefix-caching" in found
        assert "--enable-auto-tool-choice" in found

    def test_a_block_of_16_drafts_15(self) -> None:
        config = json.loads(flags(VLLM_DFLASH, "speculation.attention_backend=FLASH_ATTN")["--speculative-config"])
        assert config == {
            "method": "dflash",
            "num_speculative_tokens": 15,
            "model": "z-lab/Qwen3.6-27B-DFlash",
            "revision": "main",
            "attention_backend": "FLASH_ATTN",
        }

    def test_prefix_caching_unsaid_leaves_the_engine_s_default(self) -> None:
        found = flags(VLLM_MTP, "engine.prefix_caching=null")
        assert not [flag for flag in found if "prefix-caching" in flag]
        assert "--enable-prefix-caching" in flags(VLLM_MTP, "engine.prefix_caching=true")

    def test_the_cpu_build_is_started_as_a_module(self) -> None:
        line = launch_line(clean.profile(CPU))
        assert line.argv[1:4] == ("-m", "vllm.entrypoints.openai.api_server", "--model")
        assert (Path(line.argv[4]) / "config.json").is_file(), "the embedded model's own folder"
        assert line.env == {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

    def test_it_must_be_told_how_many(self) -> None:
        with pytest.raises(ProfileError, match="how many tokens are drafted"):
            launch_line(clean.profile(VLLM_DFLASH, "speculation.block_size=null"))


class TestDrafted:
    @pytest.mark.parametrize(
        ("name", "overrides", "tokens"),
        [
            (MTP, (), 3),
            (MTP, ("speculation={method: mtp}",), None),
            (MTP, ("speculation.topk=4", "speculation.draft_tokens=32"), 31),
            (DFLASH, (), 15),
            (DFLASH, ("speculation.block_size=null", "speculation.draft_tokens=8"), 7),
            (DFLASH, ("speculation.block_size=null",), None),
            (MTP, ("speculation={method: none}",), None),
        ],
    )
    def test_tokens_a_round(self, name: str, overrides: tuple[str, ...], tokens: int | None) -> None:
        assert drafted_tokens(clean.profile(name, *overrides)) == tokens

    def test_no_config_without_speculation(self) -> None:
        assert vllm_speculative_config(clean.profile(VLLM_MTP, "speculation={method: none}")) is None

    def test_eagle3(self) -> None:
        eagle = "speculation={method: eagle3, steps: 3, topk: 1, draft_tokens: 4, draft: {path: /models/eagle}}"
        assert flags(MTP, eagle)["--speculative-algorithm"] == "EAGLE3"
        assert flags(MTP, eagle)["--speculative-draft-model-path"] == "/models/eagle"


class TestRetired:
    """Profiles that were written for an older release."""

    def test_a_profile_for_0_5_11_means_the_same(self) -> None:
        old = (
            "engine.mamba_radix_cache_strategy=auto",
            "engine.extra_args={mamba-scheduler-strategy: extra_buffer, disable-piecewise-cuda-graph: true}",
            "environment.SGLANG_ENABLE_SPEC_V2='1'",
        )
        found = flags(MTP, *old)
        assert found["--mamba-radix-cache-strategy"] == "extra_buffer"
        assert found["--cuda-graph-backend-prefill"] == "disabled"
        assert "--mamba-scheduler-strategy" not in found
        assert "SGLANG_ENABLE_SPEC_V2" not in launch_line(clean.profile(MTP, *old)).env

    def test_a_switch_that_was_off_stays_off(self) -> None:
        assert "--cuda-graph-backend-prefill" not in flags(MTP, "engine.extra_args.disable-piecewise-cuda-graph=false")

    def test_no_safe_translation_names_what_to_write(self) -> None:
        with pytest.raises(ProfileError, match=r"'cuda-graph-max-bs' is no flag .*cuda-graph-max-bs-decode"):
            launch_line(clean.profile(MTP, "engine.extra_args.cuda-graph-max-bs=8"))

    def test_a_flag_given_twice(self) -> None:
        with pytest.raises(ProfileError, match="'page-size' is given twice"):
            launch_line(clean.profile(MTP, "engine.page_size=1", "engine.extra_args.page-size=16"))

    def test_an_old_name_collides_with_the_profile_s_own_key(self) -> None:
        with pytest.raises(ProfileError, match="'mamba-radix-cache-strategy' is given twice"):
            launch_line(clean.profile(MTP, "engine.extra_args.mamba-scheduler-strategy=no_buffer"))

    @pytest.mark.parametrize("engine", ["sglang", "vllm"])
    def test_older_releases_keep_their_own_names(self, engine: str) -> None:
        for rule in FLAGS[engine]:
            value = rule.only if rule.only is not None else True
            assert translate(engine, "0.5.9" if engine == "sglang" else "0.20", {rule.old: value}, {}).flags == {
                rule.old: value
            }

    def test_every_rule_acts_from_its_release_on(self) -> None:
        for engine, rules in FLAGS.items():
            for rule in rules:
                value = rule.only if rule.only is not None else True
                done = translate(engine, rule.since, {rule.old: value}, {})
                assert [change.old for change in done.changes] == [rule.old]
                assert rule.only is not None or rule.old not in done.flags
        for engine, rules in VARIABLES.items():
            for rule in rules:
                assert translate(engine, rule.since, {}, {rule.old: "1"}).environment == {}

    def test_another_value_of_the_same_flag_is_fine(self) -> None:
        done = translate("sglang", "0.5.23", {"cuda-graph-backend-prefill": "full"}, {})
        assert (done.flags, done.changes) == ({"cuda-graph-backend-prefill": "full"}, ())


class TestRender:
    @pytest.mark.parametrize("name", NAMES)
    def test_all_three_run_the_same_line(self, name: str) -> None:
        profile = clean.profile(name)
        line = launch_line(profile)
        assert shlex.split(render_shell(line))[-len(line.argv) :] == list(line.argv)
        unit = render_systemd(line, profile)
        start = next(row for row in unit.splitlines() if row.startswith("ExecStart="))
        assert shlex.split(start.removeprefix("ExecStart=").replace("%%", "%").replace("$$", "$")) == list(line.argv)
        if profile.container is not None:
            words = render_container(line, profile)
            image = words.index(profile.container.image)
            assert words[image + 1 :] == line.argv[1:]
            assert words[words.index("--entrypoint") + 1] == line.argv[0]

    def test_a_shell_really_gets_it(self) -> None:
        line = LaunchLine(("printf", "%s|", "it's", 'a "b"', "$HOME", "100%"), {"GREETING": "two words"})
        done = subprocess.run(["sh", "-c", render_shell(line)], capture_output=True, text=True, check=True)
        assert done.stdout == 'it\'s|a "b"|$HOME|100%|'

    def test_systemd_s_own_signs_are_escaped(self) -> None:
        line = LaunchLine(("prog", "$HOME", "50%", 'a "b"', "back\\slash", ""), {"A": "$x 5%"})
        unit = render_systemd(line, clean.profile(MTP))
        assert 'ExecStart=prog $$HOME 50%% "a \\"b\\"" "back\\\\slash" ""' in unit
        assert 'Environment="A=$x 5%%"' in unit

    def test_the_unit_as_systemd_reads_it(self, tmp_path: Path) -> None:
        unit = render_systemd(launch_line(clean.profile(MTP)), clean.profile(MTP))
        assert "Restart=on-failure" in unit
        assert "LimitMEMLOCK=infinity" in unit
        assert f"EnvironmentFile=-/etc/drafthouse/{MTP}.env" in unit

    def test_container(self) -> None:
        profile = clean.profile(MTP)
        words = render_container(launch_line(profile), profile, devices=("0", "1"))
        pairs = set(itertools.pairwise(words))
        assert ("--gpus", '"device=0,1"') in pairs
        assert ("--ipc", "host") in pairs
        assert ("--ulimit", "memlock=-1") in pairs
        assert ("--restart", "unless-stopped") in pairs
        assert ("--health-timeout", "30s") in pairs
        assert ("--health-start-period", "900s") in pairs
        assert ("--volume", "drafthouse-models:/home/drafthouse/.cache/huggingface") in pairs

    def test_container_with_its_own_shared_memory(self) -> None:
        profile = clean.profile(MTP, "container.ipc_host=false", "container.shm_gib=16")
        words = render_container(launch_line(profile), profile)
        assert words[words.index("--shm-size") + 1] == "16g"
        assert "--ipc" not in words

    def test_no_container_section(self) -> None:
        profile = clean.profile(CPU)
        with pytest.raises(ProfileError, match="no container section"):
            render_container(launch_line(profile), profile)

    def test_the_health_probe_fails_when_nobody_answers(self) -> None:
        command = health_command(clean.profile(MTP, "port=9", "health.timeout_s=25"))
        assert subprocess.run(command, capture_output=True, check=False).returncode != 0
        assert "timeout=25" in command[-1]


def test_embedded_is_a_folder() -> None:
    assert (Path(model_path("embedded")) / "model.safetensors").is_file()
    assert model_path("/models/x") == "/models/x"
