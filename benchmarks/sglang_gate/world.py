"""The engine's own Python packages, apart from ours: unpacked, compiled once, behind an interpreter of their own."""

from __future__ import annotations

import lzma
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import zlib
from contextlib import suppress
from pathlib import Path

import drafthouse

# Packages of the machine that every server process imports; sources are compiled again by each where nobody did.
COMPILED = ("torch", "sympy", "scipy", "numpy", "torchvision", "triton", "pandas", "pyarrow", "aiohttp", "networkx")
SCRIPT = """#!/bin/sh
# The engine sees its own packages, caches and home, and no hub.
export PYTHONPATH={site} PYTHONPYCACHEPREFIX={pycache} HOME={home}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
exec {python} "$@"
"""
CACHES = (".cache/tvm-ffi", ".cache/flashinfer", ".triton/cache")


class World:
    """Folders of one engine.

    Args:
        folder: a new folder; holds `site` (packages), `home` (caches of kernels) and `python` (the interpreter).
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.site, self.home = folder, folder / "site", folder / "home"
        self._pycache = folder / "pycache"
        self.python = folder / "python"
        self._compiling: subprocess.Popen[bytes] | None = None

    def unpack(self, bundle: Path, kernels: Path | None) -> None:
        """Unpack the packages (a .tar.xz) and, where given, the kernels that an earlier run compiled.

        Raises:
            RuntimeError: the bundle is missing or damaged.
        """
        for place in (self.site, self.home):
            place.mkdir(parents=True)
        _unpack(bundle, self.site)
        add_plugin(self.site)
        if kernels is not None and kernels.exists():
            _unpack(kernels, self.home)
        paths = {"site": self.site, "pycache": self._pycache, "home": self.home, "python": sys.executable}
        self.python.write_text(SCRIPT.format(**paths), encoding="utf-8")
        self.python.chmod(0o755)

    def compile(self) -> None:
        """Begin to compile all sources: otherwise each server's processes do it once more."""
        packages = Path(sysconfig.get_paths()["purelib"])
        folders = [str(self.site), *(str(packages / name) for name in COMPILED if (packages / name).is_dir())]
        command = [str(self.python), "-m", "compileall", "-q", "-j", str(os.cpu_count() or 1), *folders]
        self._compiling = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def compiled(self, patience: float) -> bool:
        """Wait for `compile` up to `patience` seconds; what is not done by then goes on beside the servers."""
        if self._compiling is None:
            return False
        with suppress(subprocess.TimeoutExpired):
            self._compiling.wait(patience)
        return self._compiling.poll() is not None

    def stop(self) -> None:
        """End a compilation that still goes on."""
        if self._compiling is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._compiling.pid, signal.SIGKILL)
            self._compiling.wait()

    def keep_kernels(self, archive: Path) -> None:
        """Pack the kernels that were compiled here, for `unpack` of a later run on the same kind of machine."""
        with tarfile.open(archive, "w:gz") as packed:
            for name in CACHES:
                if (self.home / name).is_dir():
                    packed.add(self.home / name, name)


def add_plugin(site: Path) -> None:
    """Our plug-in as an installed package of `site`: two modules and the entry point that SGLang looks for."""
    package = Path(drafthouse.__file__).parent
    modules = [path for name in ("__init__.py", "plugins/*.py") for path in package.glob(name)]
    for path in modules:
        copy = site / "drafthouse" / path.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    about = site / f"drafthouse-{drafthouse.__version__}.dist-info"
    about.mkdir()
    name_and_version = f"Name: drafthouse\nVersion: {drafthouse.__version__}\n"
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\n{name_and_version}", encoding="utf-8")
    plugin = "[sglang.srt.plugins]\ndrafthouse_states = drafthouse.plugins.sglang_states:register\n"
    (about / "entry_points.txt").write_text(plugin, encoding="utf-8")


def _unpack(archive: Path, place: Path) -> None:
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(place, filter="data")
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error) as error:
        raise RuntimeError(f"{archive.name} cannot be unpacked: {error}") from error
