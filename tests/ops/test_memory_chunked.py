"""The chunked kernels of `additive` and `delta`: results of the reference, and memory."""

import pytest
import torch
from torch import Tensor

from kalmix.beliefs import PointBelief
from kalmix.ops._additive import kernels as additive
from kalmix.ops._additive.signals import AdditiveSignals
from kalmix.ops._delta import kernels as delta
from kalmix.ops._delta.signals import DeltaSignals
from kalmix.ops._shared import batching
from kalmix.segments import Segments
from kalmix.types import belief_dtype

MODULES = {"additive": additive, "delta": delta}
VARIANTS = [  # op, kind of decay, kind of gain
    *(("additive", decay, gain) for decay, gain in ((None, None), (None, "head"), ("head", None), ("key", "head"))),
    *(("delta", decay, gain) for decay, gain in ((None, "head"), ("head", "key"), ("key", "head"), ("key", "key"))),
]
LENGTH = 61
PACKED = Segments.packed(torch.tensor([0, 13, 13, 14, 40, 61]))  # one sequence is empty
GAPS = Segments.of(
    torch.tensor([[0, 3, 17], [2, 0, 61], [0, 20, 35], [1, 5, 5], [1, 30, 60]])
)  # with gaps, not in order
PADDED = Segments.padded(torch.arange(61).expand(3, 61) >= torch.tensor([[0], [17], [60]]))
LAYOUTS = {"whole": None, "packed": PACKED, "gaps": GAPS, "padded": PADDED}


def arguments(variant, batch=1, length=LENGTH, heads=(1, 1), key=3, value=5, sequences=None, dtype=torch.float64):
    """Return random signals and a prior by name: log-decays to -1, keys of about norm 1, stable gains."""
    op, decay, gain = variant
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw, dtype=torch.float64)

    tokens = (batch, length, heads[1])
    values = {
        "q": normal(batch, length, heads[0], key),
        "k": normal(batch, length, heads[0], key) / key**0.5,
        "v": normal(*tokens, value),
        "log_decay": {None: None, "head": -uniform(*tokens), "key": -uniform(*tokens, key)}[decay],
        "gain": {None: None, "head": uniform(*tokens), "key": 0.5 * normal(*tokens, key) / key**0.5}[gain],
        "belief.mean": normal(batch if sequences is None else sequences, heads[1], key, value),
    }
    wide = belief_dtype(dtype)
    return op, {name: x.to(dtype if name in "qkv" else wide) for name, x in values.items() if x is not None}


def call(kernel, op, args, segments=None):
    q, k, v, log_decay, gain, mean = (args.get(x) for x in ("q", "k", "v", "log_decay", "gain", "belief.mean"))
    signals = AdditiveSignals(q, k, v, log_decay, gain) if op == "additive" else DeltaSignals(q, k, v, gain, log_decay)
    module = getattr(MODULES[op], kernel)
    return getattr(module, op)(signals, PointBelief(mean), segments)


def answer(function, args):
    """Return outputs and gradients by name, for a random linear loss of mean and final belief."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in args.items()}
    mean, variance, belief = function(leaves)
    assert variance is None
    outputs = {"mean": mean, "final mean": belief.mean}
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in outputs.values()]
    grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), weights)
    return {name: x.detach() for name, x in outputs.items()} | {
        f"d {name}": x for name, x in zip(leaves, grads, strict=True)
    }


EXPECTED: dict[tuple[object, ...], dict[str, Tensor]] = {}  # answers of the reference, by op and inputs


def expected(op, args, segments=None):
    """Return the reference's answer, once for all sizes of chunks."""
    given = [x.contiguous() for x in args.values()] + ([] if segments is None else [segments.rows])
    key = (op, *args, *((x.dtype, x.shape, x.numpy().tobytes()) for x in given))
    if key not in EXPECTED:
        EXPECTED[key] = answer(lambda x: call("reference", op, x, segments), args)
    return EXPECTED[key]


