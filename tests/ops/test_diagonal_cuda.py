"""Tests of the CUDA kernels of `diagonal`: when they are selected, what they are launched with, and their results.

Without a Hopper GPU, only selection, arguments and compilation are tested.
"""

import re
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from test_diagonal_triton import HALF, RUNS, answer, arguments, check

from kalmix.errors import KernelError
from kalmix.ops import OPS
from kalmix.ops._diagonal import custom_op as fused
from kalmix.ops._diagonal.cuda.plan import DTYPES, backward_tile_size, block_channels, group_tokens
from kalmix.ops._shared import cuda
from kalmix.ops._shared.dispatch import select_kernel
from kalmix.ops._shared.gpu import HOPPER_MULTIPROCESSORS, HOPPER_SHARED_MEMORY
from kalmix.ops._shared.kernel import KernelRequest
from kalmix.ops._shared.triton.compile_and_launch import dry_run
from kalmix.segments import Segments

UNSUPPORTED = cuda.unsupported_gpu(None) if torch.cuda.is_available() else "no GPU"
CUDA = partial(fused.diagonal, cuda=True)
WIDTHS = [9, 16, 20, 32, 64, 100, 128]


def selected(width, name=None, features=frozenset()):
    request = KernelRequest("cuda", torch.float32, width, 16, 512, features)
    return select_kernel("diagonal", OPS["diagonal"].kernels, request, name).name


@pytest.mark.parametrize(
    ("width", "name"), [(8, "triton"), (9, "cuda"), (16, "cuda"), (128, "cuda"), (129, "chunked"), (256, "chunked")]
)
def test_cuda_kernel_is_selected_on_hopper_for_9_to_128_slots(fake_gpu, width, name):
    fake_gpu()
    assert selected(width) == name


def test_triton_kernel_can_be_requested_on_hopper(fake_gpu):
    fake_gpu()
    assert selected(16, "triton") == "triton"


@pytest.mark.parametrize("facts", [{"capability": (8, 0)}, {"capability": (10, 0)}, {"nvrtc": False}])
def test_other_gpus_use_triton(fake_gpu, facts):
    fake_gpu(**facts)
    assert selected(16) == "triton"
    with pytest.raises(KernelError, match="'cuda' of `diagonal` does not support this call: "):
        selected(16, "cuda")


def test_cuda_kernel_refuses_narrow_keys(fake_gpu):
    fake_gpu()
    with pytest.raises(KernelError, match="the key width is 8; it supports at least 9"):
        selected(8, "cuda")


def launches(run, inputs, segments=None, variance=True):
    """Return the launches of a forward and a backward pass."""
    found, segments = [], None if segments is None else Segments(segments.rows.to(inputs["q"].device))
    with dry_run(found.append), torch.autograd.set_multithreading_enabled(False):  # a dry run is of one thread
        answer(run, segments, variance, inputs)
    return found


def is_cuda(launch):
    return isinstance(launch.kernel, cuda.CudaKernel)


def test_one_tile_per_sequence_needs_no_maps():
    found = launches(CUDA, arguments(8, 70, (1, 1), 16, 1024))
    assert [x.kernel.name for x in found] == ["forward", "backward"]


def test_only_the_cuda_kernel_launches_cuda():
    inputs = arguments(1, 2000, (1, 1), 16, 8)
    maps = {"map_tiles", "_scan_tiles", "_map_tile_grads", "_scan_tile_grads"}
    names = [
        {x.kernel.name if is_cuda(x) else x.kernel.__name__ for x in launches(run, inputs)}
        for run in (CUDA, fused.diagonal)
    ]
    assert names == [maps | {"forward", "backward"}, maps | {"_read_out", "tile_gradients"}]


def parameters(source):
    """Return types and names of the parameters of a kernel."""
    signature = re.search(rf"\b{source.stem}\((.*?)\) {{", source.read_text(), re.DOTALL).group(1)
    return [re.fullmatch(r"(?:const )?(.*?)[ *]+(\w+)", x.strip(), re.DOTALL).groups() for x in signature.split(",")]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_launches_pass_the_parameters_of_the_kernels(dtype):
    found = [x for x in launches(CUDA, arguments(1, 70, (1, 2), 16, 24, dtype=dtype)) if is_cuda(x)]
    assert len(found) == 2
    for launch in found:
        signature = parameters(launch.kernel.source)
        assert len(signature) == len(launch.arguments)
        for (kind, name), value in zip(signature, launch.arguments, strict=True):
            if not isinstance(value, torch.Tensor):
                assert kind == "int64", name
            elif name != "tile_table":
                storage = re.fullmatch(r"Storage<(\w)_TYPE>::Type", kind)
                expected = DTYPES[launch.options[f"{storage.group(1)}_TYPE"]] if storage else torch.float32
                assert value.dtype == expected or (name == "grad_var" and not launch.options["VARIANCE"]), name


