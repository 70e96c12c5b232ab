"""Tests of the CUDA kernels of `dense`: when they are selected, and that they match the Triton kernels.

Without a Hopper GPU, only selection, arguments and compilation are tested.
"""

import inspect
import re
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from test_dense_triton import HALF, LONG_SPANS, arguments, check

from kalmix.errors import KernelError
from kalmix.ops import OPS
from kalmix.ops._dense import custom_op as fused
from kalmix.ops._dense.cuda import FOLDER
from kalmix.ops._dense.triton import backward as triton_backward
from kalmix.ops._dense.triton import forward as triton
from kalmix.ops._shared import cuda
from kalmix.ops._shared.dispatch import select_kernel
from kalmix.ops._shared.kernel import KernelRequest

UNSUPPORTED = cuda.unsupported_gpu(None) if torch.cuda.is_available() else "no GPU"
KERNEL_PAIRS = [("forward", triton._forward_scan), ("backward", triton_backward._backward_scan)]
OPTIONS = {"TILE": 16, "CHUNK": 64, "PACKED": 1, "SAVE": 1, "VARIANCE": 1, "PAIRED": 1}


@pytest.mark.parametrize(("name", "triton_kernel"), KERNEL_PAIRS)
def test_cuda_and_triton_kernels_have_the_same_arguments(name, triton_kernel):
    source = (FOLDER / f"{name}.cu").read_text()
    signature = re.search(rf"\b{name}\((.*?)\) {{", source, re.DOTALL).group(1)
    names = [re.split(r"[ *]+", parameter.strip())[-1] for parameter in signature.split(",")]
    parameters = inspect.signature(triton_kernel.fn).parameters.values()
    assert names == [parameter.name for parameter in parameters if parameter.annotation == inspect.Parameter.empty]


def kernel_request(width, features=frozenset(), dtype=torch.float32):
    return KernelRequest("cuda", dtype, width, 16, 512, features)


def selected(request, name=None):
    return select_kernel("dense", OPS["dense"].kernels, request, name).name


@pytest.mark.parametrize(
    ("width", "name"),
    [(32, "triton"), (33, "cuda"), (64, "cuda"), (100, "cuda"), (128, "cuda"), (129, "triton"), (256, "triton")],
)
def test_cuda_kernel_is_selected_on_hopper_for_widths_33_to_128(fake_gpu, width, name):
    fake_gpu()
    assert selected(kernel_request(width)) == name
    assert selected(kernel_request(width), "triton") == "triton"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"capability": (8, 0)}, "it requires a GPU of compute capability 9.0 (Hopper); this GPU has 8.0"),
        ({"version": None}, "it requires a PyTorch that is built with CUDA"),
        ({"nvrtc": False}, "PyTorch's NVRTC (libcaffe2_nvrtc.so) cannot be loaded"),
    ],
)
def test_other_gpus_use_triton(fake_gpu, facts, reason):
    fake_gpu(**facts)
    assert selected(kernel_request(64)) == "triton"
    with pytest.raises(KernelError, match=re.escape(f"'cuda' of `dense` does not support this call: {reason}; use")):
        selected(kernel_request(64), "cuda")


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (kernel_request(16), "the key width is 16; it supports at least 33"),
        (kernel_request(130), "the key width is 130; it supports at most 128"),
        (kernel_request(64, dtype=torch.float64), "it supports float32, bfloat16, float16, not float64"),
        (KernelRequest("cpu", torch.float32, 64, 16, 512), "it runs on cuda, not on cpu"),
    ],
)
def test_requested_cuda_kernel_raises_with_the_reason(fake_gpu, request_, reason):
    fake_gpu()
    with pytest.raises(KernelError, match=re.escape(f"does not support this call: {reason}")):
        selected(request_, "cuda")


@pytest.mark.parametrize(("nvrtc", "name"), [(True, "cuda"), (False, "triton")])
def test_kernel_selection_compiles_to_one_graph(fake_gpu, nvrtc, name):
    torch.compiler.reset()
    fake_gpu(nvrtc=nvrtc)

    def run(x):
        return x + (selected(kernel_request(64)) == "cuda")

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    assert bool(compiled(torch.zeros(1))) == (name == "cuda")


@pytest.mark.parametrize("row", [row for row in OPS["dense"].kernels if row.triton], ids=lambda row: row.name)
def test_each_kernel_launches_its_own_sequential_kernels(monkeypatch, row):
    requested = []

    def triton_kernel(name):
        requested.append(name)
        return dict(KERNEL_PAIRS)[name]

    for module in (triton, triton_backward):
        monkeypatch.setattr(module, "cuda_kernel", triton_kernel)
    inputs = arguments(1, 3, (1, 1), (3, 2))
    check(inputs, run=row.function)
    assert set(requested) == ({"forward", "backward"} if row.name == "cuda" else set())


def test_machine_code_is_compiled_once_for_all_processes(monkeypatch, tmp_path):
    compiled = []

    def compile_source(nvrtc, source, options, architecture):
        compiled.append((source, options))
        return f"{source.name} {options}".encode()

    monkeypatch.setattr(cuda, "compile_source", compile_source)
    monkeypatch.setattr("triton.knobs.cache.dir", str(tmp_path))
    source, narrow, wide = FOLDER / "forward.cu", (("K", 40),), (("K", 128),)
    for options in (narrow, wide, narrow, wide):
        assert cuda.load_machine_code(None, source, options, "sm_90a") == f"forward.cu {options}".encode()
    assert compiled == [(source, narrow), (source, wide)]


@pytest.mark.skipif(cuda.nvrtc_library() is None, reason="torch comes without NVRTC here")
@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize(("K", "P", "DECAY"), [(40, 64, 2), (128, 128, 1)])
def test_cuda_source_compiles(name, K, P, DECAY):
    options = {**OPTIONS, "K": K, "P": P, "DECAY": DECAY}
    code = cuda.compile_source(cuda.nvrtc_library(), FOLDER / f"{name}.cu", tuple(options.items()), "sm_90a")
    assert code.startswith(b"\x7fELF")


@pytest.mark.skipif(cuda.nvrtc_library() is None, reason="torch comes without NVRTC here")
@pytest.mark.parametrize("width", [1, 33, 128])
def test_cuda_source_of_linear_systems_compiles(width):
    options = (("K", width), ("COLUMNS", 32))
    assert cuda.compile_source(cuda.nvrtc_library(), FOLDER / "solve.cu", options, "sm_90a").startswith(b"\x7fELF")


@pytest.mark.skipif(UNSUPPORTED is not None, reason=str(UNSUPPORTED))
@pytest.mark.parametrize(("decay", "variance"), [("head", True), ("key", False)])
@pytest.mark.parametrize("width", [33, 64, 100, 128])
def test_cuda_agrees_with_reference(width, decay, variance):
    run = partial(fused.dense, cuda=True)
    check(arguments(2, 143, (1, 2), (width, 16), decay, LONG_SPANS.count), LONG_SPANS, variance, run)
    check(arguments(1, 130, (2, 2), (width, width), decay, dtype=HALF), None, variance, run)
