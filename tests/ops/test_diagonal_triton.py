"""Triton kernels of `diagonal`: tiles, blocks of channels, stored beliefs, and registration with PyTorch.

Without a GPU, Triton's interpreter runs the kernels, with small inputs.
"""

from functools import partial

import pytest
import torch
from agreement import check_agreement

pytest.importorskip("triton")

from kalmix import updates
from kalmix.beliefs import DiagonalBelief
from kalmix.ops._diagonal import custom_op as fused
from kalmix.ops._diagonal import reference
from kalmix.ops._diagonal.signals import DiagonalSignals
from kalmix.ops._diagonal.triton.plan import tile_size
from kalmix.ops._shared.custom_op import PriorSwitch
from kalmix.ops._shared.triton.tiles import contiguous_rows
from kalmix.segments import Segments
from kalmix.testing.heads import draw_weights
from kalmix.testing.tolerances import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("q", "k", "v", "precision", "log_decay", "process_noise", "mean", "var")
AXES = dict(zip(NAMES, (2, 2, 2, 2, 0, 0, 1, 1), strict=True))  # of the heads
HALF = torch.bfloat16


def arguments(batch, length, heads, slots, channels, sequences=None, dtype=torch.float32):
    """Return random signals and a prior by name: keys of norm 1, precisions from 0 to 4."""
    draw = torch.Generator().manual_seed(0)
    shared, own = heads
    cells, tokens = (own, slots, channels), (batch, length, own, channels)
    q, k = (torch.randn(batch, length, shared, slots, generator=draw) for _ in range(2))
    q, k = (torch.nn.functional.normalize(x, dim=-1).to(dtype) for x in (q, k))
    v, precision = torch.randn(tokens, generator=draw).to(dtype), 4 * torch.rand(tokens, generator=draw)
    log_decay, noise = -0.2 * torch.rand(cells, generator=draw), 0.1 * torch.rand(cells, generator=draw)
    belief = (batch if sequences is None else sequences, *cells)
    mean, var = torch.randn(belief, generator=draw), 0.1 + torch.rand(belief, generator=draw)
    values = (q, k, v, precision, log_decay, noise, mean, var)
    return {name: x.to(DEVICE) for name, x in zip(NAMES, values, strict=True)}


def output_axes(variance):
    """Return the axis of the heads of each output."""
    return {"mean": 2} | ({"variance": 2} if variance else {}) | {"last mean": 1, "last variance": 1}


def answer(function, segments, variance, inputs, count=1):
    """Return outputs, and gradients of their weighted sum; `count` problems have joined heads."""
    leaves = [x.detach().requires_grad_() for x in inputs.values()]
    mean, var, belief = function(DiagonalSignals(*leaves[:6]), DiagonalBelief(*leaves[6:]), segments, variance)
    outputs = [x for x in (mean, var, *belief) if x is not None]
    weights = draw_weights(outputs, [*output_axes(variance).values()], count)
    return [x.detach() for x in outputs] + list(torch.autograd.grad(outputs, leaves, weights))


def check(inputs, segments=None, variance=True, run=fused.diagonal):
    """Compare outputs and gradients with the float64 recursion; the tolerance is the effect of rounding its inputs."""
    segments = None if segments is None else Segments(segments.rows.to(DEVICE))
    got, exactly = answer(run, segments, variance, inputs), partial(answer, reference.diagonal, segments, variance)
    check_agreement(got, exactly, inputs, AXES, output_axes(variance))


