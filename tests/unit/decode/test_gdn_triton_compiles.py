"""The Triton kernels through Triton's compiler and ptxas, for GPUs that need not be here.

The interpreter takes what the compiler refuses: a pointer that becomes a block in one branch only, say.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs Triton (make test-kernels)")
compiler = pytest.importorskip("triton.compiler")
backends = pytest.importorskip("triton.backends.compiler")
gdn_triton = pytest.importorskip("drafthouse.decode.gdn_triton")

pytestmark = pytest.mark.kernels
# Compute capability and bytes of shared memory that a block may have (CUDA C++ Programming Guide, table of
# technical specifications): GeForce RTX 3090 and H200.
DEVICES = {"RTX 3090": (86, 99 * 1024), "H200": (90, 227 * 1024)}
LENGTHS = (2, 17, 33, 65, 129)
HEAD_SHAPE = {"HEADS": 48, "KEY_HEADS": 16, "KEY_DIM": 128}
VALUE_DIM = 128


def compiled(kernel: Any, constants: dict[str, Any], capability: int, warps: int, folder: Path) -> tuple[int, int]:
    """Bytes of shared memory and bytes that ptxas spills."""
    types = {"visible": "*u8", "path": "*i64", "counts": "*i64", "length": "i32", "path_length": "i32"}
    types |= {f"stride_{axis}": "i32" for axis in "rij"}
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = compiler.ASTSource(kernel, signature, constants, aligned)
    found = triton.compile(source, target=backends.GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    (folder / "kernel.ptx").write_text(found.asm["ptx"], encoding="utf-8")
    suffix = "a" if capability == 90 else ""
    line = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name=sm_{capability}{suffix}", "kernel.ptx", "-o", "kernel"]
    said = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=True).stderr
    return int(found.metadata.shared), sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_pass_fits_the_device(length: int, device: str, tmp_path: Path) -> None:
    capability, room = DEVICES[device]
    tiling = gdn_triton.Tiling.of(length)
    after_root, blocks, _, _ = gdn_triton.cut(length, VALUE_DIM, tiling)
    shape = HEAD_SHAPE | {"CHUNK": 32, "NODES": tiling.nodes}
    shape |= {"AFTER_ROOT": after_root, "PRECISION": gdn_triton.PRECISION}
    for kernel, constants, warps in (
        (gdn_triton._prepare, shape | {"BLOCKS": blocks}, tiling.prepare_warps),
        (gdn_triton._apply, shape | {"VALUE_DIM": VALUE_DIM, "VALUES": tiling.values}, tiling.apply_warps),
    ):
        shared, spilt = compiled(kernel, constants, capability, warps, tmp_path)
        assert shared <= (room if length <= gdn_triton.longest(room) else gdn_triton.LARGE_SHARED_BYTES)
        if length <= 65:
            assert spilt <= 64, "a few words, which a newer ptxas may place otherwise"


def test_a_geforce_runs_the_usual_budgets() -> None:
    assert [gdn_triton.longest(room) for _, room in DEVICES.values()] == [65, 129]


@pytest.mark.parametrize("device", DEVICES)
def test_a_replay_fits_the_device(device: str, tmp_path: Path) -> None:
    capability, room = DEVICES[device]
    shape = HEAD_SHAPE | {"VALUE_DIM": VALUE_DIM, "VALUES": gdn_triton.Tiling.replay_values, "LONGEST": 16}
    shared, spilt = compiled(gdn_triton._replay, shape, capability, 1, tmp_path)
    assert shared <= room
    assert spilt <= 64
