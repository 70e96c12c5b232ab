"""Tests of the scripts that time host code, in a process without Triton's interpreter."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPTS = """
from kalmix_bench.perf import host_layers, host_time
host_time.main(["--seconds", "0.01"])
print("-----")
host_layers.main(["--seconds", "0.01", "--layer", "kla", "--layer", "afa"])
print("-----")
host_time.PROFILED_CALLS = 20
host_layers.main(["--profile", "kla"])
"""


@pytest.fixture(scope="module")
def outputs() -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPTS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return ended.stdout.split("-----\n")


@pytest.mark.slow
def test_host_time_prints_a_row_for_every_op(outputs: list[str]):
    for op in ("additive", "delta", "dense", "diagonal", "ridge", "attend", "bare custom op"):
        assert op in outputs[0]


@pytest.mark.slow
def test_host_layers_prints_a_row_for_every_layer_and_runs_triton_kernels(outputs: list[str]):
    rows = [line.split() for line in outputs[1].splitlines()[1:]]
    assert [row[0] for row in rows] == ["kla", "afa"]
    assert "launch_cached" in outputs[2]
