"""The stand-ins themselves: a double that is kinder than what it stands for proves nothing."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.doubles.vm.runfile import pack

from .image import DOUBLES

VERSION = "580.126.09"


@pytest.fixture
def installer(tmp_path: Path) -> Path:
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / f"libcuda.so.{VERSION}").write_bytes(b"\x7fELF")
    (libraries / "libcuda.so.1").write_bytes(b"of another build")
    return pack(VERSION, libraries, tmp_path)[0]


def _sh(installer: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", str(installer), *arguments], capture_output=True, text=True, cwd=installer.parent)


class TestInstaller:
    def test_it_is_named_and_checked_as_nvidias(self, installer: Path) -> None:
        assert installer.name == f"NVIDIA-Linux-x86_64-{VERSION}.run"
        assert _sh(installer, "--check").returncode == 0

    def test_an_unknown_option_ends_with_1_before_anything_is_written(self, installer: Path) -> None:
        before = sorted(installer.parent.iterdir())
        said = _sh(installer, "--no-such-option", "-s")
        assert said.returncode == 1
        assert "--no-such-option" in said.stderr
        assert sorted(installer.parent.iterdir()) == before

    def test_it_does_not_install_on_this_machine(self, installer: Path) -> None:
        said = _sh(installer, "-s", "--no-kernel-modules", f"--log-file-name={installer.parent}/log")
        assert said.returncode == 1
        assert "machines of the tests" in said.stderr
        assert not (installer.parent / "log").exists()

    def test_its_archive_holds_sources_and_the_libraries_of_this_version(self, installer: Path, tmp_path: Path) -> None:
        assert _sh(installer, "-x", "--target", str(tmp_path / "out")).returncode == 0
        assert [file.name for file in (tmp_path / "out/lib").iterdir()] == [f"libcuda.so.{VERSION}"]
        assert f'PACKAGE_VERSION="{VERSION}"' in (tmp_path / "out/kernel/dkms.conf").read_text()
        assert "@VERSION@" not in (tmp_path / "out/bin/nvidia-smi").read_text()


@pytest.fixture(scope="module")
def guest_config() -> ModuleType:
    spec = importlib.util.spec_from_file_location("guest_config", DOUBLES / "proxmox" / "guest_config.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_TEXT = """memory: 512
lxc.init.cmd: /init
# a note in the middle
dev0: /dev/nvidia0,mode=0666

[before-upgrade]
dev0: /dev/nvidia3
"""


class TestGuestConfig:
    def test_a_file_is_rewritten_in_proxmox_order(self, guest_config: ModuleType) -> None:
        assert guest_config.GuestConfig(_TEXT).text() == (
            "# a note in the middle\ndev0: /dev/nvidia0,mode=0666\nmemory: 512\nlxc.init.cmd: /init\n"
            "\n[before-upgrade]\ndev0: /dev/nvidia3\n"
        )

    def test_changes_of_a_running_guest_wait_for_its_next_start(self, guest_config: ModuleType) -> None:
        config = guest_config.GuestConfig(_TEXT)
        config.delete("dev0", later=True)
        config.set("dev1", "/dev/nvidia1", later=True)
        again = guest_config.GuestConfig(config.text())
        assert again.main["dev0"] == "/dev/nvidia0,mode=0666"
        assert again.coming() == {"memory": "512", "dev1": "/dev/nvidia1"}

        again.settle()
        assert "[pve:pending]" not in again.text()
        assert again.main == {"memory": "512", "dev1": "/dev/nvidia1"}

    def test_a_change_that_is_taken_back_waits_no_more(self, guest_config: ModuleType) -> None:
        config = guest_config.GuestConfig(_TEXT)
        config.delete("dev0", later=True)
        config.set("dev0", "/dev/nvidia0,mode=0666", later=True)
        assert config.pending == {}

    def test_snapshots_are_kept_as_they_are(self, guest_config: ModuleType) -> None:
        config = guest_config.GuestConfig(_TEXT)
        config.delete("dev0", later=False)
        assert config.text().endswith("\n[before-upgrade]\ndev0: /dev/nvidia3\n")
        assert "dev0" not in config.main
