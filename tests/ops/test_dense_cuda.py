"""The chains of `dense` in CUDA C++: who uses them, and that they are called as Triton's are.

What they compute is what test_dense_triton.py asks on a GPU of Hopper, where they serve.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from test_dense_triton import HALF, LONG_RUNS, arguments, check

from kalmix.ops._dense.cuda import compile as cuda
from kalmix.ops._dense.triton import backward as triton_backward
from kalmix.ops._dense.triton import forward as triton

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
TWINS = [("forward", triton._advance), ("backward", triton_backward._retreat)]
OPTIONS = {"BLOCK": 16, "WINDOW": 64, "PACKED": 1, "KEEP": 1, "VARIANCE": 1}


@pytest.mark.parametrize(("name", "twin"), TWINS)
def test_takes_what_its_twin_in_triton_takes(name, twin):
    source = (Path(cuda.__file__).parent / f"{name}.cu").read_text()
    signature = re.search(rf"\b{name}\((.*?)\) {{", source, re.DOTALL).group(1)
    names = [re.split(r"[ *]+", parameter.strip())[-1] for parameter in signature.split(",")]
    taken = inspect.signature(twin.fn).parameters.values()
    assert names == [parameter.name for parameter in taken if parameter.annotation == inspect.Parameter.empty]


@pytest.mark.parametrize("lanes", [16, 32, 64, 128])
def test_leaves_to_triton_what_is_not_on_hopper(lanes):
    assert cuda.on_hopper("forward", "Triton's", torch.zeros(1), lanes) == "Triton's"


@GPU
@pytest.mark.parametrize("lanes", [16, 32, 64, 128])
def test_serves_wide_covariances_on_hopper(lanes):
    serves = torch.cuda.get_device_capability() == cuda.HOPPER and lanes >= 64
    assert isinstance(cuda.on_hopper("forward", None, torch.zeros(1, device="cuda"), lanes), cuda.Chain) == serves


@pytest.mark.skipif(cuda.library() is None, reason="torch comes without NVRTC here")
@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize(("K", "P", "DECAY"), [(40, 64, 2), (128, 128, 1)])
def test_compiles(name, K, P, DECAY):
    options = {**OPTIONS, "K": K, "P": P, "DECAY": DECAY}
    assert cuda.compiled(cuda.library(), name, tuple(options.items()), "sm_90a").startswith(b"\x7fELF")


@GPU
@pytest.mark.parametrize(("decay", "variance"), [("head", True), ("key", False)])
@pytest.mark.parametrize("width", [64, 100, 128])
def test_triton_serves_where_there_is_no_hopper(monkeypatch, width, decay, variance):
    for module in (triton, triton_backward):
        monkeypatch.setattr(module, "on_hopper", lambda name, otherwise, like, lanes: otherwise)
    check(arguments(2, 143, (1, 2), (width, 16), decay, LONG_RUNS.count), LONG_RUNS, variance)
    check(arguments(1, 130, (2, 2), (width, width), decay, dtype=HALF), None, variance)