RUNS = Segments.of(torch.tensor([[0, 3, 103], [1, 0, 10], [0, 103, 136], [1, 50, 50], [1, 60, 140]]))
SHAPES = [  # batch, tokens, (key heads, value heads), slots, channels, segments, variance, dtype
    (1, 133, (1, 2), 3, 3, None, True, torch.float32),  # several tiles, a shorter last one
    (2, 143, (1, 1), 5, 9, RUNS, True, torch.float32),  # packed, with gaps and an empty sequence
    (1, 9, (2, 2), 17, 20, None, False, torch.float32),  # sums over blocks of channels, the last one partial
    (1, 9, (1, 1), 2, 130, None, True, torch.float32),  # several partial sums over blocks of channels
    (1, 1, (1, 1), 32, 8, None, False, torch.float32),  # one token, no padding
    (1, 36, (1, 1), 8, 32, None, False, HALF),
]
if DEVICE == "cuda":  # every launch configuration: slots, dtypes, numbers of programs and tiles, lengths
    widths = [(1, 9), (8, 64), (13, 33), (16, 128), (32, 96), (33, 40), (48, 24), (64, 48), (100, 20), (128, 24)]
    SHAPES += [(2, 200, (1, 1), *width, None, True, torch.float32) for width in widths]
    SHAPES += [(2, 143, (2, 4), *width, RUNS, False, torch.float32) for width in widths]
    SHAPES += [
        (2, 200, (1, 1), *width, None, variance, dtype)
        for width in ((5, 20), (16, 64), (32, 50), (64, 32), (128, 8))
        for variance, dtype in ((True, torch.float16), (False, HALF))
    ]
    SHAPES += [(64, 150, (1, 1), 32, 512, None, False, torch.float32), (200, 100, (1, 1), 16, 256, None, True, HALF)]
    SHAPES += [(1, 3000, (1, 1), 32, 64, None, True, torch.float32)]


@pytest.mark.parametrize(("batch", "length", "heads", "slots", "channels", "segments", "variance", "dtype"), SHAPES)
def test_agrees_with_the_recursion(batch, length, heads, slots, channels, segments, variance, dtype):
    sequences = None if segments is None else segments.count
    check(arguments(batch, length, heads, slots, channels, sequences, dtype), segments, variance)


@pytest.mark.parametrize(
    ("signal", "value"),
    [
        ("process_noise", 0.0),
        ("process_noise", 1e3),
        ("precision", 0.0),
        ("precision", 1e4),
        ("log_decay", -30.0),
        ("log_decay", 0.0),
    ],
)
def test_agrees_with_the_recursion_for_extreme_signals(signal, value):
    length, slots, channels = (300, 32, 40) if DEVICE == "cuda" else (40, 3, 4)
    inputs = arguments(1, length, (1, 1), slots, channels)
    check({**inputs, signal: torch.full_like(inputs[signal], value)})


def test_64k_tokens_without_decay_lose_nothing():
    """Tiles must join without gaps: without decay and noise, nothing is forgotten in any length."""
    length = 65_536 if DEVICE == "cuda" else 256
    inputs = arguments(1, length, (1, 1), 2, 3)
    inputs["log_decay"], inputs["process_noise"] = (torch.zeros_like(inputs["log_decay"]) for _ in range(2))
    signals, prior = DiagonalSignals(*list(inputs.values())[:6]), DiagonalBelief(inputs["mean"], inputs["var"])
    belief = fused.diagonal(signals, prior, None, False).belief
    _, k, v, precision, _, _, mean, var = (x.double() for x in inputs.values())
    information = 1 / var + torch.einsum("bthk,btgv->bgkv", k**2, precision)
    score = mean / var + torch.einsum("bthk,btgv->bgkv", k, precision * v)
    assert relative_error(belief.variance, 1 / information) < length * torch.finfo(torch.float32).eps
    assert relative_error(belief.mean, score / information) < length * torch.finfo(torch.float32).eps