@pytest.mark.parametrize("slots", WIDTHS)
def test_blocks_fit_a_multiprocessor(slots):
    """Size of `SharedMemory` in backward.cu; two of its structures are buffered twice."""
    padded, channels, tokens = max(16, 1 << (slots - 1).bit_length()), block_channels(slots), group_tokens(slots)
    orders = min(4, 128 // padded)
    signals = 2 * 32 * (2 * orders * padded + 4 * channels)
    beliefs, sums = 2 * (32 // tokens) * channels * padded, 2 * tokens * 8 * 2 * padded
    assert 4 * (signals + beliefs + sums) <= HOPPER_SHARED_MEMORY


@pytest.mark.parametrize("length", [1, 31, 33, 70, 2048, 65_536])
@pytest.mark.parametrize("blocks", [1, 8, 31, 132, 133, 5000])
def test_backward_tiles_use_the_gpu(length, blocks):
    size = backward_tile_size(length, blocks, HOPPER_MULTIPROCESSORS)
    tiles = -(-length // size)
    assert size % 32 == 0
    assert size - length < 32, "longer than the sequence"
    assert tiles == 1 or size >= 64
    assert size < 128 or tiles * blocks >= HOPPER_MULTIPROCESSORS // 2, "half of the GPU is idle"
    if blocks >= HOPPER_MULTIPROCESSORS * 4:
        assert tiles == 1, "maps would take longer than they save"


@pytest.mark.parametrize(("blocks", "tiles"), [(128, 1), (16, 8), (172, 16)])
def test_backward_tiles_of_measured_shapes(blocks, tiles):
    assert -(-2048 // backward_tile_size(2048, blocks, HOPPER_MULTIPROCESSORS)) == tiles


@pytest.mark.skipif(cuda.nvrtc_library() is None, reason="torch comes without NVRTC here")
@pytest.mark.parametrize("slots", WIDTHS)
@pytest.mark.parametrize(("segments", "variance", "dtype"), [(None, False, HALF), (RUNS, True, torch.float32)])
def test_cuda_sources_compile(slots, segments, variance, dtype):
    inputs = arguments(2, 140, (1, 1), slots, 24, segments and segments.count, dtype)
    for launch in filter(is_cuda, launches(CUDA, inputs, segments, variance)):
        options = tuple(launch.options.items())
        code = cuda.compile_source(cuda.nvrtc_library(), launch.kernel.source, options, "sm_90a")
        assert code.startswith(b"\x7fELF")


@pytest.mark.skipif(UNSUPPORTED is not None, reason=str(UNSUPPORTED))
class TestOnHopper:
    """Results on a Hopper GPU."""

    @pytest.mark.parametrize("slots", WIDTHS)
    @pytest.mark.parametrize("tiles", [1, 3])
    def test_agrees_with_the_recursion(self, monkeypatch, slots, tiles):
        monkeypatch.setattr("kalmix.ops._shared.triton.compile_and_launch._LAUNCH_CACHE", {})
        monkeypatch.setattr("kalmix.ops._diagonal.triton.plan.tile_size", lambda length, *_: -(-length // tiles))
        monkeypatch.setattr("kalmix.ops._diagonal.cuda.plan.backward_tile_size", lambda length, *_: -(-length // tiles))
        check(arguments(2, 200, (1, 1), slots, 33), run=CUDA)
        check(arguments(2, 143, (2, 4), slots, 130, RUNS.count), RUNS, False, CUDA)
        check(arguments(1, 192, (1, 2), slots, 64, dtype=HALF), None, False, CUDA)
        check(arguments(1, 70, (1, 1), slots, 24, dtype=torch.float16), run=CUDA)

    @pytest.mark.parametrize(("batch", "length", "channels"), [(64, 150, 512), (1, 3000, 64), (200, 100, 256)])
    def test_agrees_with_the_recursion_in_tiles_of_the_rules(self, batch, length, channels):
        check(arguments(batch, length, (1, 1), 16, channels), run=CUDA)

    @pytest.mark.parametrize(
        ("signal", "value"), [("process_noise", 0.0), ("process_noise", 1e3), ("precision", 1e4), ("log_decay", -30.0)]
    )
    def test_agrees_with_the_recursion_for_extreme_signals(self, signal, value):
        inputs = arguments(1, 300, (1, 1), 32, 40)
        check({**inputs, signal: torch.full_like(inputs[signal], value)}, run=CUDA)

    def test_two_calls_are_bitwise_equal(self):
        inputs = arguments(2, 300, (1, 2), 20, 70)
        first, second = (answer(CUDA, None, True, inputs) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
