"""`--check --diff` prints the plan and touches nothing: no mutator is called, no byte below the root is written."""

from __future__ import annotations

from pathlib import Path

from tests.doubles.machine.boot import machine
from tests.roles.runs import needs_machine, playbook

pytestmark = needs_machine


def test_check_mode_shows_the_plan_and_calls_no_mutator(tmp_path: Path) -> None:
    with machine(tmp_path / "machine", "kpro5") as kpro5:
        done = playbook(kpro5.folder, "site.yml", "--limit", "kpro5", "--check", "--diff")
        assert done.rc == 0, done.text
        assert kpro5.commands("mutator") == []
        assert kpro5.touched() == {}
        looked = kpro5.commands("reader")
    assert any(command.startswith("pct exec 129") for command in looked), "the container was looked at, too"
    for step in (
        "rebind 0000:41:00.0",
        "rebind 0000:42:00.0",
        'KERNEL=="0000:81:00.1", ATTR{driver_override}="vfio-pci"',
        "-blacklist nvidia",
        "pct-set 129: dev0=/dev/nvidia0,mode=0666",
        "driver 580.126.09 with open kernel modules",
        "libraries of 580.126.09, no kernel modules",
    ):
        assert step in done.text, step
    assert "rebind 0000:81" not in done.text
    assert "rebind 0000:82" not in done.text


def test_the_proof_notices_a_mutator_and_a_written_file(tmp_path: Path) -> None:
    with machine(tmp_path / "machine", "kpro5") as kpro5:
        assert kpro5.run("pct", "status", "129").stdout == "status: running\n"
        assert kpro5.commands("mutator") == []
        kpro5.run("update-initramfs", "-u")
        kpro5.run("pct", "exec", "129", "--", "touch", "/etc/motd")
        kpro5.run("sh", "-c", "cat /etc/modules > /etc/modules.new && mv /etc/modules.new /etc/modules")
        assert kpro5.commands("mutator") == ["update-initramfs -u", "pct exec 129 -- touch /etc/motd"]
        assert {"129:/etc/motd", "/etc/modules"} <= kpro5.touched().keys()
        assert "/etc/modules" not in kpro5.changes(), "its text is what it was"
