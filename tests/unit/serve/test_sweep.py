"""A sweep against a server that speaks, by a program that asks it: points, resumption, broken runs, pictures."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from drafthouse.measure.roofline import Serving, load_hardware
from drafthouse.measure.roofline.compare import compare_sweep
from drafthouse.measure.roofline.profile import model_config
from drafthouse.serve.cli import app
from drafthouse.serve.sweep import run_sweep
from drafthouse.serve.sweep_generators import Generator
from drafthouse.serve.sweep_plan import Load, Place, SweepError, Target
from drafthouse.serve.sweep_plots import picture
from drafthouse.serve.sweep_result import Measured, Percentiles, Point, Sweep, aligned, markdown, read_sweep
from tests.doubles.openai_server import Behaviour, OpenAiDouble, openai_double
from tests.patience import until
from tests.unit.serve.clean import CPU, PROFILES

LOAD = Load(output_tokens=16, rounds=2, limit_s=30)
PLACES = [Place(256, 1), Place(256, 4), Place(512, 1)]

# A test double of aiperf: it asks the server as often as it was told, and exports in the recorded form.
DOUBLE = """\
#!{python}
import json, os, pathlib, sys, time, urllib.error, urllib.request
given = dict(zip(sys.argv, sys.argv[1:]))
folder = pathlib.Path(given["--output-artifact-dir"])
plan = json.loads(pathlib.Path(__file__).with_name("plan.json").read_text())
if "sleep" in plan:
    (folder / "child").write_text(str(os.fork() or os.getpid()))
    time.sleep(plan["sleep"])
answered = failed = 0
for _ in range(int(given["--request-count"])):
    body = {{"model": given["--model"], "messages": [{{"role": "user", "content": "?"}}]}}
    request = urllib.request.Request(given["--url"] + "/v1/chat/completions", json.dumps(body).encode())
    try:
        urllib.request.urlopen(request).read()
        answered += 1
    except urllib.error.HTTPError:
        failed += 1
export = json.loads(pathlib.Path(plan["recorded"]).read_text())
export["request_count"]["avg"] = answered
if failed:
    export["error_summary"] = [{{"error_details": {{"message": "HTTP 500"}}, "count": failed}}]
(folder / "profile_export_aiperf.json").write_text(json.dumps(export))
"""


class Loader:
    """The double, and what it is told."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "aiperf"
        self.path.write_text(DOUBLE.format(python=sys.executable), encoding="utf-8")
        self.path.chmod(0o755)
        self.tell()

    def tell(self, **plan: Any) -> None:
        recorded = str(Path(__file__).parent / "recorded" / "aiperf-0.13.0.json")
        self.path.with_name("plan.json").write_text(json.dumps({"recorded": recorded} | plan), encoding="utf-8")

    @property
    def generator(self) -> Generator:
        return Generator("aiperf", self.path)


@pytest.fixture
def loader(tmp_path: Path) -> Loader:
    return Loader(tmp_path)


@pytest.fixture
def server() -> Iterator[OpenAiDouble]:
    with openai_double(Behaviour(model="embedded", acceptance=2.5)) as double:
        yield double


def target(server: OpenAiDouble) -> Target:
    return Target(url=server.url, model="embedded", tokenizer="t", context_length=1024)