def check(op, args, segments=None, tolerance=1e-10):
    got, want = answer(lambda x: call("chunked", op, x, segments), args), expected(op, args, segments)
    for name, x in want.items():
        assert got[name].dtype == x.dtype and got[name].shape == x.shape, name
        assert float((got[name] - x).norm()) <= tolerance * float(x.norm()), name
    return got


@pytest.fixture(
    params=[(64, 1 << 19, True), (4, 1 << 19, True), (8, 1, True), (4, 1 << 19, False), (8, 1, False)],
    ids=["one chunk", "chunks", "slices", "chunks as on a GPU", "slices as on a GPU"],
)
def chunking(request, monkeypatch):
    """Set one chunk, many chunks, or slices of few chunks, whose lengths are read or not."""
    chunk, max_entries, reads_lengths = request.param
    for module in MODULES.values():
        monkeypatch.setattr(module.chunked, "CHUNK", chunk)
    monkeypatch.setattr(batching, "MAX_ENTRIES_CPU", max_entries)
    monkeypatch.setattr(batching, "MIN_CHUNKS", 1)
    monkeypatch.setattr(batching, "CHUNKS_PER_SEGMENT", 1)
    monkeypatch.setattr(batching, "reads_lengths", lambda x: reads_lengths)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (2, 4)], ids=str)
def test_agrees_with_the_recursion(chunking, variant, heads):
    for length in (1, 2, LENGTH):
        check(*arguments(variant, 2, length, heads))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("layout", ["packed", "gaps", "padded"])
def test_agrees_with_reference_on_segments(chunking, variant, layout):
    segments = LAYOUTS[layout]
    batch = 1 if layout == "packed" else 3
    got = check(*arguments(variant, batch, heads=(1, 2), sequences=segments.count), segments)
    outside = segments.segment_ids(batch, LENGTH) < 0
    assert all(not x[outside].any() for name, x in got.items() if x.shape[:2] == outside.shape and "belief" not in name)


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant[1]], ids=str)
@pytest.mark.parametrize("decay", [0.0, -30.0, -1e3, "mixed"])
def test_agrees_with_the_recursion_for_strong_decays(chunking, variant, decay):
    """Errors are relative to each gradient's largest entry, which is e^-30 if all decays are."""
    op, args = arguments(variant, 2)
    if decay == "mixed":
        index = torch.arange(args["log_decay"].numel()).view_as(args["log_decay"])
        args["log_decay"] = args["log_decay"].masked_fill(index % 7 == 0, -30.0).masked_fill(index % 11 == 0, -1e3)
    else:
        args["log_decay"] = torch.full_like(args["log_decay"], decay)
    check(op, args)
    narrow = {name: x.float() for name, x in args.items()}
    got = answer(lambda x: call("chunked", op, x), narrow)
    want = expected(op, {name: x.double() for name, x in narrow.items()})
    for name, x in want.items():
        # Each token rounds the memory about 8 times; sums over LENGTH tokens of a chunk accumulate the errors.
        assert float((got[name] - x).norm()) <= 8 * LENGTH * torch.finfo(torch.float32).eps * float(x.norm()), name


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_accepts_expanded_and_strided_inputs(chunking, variant):
    op, args = arguments(variant, 2, heads=(2, 2))
    strided = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in args.items()}
    strided["belief.mean"] = torch.zeros((), dtype=torch.float64).expand_as(args["belief.mean"])
    strided["v"] = args["v"][:, :1].expand_as(args["v"])
    check(op, strided)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("layout", ["whole", "packed"])
def test_training_stores_no_memory_per_token(variant, layout):
    """Training stores the inputs and one memory per chunk, not T x K x V numbers."""
    segments = LAYOUTS[layout] and Segments.packed(torch.tensor([0, 100, 512]))
    op, args = arguments(variant, 1, 512, key=16, value=16, sequences=segments and segments.count)
    leaves = {name: x.requires_grad_() for name, x in args.items()}
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        call("chunked", op, leaves, segments)
    chunks = 512 // (64 if op == "additive" else 16) + (segments.count if segments else 0)
    assert sum(kept.values()) <= sum(x.numel() for x in leaves.values()) + chunks * 16 * 16 + 6
