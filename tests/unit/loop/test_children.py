"""Processes of steps, with small scripts in the place of `drafthouse` verbs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from drafthouse.loop import children
from drafthouse.loop.children import Child, ChildError, Children, proportional_bytes
from tests.patience import until


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child's verb is Python source: everything else about it is as for a verb."""
    real = subprocess.Popen

    def popen(line: list[str], **options: object) -> subprocess.Popen[bytes]:
        assert line[:3] == [sys.executable, "-m", "drafthouse.cli"]
        return real([sys.executable, "-c", dedent(line[3])], **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr("drafthouse.loop.children.subprocess.Popen", popen)
    monkeypatch.setattr(children, "POLL_S", 0.02)


SLEEPS = "import time; time.sleep(600)"


def nothing() -> None:
    return None


@pytest.mark.usefixtures("scripts")
class TestChildren:
    def test_output_goes_to_a_log_each(self, tmp_path: Path) -> None:
        seen = []
        with Children(tmp_path / "logs") as group:
            group.start("one", "print('out')")
            group.start("two", "import sys; sys.stderr.write('err')")
            group.wait(lambda: seen.append(1))
        assert (tmp_path / "logs/one.log").read_text() == "out\n"
        assert (tmp_path / "logs/two.log").read_text() == "err"
        assert seen, "watched, at least once at the end"

    def test_one_that_fails_ends_the_others_and_is_quoted(self, tmp_path: Path) -> None:
        fails = "import sys; sys.stderr.write('noise\\nerror: x: no room; make some\\n'); sys.exit(2)"
        with Children(tmp_path) as group:
            other = group.start("other", SLEEPS)
            group.start("extractor-1", fails)
            with pytest.raises(ChildError) as caught:
                group.wait(nothing)
        log = tmp_path / "extractor-1.log"
        assert str(caught.value) == f"{log}: extractor-1 failed (x: no room; make some); see the log"
        assert not other.running

    def test_one_that_dies_without_a_word(self, tmp_path: Path) -> None:
        with Children(tmp_path) as group:
            group.start("quiet", "import os; os.kill(os.getpid(), 9)")
            with pytest.raises(ChildError, match=r"quiet failed \(exit code -9\)"):
                group.wait(nothing)

    def test_one_that_was_killed_on_purpose_is_no_failure(self, tmp_path: Path) -> None:
        with Children(tmp_path) as group:
            victim = group.start("victim", SLEEPS)
            group.start("other", "pass")

            def watch() -> None:
                if victim.running:
                    victim.kill()

            group.wait(watch)
        assert victim.killed
        assert not victim.running

    def test_an_interrupt_leaves_nothing_running(self, tmp_path: Path) -> None:
        def interrupted() -> None:
            raise KeyboardInterrupt

        group = Children(tmp_path)
        child = group.start("one", SLEEPS)
        with pytest.raises(KeyboardInterrupt), group:
            group.wait(interrupted)
        assert not child.running

    def test_memory_of_all_together(self, tmp_path: Path) -> None:
        go, measured = tmp_path / "go", Path("/proc/self/smaps_rollup").exists()
        holds = f"""
            import time, pathlib
            room = bytearray(80 * 2**20)
            until = time.monotonic() + 240
            while not pathlib.Path({str(go)!r}).exists() and time.monotonic() < until:
                time.sleep(0.01)
        """

        def seen() -> bool:
            return group.peak_bytes > proportional_bytes(os.getpid()) + 60 * 2**20

        with Children(tmp_path) as group:
            group.start("big", holds)
            group.wait(lambda: go.touch() if not measured or seen() else None)
        assert go.exists(), group.peak_bytes

    def test_environment(self, tmp_path: Path) -> None:
        with Children(tmp_path) as group:
            group.start("one", "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['OMP_WAIT_POLICY'])")
            group.wait(nothing)
        assert (tmp_path / "one.log").read_text() == "1 passive\n"


def test_no_process_has_no_memory() -> None:
    assert proportional_bytes(2**30) == 0


FOLLOWS = """
    from drafthouse.loop.children import end_with_parent
    end_with_parent()
    print("ready", flush=True)
    import time
    time.sleep({})
    print("awake", flush=True)
"""


@pytest.mark.usefixtures("scripts")
class TestEndWithParent:
    def follow(self, logs: Path, seconds: float) -> Child:
        child = Child("child", [FOLLOWS.format(seconds)], logs)
        until(lambda: "ready" in child.log.read_text(), "its word")
        return child

    def test_it_ends_when_the_pipe_closes_as_it_does_with_its_parent(self, tmp_path: Path) -> None:
        child = self.follow(tmp_path, 600)
        assert child.running
        assert child.process.stdin is not None
        child.process.stdin.close()
        assert child.process.wait(240) == -15

    def test_it_works_on_while_the_parent_lives(self, tmp_path: Path) -> None:
        child = self.follow(tmp_path, 0.3)
        assert child.process.wait(240) == 0
        assert child.log.read_text() == "ready\nawake\n"


def test_elsewhere_nobody_follows_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb in a shell may well have a closed standard input."""
    monkeypatch.delenv("DRAFTHOUSE_PARENT_ON_STDIN", raising=False)
    line = [sys.executable, "-c", dedent(FOLLOWS).format(0.1)]
    ended = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert ended.stdout == b"ready\nawake\n"
