"""The reader's check without SGLang: what is asked of it, and what becomes of its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sglang_reader
import torch
from sglang_gate.no_gpu import stand_ins

from drafthouse.corpus import CorpusSettings, prompts
from drafthouse.drafter.export import read_config
from drafthouse.loop.tiny import embedded_target
from drafthouse.target import Target

ENGINE = """#!/bin/sh
echo noise
case $1 in */reading.py) set -- {lines};; *) set -- {tapped};; esac
for line in "$@"; do echo "FOUND $line"; done
exit {code}
"""


RIGHT = {"total_variation": 2e-6, "other_taps": 0.9}
TAPPED = {"tokens": 12, "equal": 12, "worst": 0.0}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A library that wants CUDA's driver, as the engine's kernels do."""
    folder = tmp_path / "site" / "sgl_kernel"
    folder.mkdir(parents=True)
    (folder / "driver.c").write_text("int cuInit(unsigned flags) { return 0; }\n")
    (folder / "ops.c").write_text("int cuInit(unsigned); int kernels(void) { return cuInit(0); }\n")
    make = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(make, cwd=folder, check=True)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", "ops.so", "ops.c", "-L.", "-l:libcuda.so.1"], cwd=folder, check=True
    )
    (folder / "libcuda.so.1").unlink()  # linked against, and not there: as on a machine without a driver
    return folder.parent


def run(
    site: Path, out: Path, monkeypatch: pytest.MonkeyPatch, found: list[dict[str, Any]], code: int = 0,
    tapped: dict[str, Any] = TAPPED,
) -> Any:  # fmt: skip
    lines = " ".join("'" + json.dumps(one).replace(" ", "") + "'" for one in found)
    (out / "python").write_text(ENGINE.format(lines=lines, tapped=f"'{json.dumps(tapped)}'", code=code))
    (out / "python").chmod(0o755)
    words = ["sglang_reader.py", "--site", site, "--python", out / "python", "--texts", 1, "--out", out / "rows.json"]
    monkeypatch.setattr("sys.argv", [str(word) for word in words])
    sglang_reader.main()
    return json.loads((out / "rows.json").read_text(encoding="utf-8"))


def test_a_row_for_every_pattern_of_layers(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run(site, tmp_path, monkeypatch, [RIGHT] * 3)
    assert [row["name"].removeprefix("sglang reader: ") for row in rows] == [
        *sglang_reader.PATTERNS,
        "states that our plug-in writes",
    ]
    assert all(row["met"] for row in rows)


def test_a_drafter_that_is_read_otherwise_fails(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="1"):
        run(site, tmp_path, monkeypatch, [RIGHT | {"total_variation": 0.2}, RIGHT, RIGHT])
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [row["met"] for row in rows] == [False, True, True, True]


def test_an_engine_that_cannot_read_is_said(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for found, code in (([RIGHT] * 3, 1), ([RIGHT], 0)):
        with pytest.raises(SystemExit, match=r"did not come through reading\.py"):
            run(site, tmp_path, monkeypatch, found, code=code)
    assert not (tmp_path / "rows.json").exists()


def test_states_of_another_layer_fail(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="1"):
        run(site, tmp_path, monkeypatch, [RIGHT] * 3, tapped=TAPPED | {"equal": 5})
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [row["met"] for row in rows] == [True, True, True, False]
    with pytest.raises(SystemExit, match="no state that SGLang's model has: off by up to 9"):
        run(site, tmp_path, monkeypatch, [RIGHT] * 3, tapped=TAPPED | {"equal": 0, "worst": 9.0})


def test_a_check_that_shows_nothing_is_said(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="equality shows nothing"):
        run(site, tmp_path, monkeypatch, [RIGHT | {"other_taps": 0.01}] * 3)


def test_references_tell_taps_apart(tmp_path: Path) -> None:
    target = Target.load(embedded_target())
    drafter = sglang_reader.exported(tmp_path / "drafter", target, sglang_reader.PATTERNS["sliding and full layers"])
    assert read_config(tmp_path / "drafter")["sliding_window"] == sglang_reader.WINDOW
    [one] = prompts(CorpusSettings(heldout=1, seed=11), target.tokenizer)[:1]
    found = sglang_reader.reference(target, drafter, [one.input_ids])
    names = [name.removesuffix(".ours") for name in found if name.endswith(".ours")]
    assert len(names) == 2
    for name in names:
        anchor = int(name.partition("-")[2])
        width = len(sglang_reader.TAPS) * target.hidden_size
        assert found[f"{name}.states"].shape == found[f"{name}.other"].shape == (anchor, width)
        assert not torch.allclose(found[f"{name}.states"], found[f"{name}.other"])
        assert anchor > sglang_reader.WINDOW  # else the window would not show
        probabilities = found[f"{name}.ours"].softmax(-1)
        assert probabilities.amax(-1).min() > 5 / target.vocab_size  # far from uniform: a wrong part shows


def test_a_library_that_wants_the_driver_loads(site: Path, tmp_path: Path) -> None:
    environment = stand_ins(tmp_path / "stand-ins", site)
    code = "import ctypes, sys, torch; ctypes.CDLL(sys.argv[1]); print(torch.cuda.get_device_capability())"
    words = [sys.executable, "-c", code, str(site / "sgl_kernel" / "ops.so")]
    done = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "(9, 0)", done.stderr
