"""What is asked of the load generators, and what is read from results that they wrote."""

from __future__ import annotations

import json
import shutil
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from drafthouse.serve.sweep_generators import Generator, environment, find_generator
from drafthouse.serve.sweep_plan import Load, Place, SweepError, Target

# Written by the real programs against guidellm's mock server.
RECORDED = Path(__file__).parent / "recorded"
TARGET = Target(url="http://192.0.2.1:8000", model="m", tokenizer="/models/m")
LOAD = Load(output_tokens=64, rounds=3)
PLACE = Place(context=512, concurrency=4)
GUIDELLM, AIPERF = Generator("guidellm", Path("/opt/guidellm")), Generator("aiperf", Path("/opt/aiperf"))


def recorded(name: str, folder: Path, **changes: Any) -> Path:
    """A folder with a recorded result, some of it changed."""
    source = next(RECORDED.glob(f"{name}-*.json"))
    data = json.loads(source.read_text(encoding="utf-8"))
    data |= changes
    result = folder / ("guidellm.json" if name == "guidellm" else "profile_export_aiperf.json")
    result.write_text(json.dumps(data), encoding="utf-8")
    return folder


class TestRead:
    def test_guidellm_counts_its_failures(self, tmp_path: Path) -> None:
        """Two of these four were answered with 500, and guidellm ended with exit code 0."""
        found = GUIDELLM.read(recorded("guidellm", tmp_path), 4)
        assert (found.asked, found.failed, found.reason) == (4, 2, "guidellm counts 2 errors")
        assert found.output_tokens == 32
        assert found.tokens_per_s == pytest.approx(119.9, abs=0.1)
        assert found.inter_token_ms is not None
        assert found.inter_token_ms.p50 == pytest.approx(5.37, abs=0.01)
        assert found.made_by == "guidellm 0.8.1"

    def test_aiperf(self, tmp_path: Path) -> None:
        found = AIPERF.read(recorded("aiperf", tmp_path), 4)
        assert (found.asked, found.failed, found.reason) == (4, 0, None)
        assert found.tokens_per_s == pytest.approx(150.53, abs=0.01)
        assert found.input_tokens == 183.25
        assert found.ttft_ms is not None
        assert found.ttft_ms.p50 < found.ttft_ms.p90 < found.ttft_ms.p99
        assert found.made_by == "aiperf 0.13.0"

    def test_requests_that_are_not_in_the_result_have_failed(self, tmp_path: Path) -> None:
        assert AIPERF.read(recorded("aiperf", tmp_path), 12).failed == 8

    def test_aiperf_tells_its_first_error(self, tmp_path: Path) -> None:
        error = {"error_details": {"code": 500, "type": "HTTP", "message": "out\nof order"}, "count": 2}
        counts = {"unit": "requests", "avg": 2.0}
        folder = recorded("aiperf", tmp_path, error_summary=[error], request_count=counts)
        found = AIPERF.read(folder, 4)
        assert (found.failed, found.reason) == (2, "out of order (2 times)")

    def test_nothing_was_answered(self, tmp_path: Path) -> None:
        data = json.loads(next(RECORDED.glob("guidellm-*.json")).read_text(encoding="utf-8"))
        data["benchmarks"][0]["metrics"]["request_totals"] = {
            "successful": 0,
            "errored": 4,
            "incomplete": 0,
            "total": 4,
        }
        found = GUIDELLM.read(recorded("guidellm", tmp_path, benchmarks=data["benchmarks"]), 4)
        assert (found.failed, found.tokens_per_s, found.ttft_ms, found.output_tokens) == (4, 0, None, None)

    @pytest.mark.parametrize("generator", [GUIDELLM, AIPERF])
    def test_no_result(self, generator: Generator, tmp_path: Path) -> None:
        with pytest.raises(SweepError, match=f"{generator.name} left no result; see .*log.txt"):
            generator.read(tmp_path, 1)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"benchmarks": []}', '{"benchmarks": [{"metrics": {}}]}'])
    def test_another_form(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "guidellm.json").write_text(text, encoding="utf-8")
        with pytest.raises(SweepError, match="another form"):
            GUIDELLM.read(tmp_path, 1)

    def test_another_form_of_aiperf(self, tmp_path: Path) -> None:
        (tmp_path / "profile_export_aiperf.json").write_text('{"request_count": 4}', encoding="utf-8")
        with pytest.raises(SweepError, match="another form"):
            AIPERF.read(tmp_path, 1)


class TestCommand:
    def test_guidellm_gets_a_scenario(self, tmp_path: Path) -> None:
        program, verb, option, path = GUIDELLM.command(TARGET, LOAD, PLACE, tmp_path)
        assert (program, verb, option) == ("/opt/guidellm", "run", "--config")
        spec = json.loads(Path(path).read_text(encoding="utf-8"))["spec"]
        assert spec["profile"] == {"kind": "concurrent", "streams": [4]}
        assert spec["constraints"] == [{"kind": "max_requests", "count": 12}]
        assert spec["data"][0]["prompt_tokens"] == 512
        assert spec["backend"]["extras"]["body"] == {"temperature": 0, "max_tokens": 64, "ignore_eos": True}
        assert spec["tokenizer"]["model"] == "/models/m"

    def test_aiperf_gets_flags(self, tmp_path: Path) -> None:
        words = AIPERF.command(TARGET, LOAD, PLACE, tmp_path)
        given = dict(pairwise(words))
        assert given["--concurrency"] == "4"
        assert given["--request-count"] == given["--num-dataset-entries"] == "12"
        assert (given["--isl"], given["--osl"], given["--tokenizer"]) == ("512", "64", "/models/m")
        assert json.loads(given["--extra-inputs"]) == {"temperature": 0, "ignore_eos": True, "min_tokens": 64}

    def test_the_server_is_not_behind_a_proxy(self) -> None:
        found = environment(TARGET, {"NO_PROXY": "localhost", "PATH": "/bin"})
        assert found["NO_PROXY"] == found["no_proxy"] == "localhost,192.0.2.1"
        assert found["PATH"] == "/bin"


class TestFind:
    @pytest.fixture
    def script(self, tmp_path: Path) -> Path:
        path = tmp_path / "aiperf"
        path.write_text("#!/bin/sh\n", encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def test_on_the_path(self, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(script.parent))
        assert find_generator("aiperf") == Generator("aiperf", script)

    def test_by_its_program(self, script: Path) -> None:
        assert find_generator(program=script) == Generator("aiperf", script)

    def test_by_a_program_of_another_name(self, script: Path) -> None:
        other = shutil.copy(script, script.with_name("loader"))
        assert find_generator("aiperf", other).name == "aiperf"
        with pytest.raises(SweepError, match="is no program of a known load generator"):
            find_generator(program=other)

    @pytest.mark.parametrize("name", ["absent", "."])
    def test_no_program(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(SweepError, match="is no program"):
            find_generator("aiperf", tmp_path / name)

    def test_none_is_installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
        with pytest.raises(SweepError, match=r"guidellm or aiperf is not installed; .*--program"):
            find_generator()
