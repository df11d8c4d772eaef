"""The double of NVIDIA's `.run` installer, packed from `driver/` and libraries that were compiled for the guest."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

_DRIVER = Path(__file__).parent / "driver"
_KERNEL_SOURCES = ("Kbuild", "dkms.conf", "nvidia.c", "nvidia-uvm.c")
_TOOLS = ("nvidia-modprobe", "nvidia-persistenced", "nvidia-smi")


def pack(version: str, libraries: Path, folder: Path) -> tuple[Path, str]:
    """Write `NVIDIA-Linux-x86_64-<version>.run`; returns its path and sha256.

    Args:
        libraries: folder with the compiled libraries of this version (compile-libraries).
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name in _KERNEL_SOURCES:
            _add(tar, f"kernel/{name}", _filled(_DRIVER / name, version), 0o644)
        for name in _TOOLS:
            _add(tar, f"bin/{name}", _filled(_DRIVER / name, version), 0o755)
        for library in sorted(libraries.glob(f"*.so.{version}")):
            _add(tar, f"lib/{library.name}", library.read_bytes(), 0o755)
        _add(tar, "firmware", b"test double of firmware\n", 0o644)
    target = folder / f"NVIDIA-Linux-x86_64-{version}.run"
    target.write_bytes(_filled(_DRIVER / "installer.sh", version) + archive.getvalue())
    return target, hashlib.sha256(target.read_bytes()).hexdigest()


def _filled(source: Path, version: str) -> bytes:
    return source.read_text().replace("@VERSION@", version).encode()


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))