class TestRun:
    def test_every_point_with_the_engines_acceptance(
        self, server: OpenAiDouble, loader: Loader, tmp_path: Path
    ) -> None:
        sweep = run_sweep(target(server), LOAD, PLACES, loader.generator, tmp_path / "out")
        assert [(one.context, one.concurrency) for one in sweep.points] == [(256, 1), (256, 4), (512, 1)]
        assert [one.measured.asked for one in sweep.points] == [2, 8, 2]
        assert len(server.requests) == 12
        assert {one.acceptance for one in sweep.points} == {2.5}
        assert {one.acceptance_source for one in sweep.points} == {"vLLM counters"}
        assert sweep.broken == []
        assert read_sweep(tmp_path / "out" / "sweep.json") == sweep

    def test_an_engine_without_counters(self, server: OpenAiDouble, loader: Loader, tmp_path: Path) -> None:
        server.behaviour.engine = "none"
        (point,) = run_sweep(target(server), LOAD, PLACES[:1], loader.generator, tmp_path / "out").points
        assert (point.acceptance, point.step_ms, point.complete) == (None, None, True)

    def test_it_goes_on_where_it_stood(self, server: OpenAiDouble, loader: Loader, tmp_path: Path) -> None:
        first = run_sweep(target(server), LOAD, PLACES[:2], loader.generator, tmp_path / "out")
        asked = len(server.requests)
        second = run_sweep(target(server), LOAD, PLACES, loader.generator, tmp_path / "out")
        assert len(server.requests) == asked + 2
        assert second.points[:2] == first.points

    def test_a_broken_point_is_told_and_measured_again(
        self, server: OpenAiDouble, loader: Loader, tmp_path: Path
    ) -> None:
        """The generator ends with exit code 0 all the same."""
        server.behaviour.status = 500
        (point,) = run_sweep(target(server), LOAD, PLACES[:1], loader.generator, tmp_path / "out").points
        assert not point.complete
        assert (point.measured.failed, point.measured.reason) == (2, "HTTP 500 (2 times)")
        written = json.loads((tmp_path / "out" / "sweep.json").read_text(encoding="utf-8"))
        assert (written["points"], len(written["broken"])) == ([], 1)
        server.behaviour.status = 200
        (point,) = run_sweep(target(server), LOAD, PLACES[:1], loader.generator, tmp_path / "out").points
        assert point.complete

    def test_an_old_result_is_not_read_as_the_new_one(
        self, server: OpenAiDouble, loader: Loader, tmp_path: Path
    ) -> None:
        server.behaviour.status = 500
        run_sweep(target(server), LOAD, PLACES[:1], loader.generator, tmp_path / "out")
        loader.path.write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
        (point,) = run_sweep(target(server), LOAD, PLACES[:1], loader.generator, tmp_path / "out").points
        assert point.measured.failed == 2
        assert "ended with exit code 3" in str(point.measured.reason)

    def test_a_point_is_given_up_with_its_workers(self, server: OpenAiDouble, loader: Loader, tmp_path: Path) -> None:
        loader.tell(sleep=600)
        start = time.monotonic()
        load = Load(output_tokens=16, rounds=2, limit_s=5)
        (point,) = run_sweep(target(server), load, PLACES[:1], loader.generator, tmp_path / "out").points
        assert time.monotonic() - start < 200
        assert point.measured.reason == "given up after 5 s"
        child = int((tmp_path / "out" / PLACES[0].name / "child").read_text(encoding="utf-8"))
        state = Path(f"/proc/{child}/stat")
        until(
            lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z",
            "the end of a worker with its point",
        )

    def test_other_settings_are_refused(self, server: OpenAiDouble, loader: Loader, tmp_path: Path) -> None:
        run_sweep(target(server), LOAD, PLACES[:1], loader.generator, tmp_path / "out")
        other = Load(output_tokens=32, rounds=2, limit_s=30)
        with pytest.raises(SweepError, match=r"other settings.*load\.output_tokens: 16 → 32"):
            run_sweep(target(server), other, PLACES[:1], loader.generator, tmp_path / "out")

    def test_nobody_is_there(self, loader: Loader, tmp_path: Path) -> None:
        nobody = Target(url="http://127.0.0.1:9", model="m", tokenizer="t")
        with pytest.raises(SweepError, match="start it, or give --url"):
            run_sweep(nobody, LOAD, PLACES, loader.generator, tmp_path / "out")
        assert not (tmp_path / "out").exists(), "nothing is begun"

    def test_another_model(self, server: OpenAiDouble, loader: Loader, tmp_path: Path) -> None:
        server.behaviour.model = "other"
        with pytest.raises(SweepError, match="'embedded' is not served; the server lists other"):
            run_sweep(target(server), LOAD, PLACES, loader.generator, tmp_path / "out")

    def test_a_folder_that_is_a_file(self, server: OpenAiDouble, loader: Loader, tmp_path: Path) -> None:
        (tmp_path / "out").write_text("", encoding="utf-8")
        with pytest.raises(SweepError, match="cannot be written"):
            run_sweep(target(server), LOAD, PLACES, loader.generator, tmp_path / "out")

    def test_a_folder_of_something_else(self, server: OpenAiDouble, loader: Loader, tmp_path: Path) -> None:
        (tmp_path / "settings.json").write_text("settings", encoding="utf-8")
        with pytest.raises(SweepError, match="is not the beginning of a sweep"):
            run_sweep(target(server), LOAD, PLACES, loader.generator, tmp_path)


def point(concurrency: int, context: int = 1024, failed: int = 0, acceptance: float | None = 3.0) -> Point:
    between = 10.0 + concurrency / 10 + context / 10_000
    measured = Measured(
        asked=3 * concurrency,
        failed=failed,
        tokens_per_s=1000 * concurrency / between,
        ttft_ms=Percentiles(p50=50 + concurrency, p90=90 + 2 * concurrency, p99=120 + 4 * concurrency),
        inter_token_ms=Percentiles(p50=between, p90=1.2 * between, p99=1.5 * between),
    )
    return Point(context=context, concurrency=concurrency, measured=measured, acceptance=acceptance, seconds=1)


