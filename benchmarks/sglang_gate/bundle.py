"""SGLang 0.5.17 and what it needs as one archive of 43 MB, for a GPU host that has torch 2.11 and no network.

Only what an H200 runs of the served models is kept: kernels of other chips, of FlashAttention and of experts, image
generation, grammars and headers of languages that nobody compiles are left out. Two packages that are imported and
never used are stand-ins.

python benchmarks/sglang_gate/bundle.py WHEELS SITE site.tar.xz    # wheels that WHEELS lacks are fetched by pip
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

PINS = Path(__file__).with_name("bundle.txt")
# Of the pinned wheels. Of those that the release requires beside them, nothing that is served here imports any.
LEFT_OUT = (
    *("*.pyi", "*/__pycache__/*", "*.data/*", "sglang/multimodal_gen/*", "sglang/test/*", "sglang/benchmark/*"),
    *("sglang/bench_*.py", "sglang/srt/server/_core*.so", "sglang/srt/grpc/_core*.so"),
    *("sglang/srt/multimodal/_core*.so", "sgl_kernel/flash_ops*.so", "sgl_kernel/flashmla_ops*.so"),
    *("sgl_kernel/infllm_ops*.so", "sgl_kernel/sm100/*", "flashinfer/data/cutlass/python/*"),
    *("flashinfer/data/cutlass/examples/*", "flashinfer/data/cutlass/test/*", "xgrammar/lib/*.a"),
    *("xgrammar/include/*", "Cryptodome/SelfTest/*"),
)
GLIBC = (39, 35, 34, 31, 28, 27, 26, 24, 17)
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in GLIBC), "manylinux2014_x86_64", "manylinux1_x86_64", "any")
NEVER_USED = "    def __init__(self, *words, **more): raise RuntimeError('a stand-in')\n"
STAND_INS = {
    "IPython/__init__.py": "def get_ipython(): return None\n",
    "IPython/display.py": f"class HTML:\n{NEVER_USED}def display(*words, **more): raise RuntimeError('a stand-in')\n",
    "soundfile.py": f"class SoundFile:\n{NEVER_USED}",
    "tapplug-0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: tapplug\nVersion: 0.1\n",
    "tapplug-0.1.dist-info/entry_points.txt": "[sglang.srt.plugins]\ntaps = tapplug:register\n",
}


def wheel(spec: str, wheels: Path) -> Path:
    """The wheel of `name==version` for Python 3.12, fetched without its requirements where it is not there."""
    name, version = spec.split("==")
    pattern = f"{re.sub('[-.]', '_', name)}-{version}-*.whl"
    if not list(wheels.glob(pattern)):
        words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
        words += ["--implementation", "cp", "--dest", str(wheels)]
        words += [word for platform in PLATFORMS for word in ("--platform", platform)]
        subprocess.run([sys.executable, "-m", "pip", *words, spec], check=True)
    return next(wheels.glob(pattern))


def lay_out(wheels: Path, site: Path) -> None:
    """Unpack all pinned wheels under `site`, without what is left out and without debug symbols."""
    for spec in PINS.read_text(encoding="utf-8").split():
        with zipfile.ZipFile(wheel(spec, wheels)) as archive:
            for entry in archive.infolist():
                if not entry.is_dir() and not any(fnmatch.fnmatch(entry.filename, out) for out in LEFT_OUT):
                    archive.extract(entry, site)
    for library in site.rglob("*.so*"):
        subprocess.run(["strip", "--strip-unneeded", str(library)], check=False)
    plug_in = Path(__file__).with_name("taps.py").read_text(encoding="utf-8")
    for name, text in {**STAND_INS, "tapplug.py": plug_in}.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")


def pack(site: Path, out: Path) -> None:
    """One archive that Python's standard library reads; equal content gives equal bytes."""

    def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(out, "w:xz", preset=9) as packed:
        for path in sorted(site.rglob("*")):
            packed.add(path, path.relative_to(site), recursive=False, filter=anonymous)


def main() -> None:
    wheels, site, out = (Path(word) for word in sys.argv[1:4])
    shutil.rmtree(site, ignore_errors=True)
    wheels.mkdir(parents=True, exist_ok=True)
    lay_out(wheels, site)
    pack(site, out)
    print(f"{out.name}: {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
