"""Test of the script that times host code, in a process without Triton's interpreter."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_host_time_prints_a_row_for_every_op():
    command = [sys.executable, "-m", "kalmix_bench.perf.host_time", "--seconds", "0.01"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for op in ("additive", "delta", "dense", "diagonal", "ridge", "attend", "bare custom op"):
        assert op in result.stdout
