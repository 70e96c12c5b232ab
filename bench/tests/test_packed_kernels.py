"""Triton kernels of packed sequences: how many are compiled, and how much code they have.

The tests share a process of their own, because Triton's interpreter is on in this one.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

from .test_gpu_targets import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]
LENGTHS = """
import sys
import torch
from kalmix import checks
from kalmix.layers import MIXERS
from kalmix.segments import Segments
from kalmix_bench.perf.gpu_simulation import Collector

def train(layer, length, count):
    bounds = [length * i // count for i in range(count + 1)]
    x, segments = torch.zeros(1, length, 64, requires_grad=True), Segments.packed(torch.tensor(bounds))
    with checks(False):
        layer(x, segments=segments)[0].sum().backward()

options = {"gated-kalmanet": {"ridge": 0.1}, "design": {"design": "kla"}}
for name, kind in MIXERS.items():
    layer, collector = kind(64, **options.get(name, {})), Collector(["sm_90"], by_value=True)
    for length, count in ((2048, 1), (2048, 2), (2000, 2)):
        collector.run(name, "", lambda: train(layer, length, count))
    first = set(collector.found)
    assert first, name
    for length, count in ((2048, 3), (2048, 16), (2048, 17), (2000, 5), (1999, 8), (1501, 16)):
        collector.run(name, "", lambda: train(layer, length, count))
    new = {key: x for key, x in collector.found.items() if key not in first}
    assert not new, (name, [(x.kernel, x.options) for x in new.values()])
"""
SIZE = """
import torch
import triton
from kalmix.layers import fused
from kalmix.segments import segments_without_checks
from kalmix_bench.perf.gpu_simulation import Collector

class Stop(Exception):
    pass

def stop(module, metadata):
    raise Stop(str(module))

def stop_after_ttir(*stage_arguments):
    if not stage_arguments:  # Triton 3.8 asks for a key and a hash
        return "stop", "stop"
    stage_arguments[1]["ttgir"] = stop

def operations(packed):
    collector, tensors = Collector(["sm_90"]), [(1, 96, 384), (384, 4), (3, 3, 384)]
    columns = fused.QueryKeyColumns(128, fused.UnitNorm(64))

    def train():
        x, weight, state = (torch.empty(shape, device="meta", requires_grad=True) for shape in tensors)
        segments = segments_without_checks(torch.empty(3, 3, dtype=torch.int32, device="meta"))
        packing = fused.Packing(segments, segments.segment_ids(1, 96)) if packed else None
        state = state if packed else state[:1]
        outputs = fused.convolve_qkv(x, weight, None, state, packing, "silu", columns)
        sum(y.sum() for y in outputs).backward()

    collector.run("fused", "", train)
    found = {}
    for configuration in collector.found.values():
        try:
            configuration.compile()
        except Stop as end:
            found[configuration.kernel] = str(end).count(" = ")
    return found

triton.knobs.runtime.add_stages_inspection_hook = stop_after_ttir
triton.knobs.compilation.always_compile = True
rows, packed = operations(False), operations(True)
for kernel in ("forward_kernel", "backward_kernel"):
    assert 0 < packed[kernel] < 1.7 * rows[kernel], (kernel, rows, packed)
"""


RUN_ALL = """
import json, sys, traceback

failures = {}
for name, code in json.loads(sys.argv[1]).items():
    try:
        exec(code, {"__name__": name})
    except Exception:
        failures[name] = traceback.format_exc()
print(json.dumps(failures))
"""


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run all programs in one process; return the traceback of each that fails."""
    programs = json.dumps({"lengths": LENGTHS, "size": SIZE})  # the second changes settings of Triton
    return json.loads(run(tmp_path_factory.mktemp("packed"), "-c", RUN_ALL, programs).splitlines()[-1])


def test_packed_training_compiles_no_kernel_for_other_lengths(failures: dict[str, str]) -> None:
    """Sequences have 64 tokens or more on average: shorter ones have smaller tiles."""
    assert "lengths" not in failures, failures["lengths"]


def test_packed_convolution_has_little_more_code(failures: dict[str, str]) -> None:
    """A pass of Triton 3.6 takes a time that grows with loads and stores, times the square of all operations."""
    assert "size" not in failures, failures["size"]
