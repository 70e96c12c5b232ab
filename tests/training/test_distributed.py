"""`torchrun` trains one model in two processes with the same command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_torchrun_trains_one_model_in_two_processes(text_file: Path, tmp_path: Path) -> None:
    small = [
        "--layers",
        "kla",
        "--hidden-size",
        "8",
        "--seq-len",
        "16",
        "--batch-size",
        "2",
        "--vocab-size",
        "280",
        "--steps",
        "3",
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*torchrun, "-m", "kalmix.cli", "train", "--text", str(text_file), *small],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("this model") == 1
    (output,) = (tmp_path / "runs").iterdir()
    assert (output / "model" / "model.safetensors").exists()
    history = json.loads((output / "history.json").read_text())
    assert history[-1]["progress"] == 1
    assert history[-1]["tokens"] == 3 * 2 * 2 * 16  # steps, processes, batch, block