class TestResult:
    def test_a_step_is_of_the_decode_phase(self) -> None:
        one = point(10)
        assert one.step_ms == pytest.approx(3.0 * 11.1024)
        assert one.decode_tokens_per_s == pytest.approx(1000 / 11.1024)

    def test_the_roofline_reads_it(self) -> None:
        sweep = Sweep(settings={}, points=(point(1), point(10), point(20, failed=1)))
        serving = Serving(tensor_parallel=2, draft="mtp")
        model = model_config("Qwen/Qwen3.6-27B")[0]
        found = compare_sweep(model, load_hardware("a6000"), serving, sweep.as_dict()["points"])
        assert [one.roofline.serving.batch for one in found] == [1, 10]
        assert found[1].measured_ms == pytest.approx(point(10).step_ms)

    def test_tables(self) -> None:
        points = [point(10), point(1, acceptance=None), point(2, failed=6)]
        lines = markdown(points).splitlines()
        assert len(lines) == 5
        assert lines[2].startswith("| 1,024 | 1 | 98.")
        assert lines[2].endswith("| – | 0 of 3 |")
        assert lines[3].endswith("| 6 of 6 |")
        assert len({line.count("|") for line in lines}) == 1
        assert "11.1 / 13.3 / 16.7" in aligned(points).splitlines()[3]

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"settings": {}, "points": [{}], "broken": []}'])
    def test_not_a_sweep(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "sweep.json"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(SweepError, match="is not the result of a sweep"):
            read_sweep(path)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(SweepError, match="cannot be read"):
            read_sweep(tmp_path / "absent.json")


class TestPicture:
    def test_it_is_drawn(self, tmp_path: Path) -> None:
        points = [point(count) for count in (1, 10, 100)] + [point(1, context) for context in (16_384, 122_880)]
        picture(tmp_path / "sweep.png", "A model", [*points, point(50, failed=1)])
        head = (tmp_path / "sweep.png").read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        assert (int.from_bytes(head[16:20]), int.from_bytes(head[20:24])) == (1600, 1200)

    def test_nothing_to_draw(self, tmp_path: Path) -> None:
        with pytest.raises(SweepError, match="no point of the sweep is complete"):
            picture(tmp_path / "sweep.png", "A model", [point(1, failed=1)])
        assert not (tmp_path / "sweep.png").exists()


class TestVerb:
    @pytest.fixture(autouse=True)
    def _in_the_repository(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(PROFILES.parents[1])

    def words(self, server: OpenAiDouble, loader: Loader, out: Path) -> list[str]:
        words = ["sweep", CPU, "--url", server.url, "--out", str(out), "--concurrency", "1,2", "--context", "64"]
        return [*words, "--rounds", "1", "--program", str(loader.path)]

    def test_everything_is_written(self, server: OpenAiDouble, loader: Loader, tmp_path: Path) -> None:
        result = CliRunner().invoke(app, self.words(server, loader, tmp_path / "out"))
        assert result.exit_code == 0, result.output
        assert {"sweep.json", "sweep.md", "sweep.png", "settings.json"} <= {
            p.name for p in (tmp_path / "out").iterdir()
        }
        assert "2.50" in result.output
        assert "BROKEN" not in result.output

    def test_json(self, server: OpenAiDouble, loader: Loader, tmp_path: Path) -> None:
        words = [*self.words(server, loader, tmp_path / "out"), "--json"]
        result = CliRunner().invoke(app, words)
        assert [one["concurrency"] for one in json.loads(result.stdout)["points"]] == [1, 2]

    def test_failed_requests_are_an_exit_code(self, server: OpenAiDouble, loader: Loader, tmp_path: Path) -> None:
        server.behaviour.status = 500
        result = CliRunner().invoke(app, self.words(server, loader, tmp_path / "out"))
        assert result.exit_code == 1
        assert "BROKEN 64 tokens, 2 at once: 2 of 2 requests failed (HTTP 500 (2 times))" in result.output
        assert not (tmp_path / "out" / "sweep.png").exists()

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--concurrency", "1;2"], "'1;2' is no list of whole numbers"),
            (["--context", "2000"], "stay at or below 768"),
            (["--generator", "guidellm", "--program", "/absent"], "is no program"),
        ],
    )
    def test_refused(self, words: list[str], said: str, tmp_path: Path) -> None:
        given = ["sweep", CPU, "--out", str(tmp_path / "out"), *words]
        result = CliRunner().invoke(app, given)
        assert isinstance(result.exception, SweepError)
        assert said in str(result.exception)
        assert not (tmp_path / "out").exists()
