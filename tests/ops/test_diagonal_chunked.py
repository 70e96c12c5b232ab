"""The chunked kernel of `diagonal`: results and gradients of the reference, and memory."""

import pytest
import torch
from torch import Tensor

from kalmix.beliefs import DiagonalBelief
from kalmix.ops._diagonal import chunked, reference
from kalmix.ops._diagonal.signals import DiagonalSignals
from kalmix.ops._shared import batching
from kalmix.segments import Segments
from kalmix.types import belief_dtype

NAMES = ("q", "k", "v", "precision", "log_decay", "process_noise", "belief.mean", "belief.variance")
PACKED = Segments.packed(torch.tensor([0, 13, 13, 14, 40, 61]))  # one sequence is empty
GAPS = Segments.of(
    torch.tensor([[0, 3, 17], [2, 0, 61], [0, 20, 35], [1, 5, 5], [1, 30, 60]])
)  # with gaps, not in order
PADDED = Segments.padded(torch.arange(61).expand(3, 61) >= torch.tensor([[0], [17], [60]]))
PADDED_RIGHT = Segments.padded(torch.arange(61).expand(3, 61) < torch.tensor([[61], [16], [0]]))


def arguments(
    batch=1, length=13, heads=(1, 1), slots=3, channels=5, sequences=None, dtype=torch.float64, seed=0
) -> dict[str, Tensor]:
    """Return random signals and a prior by name; precisions from 0 to 4, some of them 0."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw, dtype=torch.float64)

    key_heads, value_heads = heads
    cells = (value_heads, slots, channels)
    belief = (batch if sequences is None else sequences, *cells)
    values = (
        *(normal(batch, length, key_heads, slots) for _ in range(2)),
        normal(batch, length, value_heads, channels),
        (4 * uniform(batch, length, value_heads, channels) - 0.5).clamp(min=0),
        -0.4 * uniform(*cells),
        0.2 * uniform(*cells),
        normal(*belief),
        0.1 + uniform(*belief),
    )
    wide = belief_dtype(dtype)
    return {name: x.to(dtype if i < 4 else wide) for i, (name, x) in enumerate(zip(NAMES, values, strict=True))}


def answer(kernel, args, segments=None, variance=True, dtype=None):
    """Return outputs and gradients by name, for a random linear loss of mean, variance and final belief."""
    leaves = [x.detach().clone().to(dtype or x.dtype).requires_grad_() for x in args.values()]
    mean, var, belief = kernel.diagonal(DiagonalSignals(*leaves[:6]), DiagonalBelief(*leaves[6:]), segments, variance)
    outputs = {"mean": mean, "final mean": belief.mean, "final variance": belief.variance}
    if variance:
        outputs["variance"] = var
    draw = torch.Generator().manual_seed(1)
    loss = sum((x.double() * torch.randn(x.shape, generator=draw, dtype=torch.float64)).sum() for x in outputs.values())
    grads = torch.autograd.grad(loss, leaves)
    return {name: x.detach() for name, x in outputs.items()}, dict(zip(NAMES, grads, strict=True))


def check(args, segments=None, variance=True, tolerance=1e-10):
    got, expected = (answer(kernel, args, segments, variance) for kernel in (chunked, reference))
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, x in theirs.items():
            assert ours[name].dtype == x.dtype and ours[name].shape == x.shape, name
            torch.testing.assert_close(ours[name], x, rtol=0, atol=tolerance * float(1 + x.abs().max()), msg=name)
    return got


@pytest.fixture(
    params=[(16, 1 << 19, True), (5, 1 << 19, True), (3, 400, True), (7, 1, True), (3, 400, False)],
    ids=["one slice", "tile 5", "slices", "one tile", "slices as on a GPU"],
)
def tiling(request, monkeypatch):
    """Set tiles and slices of several sizes; in "one tile", every slice has a single tile."""
    tile, max_entries, reads_lengths = request.param
    monkeypatch.setattr(chunked, "TILE", tile)
    monkeypatch.setattr(batching, "MAX_ENTRIES_CPU", max_entries)
    monkeypatch.setattr(batching, "MIN_CHUNKS", 1)
    monkeypatch.setattr(batching, "CHUNKS_PER_SEGMENT", 1)
    monkeypatch.setattr(batching, "reads_lengths", lambda x: reads_lengths)


@pytest.mark.parametrize(
    ("batch", "length", "heads"), [(1, 1, (1, 1)), (2, 13, (1, 3)), (3, 64, (2, 4)), (1, 200, (1, 1))]
)
def test_agrees_with_reference(tiling, batch, length, heads):
    check(arguments(batch, length, heads))
    check(arguments(batch, length, heads), variance=False)


@pytest.mark.parametrize("segments", [PACKED, GAPS, PADDED, PADDED_RIGHT], ids=["packed", "gaps", "left", "right"])
def test_agrees_with_reference_on_segments(tiling, segments):
    batch = 1 if segments is PACKED else 3
    outputs, grads = check(arguments(batch, 61, (1, 2), sequences=segments.count), segments)
    outside = segments.segment_ids(batch, 61) < 0
    for x in (outputs["mean"], outputs["variance"], *(grads[name] for name in NAMES[:4])):
        assert (x[outside] == 0).all()


@pytest.mark.parametrize(
    "extreme",
    [
        {"process_noise": 0.0},
        {"process_noise": 0.0, "log_decay": 0.0},
        {"process_noise": 1e3},
        {"log_decay": -30.0},
        {"precision": 0.0},
        {"precision": 1e4},
        {"precision": 1e4, "process_noise": 0.0, "log_decay": -30.0},
        {"belief.variance": 0.0},
    ],
    ids=str,
)
def test_agrees_with_reference_for_extreme_signals(tiling, extreme):
    args = arguments(2, 61)
    args |= {name: torch.full_like(args[name], value) for name, value in extreme.items()}
    _, grads = check(args)
    assert all(torch.isfinite(x).all() for x in grads.values())


def test_accepts_expanded_and_strided_inputs():
    args = arguments(2, 37, (2, 2))
    args["belief.mean"] = torch.zeros((), dtype=torch.float64).expand_as(args["belief.mean"])
    args["precision"] = torch.full((), 0.7, dtype=torch.float64).expand_as(args["precision"])
    strided = {name: x.transpose(-1, -2).contiguous().transpose(-1, -2) for name, x in args.items()}
    strided |= {name: args[name] for name in ("belief.mean", "precision")}
    run = [
        chunked.diagonal(
            DiagonalSignals(*list(x.values())[:6]), DiagonalBelief(x["belief.mean"], x["belief.variance"]), None, True
        )
        for x in (args, strided)
    ]
    assert not strided["q"].is_contiguous()
    assert torch.equal(run[0].mean, run[1].mean) and torch.equal(run[0].belief.variance, run[1].belief.variance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_error_is_that_of_rounded_inputs(dtype):
    args = arguments(2, 61, dtype=dtype)
    got, grads = answer(chunked, args)
    exact, exact_grads = answer(reference, args, dtype=torch.float64)
    assert got["mean"].dtype == dtype and got["variance"].dtype == torch.float32
    for name, x in (exact | exact_grads).items():
        ours = (got | grads)[name]
        # Each of 61 tokens is rounded to float32 a few times; the mean, and so its gradient, is rounded to `dtype`.
        narrow = name in exact_grads or name == "mean"
        budget = 61 * 8 * torch.finfo(torch.float32).eps + (torch.finfo(dtype).eps if narrow else 0)
        assert (ours.double() - x).abs().max() <= budget * (1 + x.abs().max()), name


def test_small_gradients_are_accurate_at_high_precision():
    """At high precision, gradients are small differences that float32 must preserve."""
    args = arguments(1, 61, dtype=torch.float32) | {"precision": torch.full((1, 61, 1, 5), 1e4)}
    _, grads = answer(chunked, args)
    _, exact = answer(reference, args, dtype=torch.float64)
    for name, x in exact.items():
        assert (grads[name].double() - x).abs().max() <= 1e-4 * x.abs().max(), name


TWO_RUNS = Segments.packed(torch.tensor([0, 100, 256]))


@pytest.mark.parametrize(
    ("segments", "compiled"),
    [
        pytest.param(None, False, id="whole"),
        pytest.param(None, True, id="whole, compiled"),
        pytest.param(TWO_RUNS, False, id="packed"),
        pytest.param(TWO_RUNS, True, id="packed, compiled", marks=pytest.mark.slow),
    ],
)
def test_training_stores_no_state_per_token(segments, compiled):
    """This also holds under `torch.compile`, which chooses the stored tensors of the joint graph itself."""
    args = arguments(1, 256, slots=16, channels=16, sequences=segments and segments.count)
    leaves = [x.requires_grad_() for x in args.values()]
    torch._dynamo.reset()
    run = torch.compile(chunked.diagonal, backend="aot_eager_decomp_partition") if compiled else chunked.diagonal
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run(DiagonalSignals(*leaves[:6]), DiagonalBelief(*leaves[6:]), segments, True)
    tiles = 256 // chunked.TILE + (segments.count if segments else 0)
    inputs = sum(x.nbytes for x in leaves)
    copies = 2 if compiled else 1  # a compiler may also store tiles of inputs, and first products of beliefs
    assert sum(kept.values()) <= copies * (inputs + 8 * 2 * tiles * 16 * 16) + 48 < 8 * 256 * 16 * 16
