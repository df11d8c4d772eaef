from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
from sglang_gate import bundle
from sglang_gate.world import World

SHOW = "import json, os, engine; print(json.dumps([engine.NAME, os.environ['HOME'], os.environ['PYTHONPATH']]))"


def packed(folder: Path) -> Path:
    (folder / "engine.py").write_text("NAME = 'engine'\n")
    subprocess.run(["tar", "-cf", folder / "site.tar", "-C", folder, "engine.py"], check=True)
    return folder / "site.tar"


def test_the_engine_sees_its_own_packages_and_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    world = World(tmp_path / "world")
    world.unpack(packed(tmp_path), tmp_path / "none.tar")
    said = subprocess.run([world.python, "-c", SHOW], capture_output=True, text=True, check=True, cwd="/").stdout
    assert json.loads(said) == ["engine", str(world.home), str(world.site)]


def test_the_engine_finds_our_plugin_and_no_more_of_us(tmp_path: Path) -> None:
    world = World(tmp_path / "world")
    world.unpack(packed(tmp_path), None)
    code = (
        "import drafthouse; from importlib.metadata import entry_points;"
        "[one] = entry_points(group='sglang.srt.plugins'); print(one.load().__name__, drafthouse.__file__)"
    )
    said = subprocess.run([world.python, "-c", code], capture_output=True, text=True, check=True, cwd="/").stdout
    assert said.split() == ["register", str(world.site / "drafthouse" / "__init__.py")]
    found = {path.relative_to(world.site).as_posix() for path in (world.site / "drafthouse").rglob("*.py")}
    assert found == {
        "drafthouse/__init__.py",
        "drafthouse/plugins/__init__.py",
        "drafthouse/plugins/sglang_states.py",
    }


def test_compiled_kernels_are_kept_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = World(tmp_path / "first")
    first.unpack(packed(tmp_path), None)
    kernel = first.home / ".triton" / "cache" / "kernel.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"machine code")
    first.keep_kernels(tmp_path / "kernels.tar")
    second = World(tmp_path / "second")
    second.unpack(tmp_path / "site.tar", tmp_path / "kernels.tar")
    assert (second.home / ".triton" / "cache" / "kernel.cubin").read_bytes() == b"machine code"


def test_a_bundle_holds_what_is_served_and_the_plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "sgl_kernel-1.0-py3-none-any.whl", "w") as wheel:
        for name in ("sgl_kernel/__init__.py", "sgl_kernel/flash_ops.abi3.so", "sgl_kernel/__init__.pyi"):
            wheel.writestr(name, "")
    pins = tmp_path / "pins.txt"
    pins.write_text("sgl-kernel==1.0\n")
    monkeypatch.setattr(bundle, "PINS", pins)
    site = tmp_path / "site"
    bundle.lay_out(tmp_path, site)
    found = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert found == {"sgl_kernel/__init__.py", "tapplug.py", *bundle.STAND_INS}
    for name in ("tapplug.py", "soundfile.py", "IPython/__init__.py", "IPython/display.py"):
        compile((site / name).read_text(), name, "exec")
