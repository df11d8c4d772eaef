"""Lets SGLang be imported where there is no GPU: CUDA's answers are an H200's, and its driver library is empty.

Nothing can be computed on such a device. It is for code of SGLang that runs on any: config classes, the argument
resolver, modules in their PyTorch form.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

# Python imports a module of this name at its start.
SITECUSTOMIZE = """
from types import SimpleNamespace
import torch
H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=150 << 30, multi_processor_count=132,
                       warp_size=32, L2_cache_size=60 << 20, shared_memory_per_block_optin=232448, uuid="0",
                       max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, gcnArchName="")
answers = dict(is_available=True, device_count=1, current_device=0, get_device_capability=(9, 0), init=None,
               get_device_name=H200.name, get_device_properties=H200, mem_get_info=(148 << 30, 150 << 30),
               _lazy_init=None, set_device=None, empty_cache=None, synchronize=None)
for name, answer in answers.items():
    setattr(torch.cuda, name, lambda *words, answer=answer, **more: answer)
"""


def stand_ins(folder: Path, site: Path) -> dict[str, str]:
    """Write both to `folder`; returns the environment in which the packages of `site` can be imported."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    found: set[str] = set()
    for library in (site / "sgl_kernel").rglob("*.so"):
        listed = subprocess.run(
            ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
        )
        names = (line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines())
        found |= {name for name in names if name.startswith("cu") and name[2:3].isupper()}
    source = folder / "cuda.c"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(found)), encoding="utf-8")
    library = folder / "libcuda.so.1"
    words = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run(words, check=True)
    return {"PYTHONPATH": f"{folder}:{site}", "LD_LIBRARY_PATH": str(folder), "OMP_NUM_THREADS": "1"}
