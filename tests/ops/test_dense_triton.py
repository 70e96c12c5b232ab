"""Tests of the Triton kernels of `dense`: tile boundaries, widths, stored tensors and the custom op.

Without a GPU, kernels run in Triton's interpreter at small sizes.
"""

from functools import partial

import pytest
import torch
from agreement import check_agreement

pytest.importorskip("triton")

from kalmix.beliefs import DenseBelief
from kalmix.ops._dense import block_sizes, reference
from kalmix.ops._dense import custom_op as fused
from kalmix.ops._dense.block_sizes import CHUNK
from kalmix.ops._dense.signals import DenseSignals
from kalmix.ops._dense.triton import primitives
from kalmix.ops._linear_memory.custom_op import tile_size
from kalmix.ops._shared.widths import padded_width
from kalmix.segments import Segments
from kalmix.testing.heads import draw_weights
from kalmix.testing.tolerances import DRAWS, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("q", "k", "v", "obs_noise", "process_noise", "log_decay", "angle", "mean", "covariance")
HALF = torch.bfloat16


def arguments(batch, length, heads, widths, decay="key", sequences=None, dtype=torch.float32):
    """Return random signals and a prior, by name; decays are "key", "head", "none", or "pair" with rotations."""
    draw = torch.Generator().manual_seed(0)
    (key_heads, value_heads), (width, values) = heads, widths

    def normal(*shape):
        return torch.randn(shape, generator=draw)

    q, k = (normal(batch, length, key_heads, width) / width**0.5 for _ in range(2))
    tokens, belief = (batch, length, value_heads), (batch if sequences is None else sequences, value_heads, width)
    root = normal(*belief, width) / width**0.5
    inputs = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": normal(*tokens, values).to(dtype),
        "obs_noise": normal(*tokens).exp(),
        "process_noise": 0.1 * normal(*tokens).exp(),
        "log_decay": -0.2 * normal(*tokens, *{"key": [width], "pair": [width // 2]}.get(decay, [])).exp(),
        "angle": normal(*tokens, width // 2),
        "mean": normal(*belief, values),
        "covariance": root @ root.mT + 0.1 * torch.eye(width),
    }
    absent = {"none": ("log_decay", "angle"), "pair": ()}.get(decay, ("angle",))
    return {name: x.to(DEVICE) for name, x in inputs.items() if name not in absent}


def answer(function, segments, variance, inputs, count=1):
    """Return outputs, and gradients of their weighted sum; `count` problems have joined heads."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    q, k, v, obs_noise, process_noise, log_decay, angle, mean, covariance = (leaves.get(name) for name in NAMES)
    belief = DenseBelief(mean, (covariance + covariance.mT) / 2)
    signals = DenseSignals(q, k, v, obs_noise, process_noise, log_decay, angle)
    result = function(signals, belief, segments, variance)
    outputs = [x for x in (result.variance, *result.belief, result.mean) if x is not None]
    weights = draw_weights(outputs, [*output_axes(variance).values()], count)
    return [x.detach() for x in outputs] + list(torch.autograd.grad(outputs, list(leaves.values()), weights))


def output_axes(variance):
    """Return the axis of the heads of each output."""
    return ({"variance": 2} if variance else {}) | {"last mean": 1, "last covariance": 1, "mean": 2}


def check(inputs, segments=None, variance=True, run=fused.dense, draws=DRAWS):
    """Check outputs and gradients against the float64 reference, within the largest effect of `draws` roundings of the
    inputs."""
    segments = None if segments is None else Segments(segments.rows.to(DEVICE))
    got, dtype = answer(run, segments, variance, inputs), inputs["k"].dtype
    axes = {name: 1 if name in ("mean", "covariance") else 2 for name in inputs}
    exactly = partial(answer, reference.dense, segments, variance)
    products = HALF if dtype == HALF else None
    check_agreement(got, exactly, inputs, axes, output_axes(variance), products, draws)


SPANS = Segments.of(torch.tensor([[0, 3, 30], [1, 0, 9], [0, 30, 36], [1, 20, 20], [1, 21, 38]]))
SHORT_SPANS = Segments.of(torch.tensor([[0, 1, 3], [0, 3, 6]]))
LONG_SPANS = Segments.of(torch.tensor([[0, 3, 103], [1, 0, 10], [0, 103, 136], [1, 50, 50], [1, 60, 140]]))
SHAPES = [  # batch, tokens, (key heads, value heads), (key, value width), decay, segments, variance, dtype
    (1, 67, (1, 1), (3, 2), "key", None, True, torch.float32),  # two chunks, a partial last tile
    (2, 39, (1, 2), (3, 2), "head", SPANS, False, torch.float32),  # segments with gaps, one empty
    (1, 67, (1, 1), (3, 2), "head", None, True, torch.float32),  # by matrix products
    (1, 18, (1, 1), (20, 3), "none", None, True, HALF),  # more keys than tokens in a tile
    (1, 19, (1, 1), (130, 1), "head", None, True, torch.float32),  # a covariance too wide for one program
    (1, 6, (1, 1), (130, 1), "key", SHORT_SPANS, False, torch.float32),  # with segments
    (1, 67, (1, 1), (4, 2), "pair", None, True, torch.float32),  # rotations
    *(
        pytest.param(*shape, marks=pytest.mark.slow)
        for shape in (
            (2, 39, (1, 2), (6, 2), "pair", SPANS, False, torch.float32),
            (1, 18, (1, 1), (20, 3), "pair", None, True, HALF),
            (1, 19, (1, 1), (130, 1), "pair", None, True, torch.float32),
        )
    ),
]
if DEVICE == "cuda":  # every combination of width, decay, dtype and variance
    SHAPES += [
        (2, 143, (1, 2), (width, 16), decay, LONG_SPANS, variance, torch.float32)
        for width in (5, 16, 20, 32, 64, 100, 128, 200, 256)
        for decay in ("none", "head", "key", *["pair"] * (width % 2 == 0))
        for variance in (True, False)
    ]
    SHAPES += [
        (1, 130, (2, 2), (width, width), decay, None, False, HALF)
        for width in (16, 32, 64, 128, 512)
        for decay in ("key", "pair")
    ]


@pytest.mark.parametrize(("batch", "length", "heads", "widths", "decay", "segments", "variance", "dtype"), SHAPES)
def test_triton_agrees_with_reference(batch, length, heads, widths, decay, segments, variance, dtype):
    sequences = None if segments is None else segments.count
    check(arguments(batch, length, heads, widths, decay, sequences, dtype), segments, variance)


EXTREMES = [("process_noise", 0.0), ("obs_noise", 1e-2), ("log_decay", 0.0)]


@pytest.mark.parametrize(  # where nothing is observed and decays are one a head, d process_noise is a trace: here, 0
    ("signal", "value", "decay"),
    [(*extreme, decay) for extreme in EXTREMES for decay in ("head", "key")] + [("obs_noise", 1e4, "key")],
)
def test_triton_agrees_with_reference_at_extreme_signals(signal, value, decay):
    length, width = (200, 64) if DEVICE == "cuda" else (20, 3)
    inputs = arguments(1, length, (1, 1), (width, 2), decay)
    inputs["log_decay"] *= 3 / length  # without process noise, decays of many tokens take variances below float32
    check({**inputs, signal: torch.full_like(inputs[signal], value)}, variance=False, draws=8)


def test_float16_inputs_keep_small_gains():
    inputs = arguments(1, 20, (1, 1), (3, 2), "head", dtype=torch.float16)
    small = {"obs_noise": 100.0, "process_noise": 1e-5, "covariance": 1e-5 * torch.eye(3), "mean": 0.0}
    inputs |= {name: torch.zeros_like(inputs[name]) + torch.as_tensor(x).to(DEVICE) for name, x in small.items()}
    got, want = (
        answer(run, None, False, {name: x.to(kind) for name, x in inputs.items()} if kind else inputs)[0]
        for run, kind in ((fused.dense, None), (reference.dense, torch.float64))
    )
    assert relative_error(got, want) < 1e-3  # the final mean, in float32; gains are about 1e-7, float16 ends at 6e-8


@pytest.mark.parametrize("decay", ["head", "key"])
@pytest.mark.parametrize("value", [-30.0, -1e3])
def test_strong_decays_give_finite_results(value, decay):
    inputs = arguments(1, 20, (1, 1), (3, 2), decay)
    got = answer(fused.dense, None, True, inputs | {"log_decay": torch.full_like(inputs["log_decay"], value)})
    assert all(bool(torch.isfinite(x).all()) for x in got)


@pytest.mark.parametrize("decay", ["head", "key"])
@pytest.mark.parametrize("least", [-1e3, -1e38])
def test_strong_decay_of_one_token_keeps_precision_of_others(least, decay):
    """Small log-decays in the same tile, and in later tiles, keep their digits."""
    inputs = arguments(1, 37, (1, 1), (3, 2), decay)
    inputs["log_decay"][:, [3, 9, 20]] = least
    check(inputs)


@pytest.mark.parametrize("width", [128, 256] if DEVICE == "cuda" else [3, 130])
def test_covariance_is_positive_for_nearly_certain_repeated_keys(width):
    length = 100_000 if DEVICE == "cuda" else 80
    inputs = arguments(1, length, (1, 1), (width, 1), "none")
    key = inputs["k"][:, :1] / inputs["k"][:, :1].norm()
    inputs |= {"k": key.expand_as(inputs["k"]), "obs_noise": torch.full_like(inputs["obs_noise"], 1e-4)}
    eye = torch.eye(width, device=DEVICE).expand(1, 1, width, width)
    for noise, least in ((0.0, -1e-7), (1e-6, 1e-9)):
        process = torch.full_like(inputs["process_noise"], noise)
        belief = DenseBelief(inputs["mean"], eye)
        signals = DenseSignals(inputs["q"], inputs["k"], inputs["v"], inputs["obs_noise"], process, None, None)
        last = fused.dense(signals, belief, None, False).belief.covariance.double()
        assert float(torch.linalg.eigvalsh((last + last.mT) / 2).min()) > least


def test_training_stores_one_covariance_per_chunk_and_the_gains():
    inputs = {name: x.requires_grad_() for name, x in arguments(1, 67, (1, 1), (3, 2)).items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        fused._filter(*(inputs.get(name) for name in NAMES), None, False, True, False)
    input_pointers = {x.data_ptr() for x in inputs.values()}
    saved_sizes = [x.numel() for x in saved if x.data_ptr() not in input_pointers and x.numel()]
    tile = tile_size(torch.empty(1, 67, 1, 1), None)
    means = [-(-67 // tile) * 3 * 2, 67 * 2, 67 * tile]  # at the entry of tiles; errors, and inverses they came from
    assert sorted(saved_sizes) == sorted([67 * 3, 67, -(-67 // CHUNK) * padded_width(3) ** 2, *means])


def test_rotations_store_angles_and_final_beliefs_but_no_rotated_tokens():
    inputs = {name: x.requires_grad_() for name, x in arguments(1, 67, (1, 1), (4, 2), "pair").items()}
    results = fused._filter(*(inputs.get(name) for name in NAMES), None, False, True, False)
    pairs = 2
    assert [x.numel() for x in results[11:]] == [-(-67 // CHUNK) * pairs, pairs, 4 * 2, 4 * 4]


@pytest.mark.parametrize("decay", ["key", "pair"])
@pytest.mark.slow
def test_custom_op_passes_opcheck(decay):
    inputs = {name: x.requires_grad_() for name, x in arguments(1, 18, (1, 2), (4, 2), decay).items()}
    leaves = [inputs.get(name) for name in NAMES]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    rows = torch.tensor([[0, 2, 14]], dtype=torch.int32, device=DEVICE)
    for last in ((None, True, True, False), (rows, False, False, False)):  # rows, variance, keep, cuda
        torch.library.opcheck(torch.ops.kalmix.dense_triton.default, (*leaves, *last), test_utils=checks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_long_sequences_are_split_in_time(monkeypatch, dtype):
    monkeypatch.setattr("kalmix.ops._shared.triton.compile_and_launch._LAUNCH_CACHE", {})
    monkeypatch.setattr(block_sizes, "MIN_SPLIT_TOKENS", 70)
    monkeypatch.setattr(block_sizes, "SPLIT_PROGRAM_COUNTS", range(4, 5))
    inputs = arguments(2, 135, (1, 2), (3, 2), "head", dtype=dtype)
    assert len(primitives.time_splits(inputs["k"], 2, 16, 1, None)) == 2
    check(inputs)
