"""Editing a container's file changes the lines it is asked to and not a byte elsewhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_host.facts import ContainerEntry
from gpu_host.lxc_config import dev_change, dev_options, edit_lines, nvidia_raw_lines
from gpu_host.steps import ApplyError

CONFIG = """#a description
arch: amd64
hostname: ct129
lxc.cgroup2.devices.allow: c 195:0 rwm

[pve:pending]
cores: 4

[before]
lxc.cgroup2.devices.allow: c 195:0 rwm
"""


def test_only_the_main_section_is_edited() -> None:
    edited = edit_lines(CONFIG, ["lxc.cgroup2.devices.allow: c 195:0 rwm"], ["lxc.apparmor.profile: unconfined"])
    head, rest = CONFIG.split("\n\n", 1)
    assert (
        edited
        == head.replace("lxc.cgroup2.devices.allow: c 195:0 rwm", "lxc.apparmor.profile: unconfined") + "\n\n" + rest
    )


def test_file_that_changed_since_the_plan_is_not_written() -> None:
    with pytest.raises(ApplyError, match="no longer in the configuration"):
        edit_lines("arch: amd64\n", ["lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind"], [])


def test_lines_of_other_spelling_are_found() -> None:
    assert edit_lines("arch: amd64\nlxc.mount.entry =  /dev/a dev/a\n", ["lxc.mount.entry: /dev/a dev/a"], []) == (
        "arch: amd64\n"
    )


@pytest.mark.parametrize("text", ["arch: amd64\n", CONFIG, "arch: amd64\n[snap]\narch: amd64\n", "arch: amd64\n\n\n"])
def test_adding_and_dropping_is_byte_for_byte(text: str) -> None:
    lines = ["lxc.mount.entry: /dev/x dev/x none bind", "lxc.cgroup2.devices.allow: c 1:2 rwm"]
    added = edit_lines(text, [], lines)
    assert added != text
    assert edit_lines(added, lines, []) == text


def test_dynamic_major_without_nvidia_mounts_is_somebody_elses() -> None:
    entries = [ContainerEntry("lxc.cgroup2.devices.allow", "c 510:* rwm")]
    assert nvidia_raw_lines(entries, {}, {195}) == []


PATHS = ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/kvm", "/dev/dri/renderD128"]
VALUES = st.builds(
    lambda path, tail: path + tail, st.sampled_from(PATHS), st.sampled_from(["", ",mode=0666", ",gid=4"])
)


@given(
    current=st.dictionaries(st.integers(0, 9).map("dev{}".format), VALUES, max_size=8),
    wanted=st.sets(st.sampled_from(PATHS[:4])).map(lambda paths: {p: f"{p},mode=0666" for p in sorted(paths)}),
)
def test_entries_end_as_wanted_and_foreign_ones_never_change(current: dict[str, str], wanted: dict[str, str]) -> None:
    change = dev_change(current, wanted)
    after = dict(current)
    if change:
        assert not set(change.set) & set(change.delete)
        for key in change.delete:
            del after[key]
        after |= change.set
        back = {key: value for key, value in after.items() if key not in change.undo_delete} | dict(change.undo_set)
        assert back == current
    assert dev_change(after, wanted) is None
    is_ours = {key: dev_options(value)["path"].startswith("/dev/nvidia") for key, value in {**current, **after}.items()}
    assert {k: v for k, v in after.items() if not is_ours[k]} == {
        k: v for k, v in current.items() if not dev_options(v)["path"].startswith("/dev/nvidia")
    }
    assert sorted(dev_options(v)["path"] for k, v in after.items() if is_ours[k]) == sorted(wanted)
