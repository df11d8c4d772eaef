"""Files and commands of a machine, and of a container through its host."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpu_host.steps import ApplyError
from gpu_host.world import ContainerWorld, Ownership, Result, World, answers_of
from tests.doubles.host_tree import HostTree


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(str(tmp_path))


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_as_a_whole(world: World, tmp_path: Path) -> None:
    world.write("/etc/modprobe.d/gpu.conf", "one\n", 0o600)
    first = (tmp_path / "etc/modprobe.d/gpu.conf").stat()
    world.write("/etc/modprobe.d/gpu.conf", "two\n")
    second = (tmp_path / "etc/modprobe.d/gpu.conf").stat()
    assert world.read("/etc/modprobe.d/gpu.conf") == "two\n"
    assert first.st_ino != second.st_ino
    assert world.names("/etc/modprobe.d") == ["gpu.conf"]


def test_a_file_that_is_there_keeps_its_permissions_and_its_owner(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "chown", lambda path, user, group: given.append((user, group)))
    world.write("/etc/default/grub", "one\n")
    file = tmp_path / "etc/default/grub"
    file.chmod(0o640)
    world.write("/etc/default/grub", "two\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    world.write("/etc/default/grub", "three\n", 0o600)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert given == [(os.getuid(), os.getgid())] * 2
    world.write("/etc/default/other", "", owner=(33, 34))
    assert (given[-1], stat.S_IMODE((tmp_path / "etc/default/other").stat().st_mode)) == ((33, 34), 0o644)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.write("/etc/gpu.conf", "old\n")

    def no_space(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(OSError, match="No space left"):
        world.write("/etc/gpu.conf", "new\n")
    assert (world.read("/etc/gpu.conf"), world.names("/etc")) == ("old\n", ["gpu.conf"])


def test_what_is_not_there_is_empty_and_no_error(world: World) -> None:
    assert (world.read("/none"), world.link("/none"), world.device("/none")) == (None, None, None)
    assert (world.names("/none"), world.glob("/none/*"), world.exists("/none")) == ([], [], False)
    world.remove("/none")


def test_a_pattern_gives_paths_of_the_host(world: World) -> None:
    world.write("/dev/nvidia1", "")
    world.write("/dev/nvidia0", "")
    assert world.glob("/dev/nvidia*") == ["/dev/nvidia0", "/dev/nvidia1"]


def test_a_link_that_leads_nowhere_exists(world: World, tmp_path: Path) -> None:
    (tmp_path / "build").symlink_to("/usr/src/gone")
    assert (world.exists("/build"), world.link("/build"), world.read("/build")) == (True, "/usr/src/gone", None)


def test_devices_files_and_folders_are_told_apart(world: World, tmp_path: Path) -> None:
    world.write("/file", "")
    assert world.device("/file") == ("file", 0, 0)
    assert World().device("/dev/null") == ("char", 1, 3)
    assert World().device("/dev") == ("dir", 0, 0)


def test_a_link_is_followed_only_when_asked(world: World, tmp_path: Path) -> None:
    (tmp_path / "null").symlink_to("/dev/null")
    assert world.device("/null") == ("other", 0, 0)
    assert world.device("/null", follow=True) == ("char", 1, 3)


def test_an_open_file_tells_its_device() -> None:
    with open(os.devnull, "rb") as file:  # noqa: PTH123
        assert World().device(f"/proc/self/fd/{file.fileno()}", follow=True) == ("char", 1, 3)


def test_an_attribute_is_written_in_place(world: World, tmp_path: Path) -> None:
    world.write("/attribute", "old")
    before = (tmp_path / "attribute").stat().st_ino
    world.poke("/attribute", "new")
    assert (world.read("/attribute"), (tmp_path / "attribute").stat().st_ino) == ("new", before)


# -- commands ----------------------------------------------------------------------------------------------------------


def test_a_command_speaks_the_locale_c_and_gets_its_input(world: World) -> None:
    assert world.run(["sh", "-c", "echo $LC_ALL; cat"], stdin="input").out == "C\ninput"


def test_a_program_that_does_not_exist(world: World) -> None:
    assert world.run(["no-such-program-here"]).rc == 127


def test_a_command_is_stopped_at_its_limit(world: World) -> None:
    result = world.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2)
    assert result.rc == 124
    assert "no answer within 0.2 s" in result.err


def test_a_failed_command_is_quoted_with_what_it_said(world: World) -> None:
    with pytest.raises(ApplyError, match=r"`sh -c 'echo why >&2; exit 3'` ended with 3: why"):
        world.must(["sh", "-c", "echo why >&2; exit 3"])


def test_a_wait_is_bounded(world: World) -> None:
    assert world.wait(lambda: True, 0)
    assert not world.wait(lambda: False, 0.05, 0.01)


# -- a container -------------------------------------------------------------------------------------------------------


@pytest.fixture
def inside(tmp_path: Path) -> ContainerWorld:
    tree = HostTree(tmp_path).node("/dev/nvidia0", 195, 0)
    tree.add_container(129, "dev0: /dev/nvidia0\n", running=True)
    return ContainerWorld(tree.world, 129)


def test_files_of_a_container_through_its_host(inside: ContainerWorld) -> None:
    inside.write("/etc/ld.so.conf.d/nvidia.conf", "/usr/lib\n", 0o640)
    assert inside.read("/etc/ld.so.conf.d/nvidia.conf") == "/usr/lib\n"
    assert inside.exists("/etc/ld.so.conf.d/nvidia.conf")
    assert inside.names("/etc/ld.so.conf.d") == ["nvidia.conf"]
    assert ["pct", "push", "129"] in [argv[:3] for argv in inside.host.commands]  # type: ignore[attr-defined]
    assert inside.ownership("/etc/ld.so.conf.d/nvidia.conf") == Ownership(0o640, (0, 0))
    inside.write("/etc/ld.so.conf.d/nvidia.conf", "/usr/lib64\n")
    assert inside.ownership("/etc/ld.so.conf.d/nvidia.conf") == Ownership(0o640, (0, 0))
    inside.remove("/etc/ld.so.conf.d/nvidia.conf")
    assert (inside.read("/etc/ld.so.conf.d/nvidia.conf"), inside.exists("/etc/ld.so.conf.d/nvidia.conf")) == (
        None,
        False,
    )


def test_a_file_of_a_containers_user_is_pushed_as_its_own(
    inside: ContainerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContainerWorld, "ownership", lambda self, path: Ownership(0o604, (1000, 100)))
    inside.write("/home/user/.config", "text\n")
    pushed = next(argv for argv in inside.host.commands if argv[:2] == ["pct", "push"])  # type: ignore[attr-defined]
    assert pushed[4:] == ["/home/user/.config", "--perms", "0604", "--user", "1000", "--group", "100"]


def test_nodes_of_a_container_through_its_host(inside: ContainerWorld) -> None:
    assert inside.glob("/dev/nvidia*") == ["/dev/nvidia0"]
    assert inside.device("/dev/nvidia0") == inside.device("/dev/nvidia0", follow=True) == ("char", 195, 0)
    assert (inside.device("/dev/nvidia1"), inside.link("/dev/nvidia0")) == (None, None)


def test_what_is_asked_ahead_costs_one_call(inside: ContainerWorld) -> None:
    inside.write("/etc/os-release", "ID=debian\n")
    calls = inside.host.commands  # type: ignore[attr-defined]
    calls.clear()
    asked = inside.ahead(
        [("ls", "-1A", "/dev")], files=["/etc/os-release", "/etc/absent"], folders=["/etc"], places=["/etc"]
    )
    assert (asked.read("/etc/os-release"), asked.read("/etc/absent")) == ("ID=debian\n", None)
    assert (asked.names("/etc"), asked.exists("/etc")) == (["os-release"], True)
    assert asked.run(["ls", "-1A", "/dev"]).out == "nvidia0\n"
    assert len(calls) == 1
    assert asked.device("/dev/nvidia0") == ("char", 195, 0), "what was not asked ahead is asked now"
    assert len(calls) == 2


class _Here(World):
    """A host whose container is this machine: `pct exec` is what follows it."""

    def run(self, argv: Sequence[str], timeout_s: float = 60.0, stdin: str | None = None) -> Result:
        return super().run(argv[4:], timeout_s, stdin)


def test_a_real_shell_keeps_answers_apart(tmp_path: Path) -> None:
    text = "first\n\n'second' $HOME\n"
    (tmp_path / "file").write_text(text)
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "broken").symlink_to("nowhere")
    loud = ("sh", "-c", "echo out; echo 'er ror' >&2; exit 3")
    here, path = ContainerWorld(_Here(), 129), str(tmp_path)
    asked = here.ahead(
        [loud, ("no-such-program", "-x"), ("cat",)],
        files=[f"{path}/file"],
        places=[f"{path}/broken", f"{path}/absent"],
        links=[f"{path}/link", f"{path}/broken"],
    )
    answers = asked.answers  # type: ignore[attr-defined]
    assert len(answers) == 8
    assert answers[loud] == Result(3, "out\n", "er ror")
    assert answers[("no-such-program", "-x")] == Result(127, "", "no-such-program: command not found")
    assert answers[("cat",)] == Result(0, "", ""), "no question reads the script of the others"
    assert asked.read(f"{path}/file") == text
    assert (asked.exists(f"{path}/broken"), asked.exists(f"{path}/absent")) == (True, False)
    assert (asked.end(f"{path}/link"), asked.end(f"{path}/broken")) == (f"{path}/file", "")


@pytest.mark.parametrize("rest", ["host", "ho\0st\x000\0\0"])
def test_an_answer_that_was_cut_off_or_holds_nul_is_asked_for_again(rest: str) -> None:
    questions = [("true",), ("false",), ("cat", "/etc/hostname")]
    told = {("true",): Result(0, "", ""), ("false",): Result(1, "", "")}
    assert answers_of(questions, f"\x000\0\0\x001\0\0{rest}") == told


def test_a_container_has_no_kernel_of_its_own(inside: ContainerWorld) -> None:
    with pytest.raises(ApplyError, match="belong to the host"):
        inside.poke("/sys/bus/pci/drivers_probe", "0000:41:00.0")


def test_a_container_that_is_off_answers_nothing(inside: ContainerWorld) -> None:
    inside.host.must(["pct", "shutdown", "129"])
    assert (inside.read("/etc/hostname"), inside.names("/dev"), inside.device("/dev/nvidia0")) == (None, [], None)
    with pytest.raises(ApplyError, match="CT 129 is not running"):
        inside.remove("/etc/hostname")
