"""Test of the script that checks and times several GPUs on a lent machine: it runs here without models or GPUs."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kalmix.layers import MIXERS

ROOT = Path(__file__).parents[3]
BASH = shutil.which("bash")
PYTHON = '#!/bin/sh\necho "called $* on $CUDA_VISIBLE_DEVICES"\n'  # stands in for Python
STAGES = 13  # 2 on one GPU, 5 timings and 6 comparisons on all


def run(tmp_path: Path, gpus: int, python: str = PYTHON) -> "subprocess.CompletedProcess[str]":
    listed = "".join(f"GPU {i}\\n" for i in range(gpus))
    for name, text in (("python", python), ("nvidia-smi", f"#!/bin/sh\nprintf '{listed}'\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "all"}
    given = ["--commit", "abc", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--wheels", "-"]
    given += ["--python", str(tmp_path / "python")]
    command = [str(BASH), "bench/scaling_lease.sh", *given]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_all_stages_run_and_rows_get_the_commit(tmp_path: Path) -> None:
    out, rows = tmp_path / "out", tmp_path / "work" / "run" / "check" / "kla"
    rows.mkdir(parents=True)
    (rows / "results.jsonl").write_text('{"layer": "kla"}\n')
    result = run(tmp_path, gpus=3)
    assert result.returncode == 0 and "] end" in result.stdout
    assert result.stdout.count(": exit status 0, ") == STAGES
    logs = {path.stem: path.read_text() for path in out.glob("*.log")}
    assert logs["tests"].endswith("on 0\n") and "tests/layers/fused" in logs["tests"]
    assert logs["decode"].endswith("on 1\n") and "perf decode" in logs["decode"]
    assert all("--nproc-per-node 3" in line for name in ("speed", "check") for line in logs[name].splitlines())
    assert "--captured --models bayesian-340m --methods context two-phase" in logs["speed"]
    compared = ",".join(line.split("--layers ")[1].split(" ")[0] for line in logs["check"].splitlines())
    own = [name for name, layer in MIXERS.items() if layer.__module__.startswith("kalmix.")]  # other tests add some
    assert sorted(compared.split(",")) == sorted([*own, "hybrid"])
    assert json.loads((out / "check.jsonl").read_text()) == {"commit": "abc", "layer": "kla"}


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_second_call_repeats_only_failures_and_gives_comparisons_more_time(tmp_path: Path) -> None:
    failing = PYTHON + 'case "$*" in *"perf decode"*|*--layers?kla,*) exit 1;; esac\n'
    first = run(tmp_path, gpus=2, python=failing)
    assert first.stdout.count(": exit status 0, ") == STAGES - 2
    assert "decode: exit status 1, " in first.stdout and "check: exit status 1, " in first.stdout
    shutil.rmtree(tmp_path / "out")  # a lent machine empties it
    second = run(tmp_path, gpus=2)
    assert second.stdout.count(": exit status ") == 2
    assert "decode: exit status 0, " in second.stdout and "check: exit status 0, " in second.stdout
    compared = (tmp_path / "out" / "check.log").read_text().splitlines()
    assert [line.split("--limit ")[1].split(" ")[0] for line in compared if "--layers kla," in line] == ["60", "120"]
    assert "kalmix_bench.perf.scaling.speed" in (tmp_path / "out" / "speed.log").read_text()  # of the first call


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_one_gpu_is_refused(tmp_path: Path) -> None:
    result = run(tmp_path, gpus=1)
    assert result.returncode == 2 and "two GPUs are needed; there are 1" in result.stderr
