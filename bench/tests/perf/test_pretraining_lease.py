"""Test of the script that times pretraining on a lent machine: it runs here without models, shards or GPUs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BASH = shutil.which("bash")


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("gpus", ["2", "4"])
def test_every_model_is_tried_and_the_report_is_drawn(tmp_path: Path, gpus: str) -> None:
    """A stand-in for Python writes its arguments instead of running them."""
    python, shards = tmp_path / "python", tmp_path / "work" / "shards"
    python.write_text('#!/bin/sh\necho "called $*"\n')
    python.chmod(0o755)
    shards.mkdir(parents=True)
    (shards / "manifest.json").write_text("{}")
    given = {"O": str(tmp_path / "out"), "WORK": str(tmp_path / "work"), "PYTHON": str(python), "ALL": gpus}
    environment = {**os.environ, **given, "CARRIED": str(tmp_path)}
    command = [str(BASH), "bench/pretraining_lease.sh"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    alone = [line.split(", 1 GPUs: status 0")[0] for line in result.stdout.splitlines() if ", 1 GPUs: status 0" in line]
    compiled = ["gated-deltanet, compiled", "llama, compiled"]
    eager = [f"{model}, eager" for model in ("fla gated-deltanet", "gated-deltanet", "kda", "kla", "llama")]
    assert sorted(alone) == sorted(compiled + eager)
    for model in ("kla", "gated-deltanet", "llama", "fla gated-deltanet"):
        assert f"{model}, eager, {gpus} GPUs: status 0" in result.stdout
    assert "--report" in result.stdout.splitlines()[-2]
    assert "set O to the output folder" in subprocess.run(
        command, cwd=ROOT, env={**environment, "O": ""}, capture_output=True, text=True, check=False
    ).stderr  # fmt: skip
