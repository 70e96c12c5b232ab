"""Tests of the scripts that time host code, in processes without Triton's interpreter."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"kalmix_bench.perf.{script}", "--seconds", "0.01", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_host_time_prints_a_row_for_every_op():
    output = run("host_time")
    for op in ("additive", "delta", "dense", "diagonal", "ridge", "attend", "bare custom op"):
        assert op in output


@pytest.mark.slow
def test_host_layers_prints_a_row_for_every_layer_and_runs_triton_kernels():
    rows = [line.split() for line in run("host_layers", "--layer", "kla", "--layer", "afa").splitlines()[1:]]
    assert [row[0] for row in rows] == ["kla", "afa"]
    assert "launch_cached" in run("host_layers", "--profile", "kla")