@pytest.mark.skipif(DEVICE == "cpu", reason="numpy always gives the same bits")
def test_two_calls_are_bitwise_equal():
    inputs = arguments(1, 70, (1, 2), 4, 6)
    first, second = (answer(fused.diagonal, None, True, inputs) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_training_stores_a_belief_every_32_tokens():
    inputs = {name: x.requires_grad_() for name, x in arguments(1, 70, (1, 1), 4, 6).items()}
    belief, saved = DiagonalBelief(inputs["mean"], inputs["var"]), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        fused.diagonal(DiagonalSignals(*list(inputs.values())[:6]), belief, None, True)
    owned = {x.data_ptr() for x in inputs.values()}
    kept = [x for x in saved if x.data_ptr() not in owned]
    assert [x.numel() for x in kept] == [3 * 2 * 4 * 6]


def test_slices_of_a_projection_are_not_copied():
    q, k, v = torch.randn(2, 5, 1, 12).split(4, dim=-1)
    assert all(contiguous_rows(x).data_ptr() == x.data_ptr() for x in (q, k, v))
    turned = torch.randn(2, 4, 1, 5).transpose(1, 3)
    assert contiguous_rows(turned).is_contiguous()
    inputs = arguments(2, 9, (1, 1), 4, 4)
    whole = torch.cat([inputs["q"], inputs["k"], inputs["v"]], dim=-1)
    sliced = dict(zip(NAMES, (*whole.split(4, dim=-1), *list(inputs.values())[3:]), strict=True))
    for x, y in zip(
        answer(fused.diagonal, None, True, sliced), answer(fused.diagonal, None, True, inputs), strict=True
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("length", [1, 63, 64, 1000, 2048, 65_536])
@pytest.mark.parametrize("warps", [1, 62, 496, 2111, 5000])
def test_tile_size_fills_the_gpu(length, warps, resident=4224):
    size = tile_size(length, warps, resident)
    tiles = -(-length // size)
    assert 1 <= size <= length
    assert tiles == 1 or size >= 64
    assert tiles * warps <= 4 * resident or tiles == 1
    assert tiles == 1 or not resident < tiles * warps < 1.5 * resident, "a second round for a few"


def test_op_passes_opcheck_on_this_device():
    inputs = arguments(1, 34, (1, 2), 3, 4)
    leaves = [x.requires_grad_() for x in inputs.values()]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    runs = torch.tensor([[0, 2, 30]], dtype=torch.int32, device=DEVICE)
    for last in (
        (None, True, True, False, False),  # rows, variance, store, cuda, no_prior
        (runs, False, False, False, False),
        (runs, False, True, False, True),
    ):
        torch.library.opcheck(torch.ops.kalmix.diagonal_triton.default, (*leaves, *last), test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("rows", [None, [(0, 0, 150), (1, 0, 0), (1, 3, 141)]])
def test_maps_of_sequences_equal_the_update(rows, dtype):
    inputs = list(arguments(2, 150, (1, 2), 5, 3, dtype=dtype).values())[1:6]  # several tiles
    segments = None if rows is None else Segments(torch.tensor(rows, dtype=torch.int32, device=DEVICE))
    found = fused.map_sequences(*inputs, segments)
    names = ("precision", "log_decay", "process_noise")
    exact = [x.double() for x in inputs]
    wanted = updates.diagonal(*exact[:2], **dict(zip(names, exact[2:], strict=True)), segments=segments)
    for name, x, y in zip(wanted._fields, found, wanted, strict=True):
        assert x.dtype == torch.float32 and relative_error(x.double(), y) < 1e-5, name


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.slow
def test_gradients_of_the_prior_alone_are_those_of_the_whole_backward_pass(packed):
    segments = Segments(RUNS.rows.to(DEVICE)) if packed else None
    inputs = arguments(2, 143, (1, 1), 5, 9, RUNS.count if packed else None)
    leaves = [x.requires_grad_() for x in inputs.values()]
    switch = PriorSwitch()
    with switch.record():
        mean, _, belief = fused.diagonal(DiagonalSignals(*leaves[:6]), DiagonalBelief(*leaves[6:]), segments, False)
    outputs = [mean, *belief]
    upstream = [torch.ones_like(x) for x in outputs]
    expected = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)[6:]
    with switch.turned_on():
        found = torch.autograd.grad(outputs, leaves[6:], upstream)
    torch.testing.assert_close(found, expected)
