"""Triton kernels fit the shared memory of GPUs that this machine lacks.

Each test is a process of its own, because Triton's interpreter is on in this one.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
SCAN = """
import os
import torch
from kalmix.testing.cases import Case
from kalmix_bench.perf.gpu_calls import OpCall
from kalmix_bench.perf.gpu_simulation import Collector
from kalmix_bench.perf.gpu_targets import Resources, allocate, compile_all, memory_key
from pathlib import Path

case = Case("delta", "triton", "cuda", torch.bfloat16, 2, 256, 2, 2, 128, 128)
collector = Collector(["sm_80", "sm_89", "sm_90", "sm_100"])
collector.run("delta", "", OpCall(case).run)
found = {key: x for key, x in collector.found.items() if x.kernel == "scan_memory_backward"}
stages = {x.gpu: x.options["STAGES"] for x in found.values()}
assert stages == {"sm_80": 2, "sm_89": 1, "sm_90": 3, "sm_100": 3}, stages
results = compile_all(found, allocate, Path("results.jsonl"))
for key, x in found.items():
    assert results[key].shared > 0 and results[key].problem(x.gpu) is None, (x, results[key])
    if x.gpu == "sm_90":
        assert "shared memory" in results[key].problem("sm_89")

collector.run("delta", "", OpCall(case.with_changes(value_width=512)).run)
chosen = {(x.gpu, x.options["V"]): x for x in collector.found.values() if x.kernel == "solve_errors"}
compared = [chosen["sm_80", 128], chosen["sm_89", 128], chosen["sm_89", 512]]
assert len({memory_key(x, ["V"]) for x in compared}) == len({allocate(x) for x in compared}) == 1
assert memory_key(compared[1]) != memory_key(compared[2])
assert memory_key(compared[0]) != memory_key(chosen["sm_100", 128])

collector.run("attend", "", OpCall(Case("attend", "triton", "cuda", torch.bfloat16, 1, 99, 1, 1, 64, 64)).run)
assert [gpu for gpu, *_ in collector.refused] == ["sm_100"], collector.refused

def compile_or_die(number):
    return Resources(number) if number != 1 else os.abort()

died = compile_all({str(n): n for n in range(4)}, compile_or_die, Path("died.jsonl"))
assert [x.shared for x in died.values()] == [0, 0, 2, 3] and "signal 6" in died["1"].error, died
"""


def run(folder: Path, *arguments: str) -> str:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


@pytest.mark.slow
def test_rules_choose_tiles_that_fit_the_gpu(tmp_path: Path) -> None:
    run(tmp_path, "-c", SCAN)


@pytest.mark.slow
def test_linear_memories_fit_every_gpu(tmp_path: Path) -> None:
    gpus, part = ("sm_80", "sm_89", "sm_100"), ("--core", "--parts", "delta", "--widths", "128", "--ignore", "V")
    output = run(tmp_path, "-m", "kalmix_bench.perf.gpu_targets", *part, "--gpus", *gpus)
    assert output.count(", 0 problems") == 3


@pytest.mark.slow
def test_steps_and_the_solver_compile(tmp_path: Path) -> None:
    """The interpreter, which runs both in other tests, accepts programs that do not compile."""
    parts = ("--core", "--gpus", "sm_90", "--parts", "solve", "steps")
    output = run(tmp_path, "-m", "kalmix_bench.perf.gpu_targets", *parts)
    assert output.count(", 0 problems") == 2
