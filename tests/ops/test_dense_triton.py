"""What only the Triton kernel can get wrong: how it cuts time, how wide it is, what it keeps, how it meets torch.

On a machine without a GPU the kernels run in Triton's interpreter, at sizes it can bear.
"""

import pytest
import torch

pytest.importorskip("triton")

from kalmix.beliefs import DenseBelief
from kalmix.ops._dense import custom_op as fused
from kalmix.ops._dense import reference
from kalmix.ops._dense.block_sizes import CHUNK, padded_width
from kalmix.ops._dense.signals import DenseSignals
from kalmix.ops._dense.triton import primitives
from kalmix.ops._linear_memory.custom_op import tile_size
from kalmix.segments import Segments
from kalmix.testing.tolerances import budgets, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("q", "k", "v", "obs_noise", "process_noise", "log_decay", "mean", "covariance")
HALF = torch.bfloat16


def arguments(batch, length, heads, widths, decay="key", sequences=None, dtype=torch.float32):
    """Signals and a prior, by name; log-decays one a key, one a head, or none."""
    draw = torch.Generator().manual_seed(0)
    (shared, own), (width, values) = heads, widths

    def normal(*shape):
        return torch.randn(shape, generator=draw)

    q, k = (normal(batch, length, shared, width) / width**0.5 for _ in range(2))
    tokens, belief = (batch, length, own), (batch if sequences is None else sequences, own, width)
    root = normal(*belief, width) / width**0.5
    inputs = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": normal(*tokens, values).to(dtype),
        "obs_noise": normal(*tokens).exp(),
        "process_noise": 0.1 * normal(*tokens).exp(),
        "log_decay": -0.2 * normal(*tokens, *[width] * (decay == "key")).exp(),
        "mean": normal(*belief, values),
        "covariance": root @ root.mT + 0.1 * torch.eye(width),
    }
    return {name: x.to(DEVICE) for name, x in inputs.items() if name != "log_decay" or decay != "none"}


def answer(function, inputs, segments, variance):
    """Outputs, and gradients of their sum, weighted by numbers that every dtype holds."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    q, k, v, obs_noise, process_noise, log_decay, mean, covariance = (leaves.get(name) for name in NAMES)
    belief = DenseBelief(mean, (covariance + covariance.mT) / 2)
    signals = DenseSignals(q, k, v, obs_noise, process_noise, log_decay, None)
    result = function(signals, belief, segments, variance)
    outputs = [x for x in (result.variance, *result.belief, result.mean) if x is not None]
    draw = torch.Generator().manual_seed(1)
    weights = [(torch.randint(-8, 9, x.shape, generator=draw) / 4).to(x) for x in outputs]
    return [x.detach() for x in outputs] + list(torch.autograd.grad(outputs, list(leaves.values()), weights))


def check(inputs, segments=None, variance=True, run=fused.dense):
    """Outputs and gradients agree with the float64 recursion, within what rounding its inputs would do to it."""
    segments = None if segments is None else Segments(segments.rows.to(DEVICE))
    got = answer(run, inputs, segments, variance)
    exact = {name: x.double() for name, x in inputs.items()}
    want = answer(reference.dense, exact, segments, variance)
    allowed = budgets(
        lambda moved: answer(reference.dense, moved, segments, variance),
        exact,
        torch.float32,
        [x.dtype for x in got],
        HALF if inputs["k"].dtype == HALF else None,
    )
    outputs = [*["variance"] * variance, "last mean", "last covariance", "mean", *(f"d {name}" for name in inputs)]
    for name, x, y, budget in zip(outputs, got, want, allowed, strict=True):
        error = relative_error(x, y) if y.norm() > 0 else float(x.norm())
        assert error <= budget, f"{name}: {error:.2e}, allowed {budget:.2e}"


RUNS = Segments.of(torch.tensor([[0, 3, 30], [1, 0, 9], [0, 30, 36], [1, 20, 20], [1, 21, 38]]))
SHORT_RUNS = Segments.of(torch.tensor([[0, 1, 3], [0, 3, 6]]))
LONG_RUNS = Segments.of(torch.tensor([[0, 3, 103], [1, 0, 10], [0, 103, 136], [1, 50, 50], [1, 60, 140]]))
SHAPES = [  # batch, tokens, (key heads, value heads), (key, value width), decay, segments, variance, dtype
    (1, 67, (1, 1), (3, 2), "key", None, True, torch.float32),  # two windows, an odd last block
    (2, 39, (1, 2), (3, 2), "head", RUNS, False, torch.float32),  # blocks of runs, gaps between them, an empty one
    (1, 67, (1, 1), (3, 2), "head", None, True, torch.float32),  # the same, of products
    (1, 18, (1, 1), (20, 3), "none", None, True, HALF),  # more keys than tokens in a block
    (1, 19, (1, 1), (130, 1), "head", None, True, torch.float32),  # a covariance too wide for one program
    (1, 6, (1, 1), (130, 1), "key", SHORT_RUNS, False, torch.float32),  # the same of runs
]
if DEVICE == "cuda":  # every class of launch: widths, decays, dtypes, variance or not
    SHAPES += [
        (2, 143, (1, 2), (width, 16), decay, LONG_RUNS, variance, torch.float32)
        for width in (5, 16, 20, 32, 64, 100, 128, 200, 256)
        for decay in ("none", "head", "key")
        for variance in (True, False)
    ]
    SHAPES += [(1, 130, (2, 2), (width, width), "key", None, False, HALF) for width in (16, 32, 64, 128)]


@pytest.mark.parametrize(("batch", "length", "heads", "widths", "decay", "segments", "variance", "dtype"), SHAPES)
def test_agrees_with_the_recursion(batch, length, heads, widths, decay, segments, variance, dtype):
    sequences = None if segments is None else segments.count
    check(arguments(batch, length, heads, widths, decay, sequences, dtype), segments, variance)


ENDS = [("process_noise", 0.0), ("obs_noise", 1e-2), ("log_decay", 0.0)]


@pytest.mark.parametrize(  # where nothing is observed and decays are one a head, d process_noise is a trace: here, 0
    ("signal", "value", "decay"),
    [(*end, decay) for end in ENDS for decay in ("head", "key")] + [("obs_noise", 1e4, "key")],
)
def test_holds_at_the_ends_of_the_range(signal, value, decay):
    length, width = (200, 64) if DEVICE == "cuda" else (20, 3)
    inputs = arguments(1, length, (1, 1), (width, 2), decay)
    inputs["log_decay"] *= 3 / length  # without process noise, decays of many tokens take variances below float32
    check({**inputs, signal: torch.full_like(inputs[signal], value)}, variance=False)


def test_float16_holds_small_gains():
    inputs = arguments(1, 20, (1, 1), (3, 2), "head", dtype=torch.float16)
    small = {"obs_noise": 100.0, "process_noise": 1e-5, "covariance": 1e-5 * torch.eye(3), "mean": 0.0}
    inputs |= {name: torch.zeros_like(inputs[name]) + torch.as_tensor(x).to(DEVICE) for name, x in small.items()}
    got, want = (
        answer(run, {name: x.to(kind) for name, x in inputs.items()} if kind else inputs, None, False)[0]
        for run, kind in ((fused.dense, None), (reference.dense, torch.float64))
    )
    assert relative_error(got, want) < 1e-3  # the final mean, in float32; gains are about 1e-7, float16 ends at 6e-8


@pytest.mark.parametrize("decay", ["head", "key"])
@pytest.mark.parametrize("value", [-30.0, -1e3])
def test_forgets_everything_without_a_nan(value, decay):
    inputs = arguments(1, 20, (1, 1), (3, 2), decay)
    got = answer(fused.dense, inputs | {"log_decay": torch.full_like(inputs["log_decay"], value)}, None, True)
    assert all(bool(torch.isfinite(x).all()) for x in got)


@pytest.mark.parametrize("decay", ["head", "key"])
@pytest.mark.parametrize("least", [-1e3, -1e38])
def test_forgetting_all_costs_no_digits(least, decay):
    """Of what decays a little after a token that forgets everything: in its block, and beyond."""
    inputs = arguments(1, 37, (1, 1), (3, 2), decay)
    inputs["log_decay"][:, [3, 9, 20]] = least
    check(inputs)


@pytest.mark.parametrize("width", [128, 256] if DEVICE == "cuda" else [3, 130])
def test_stays_positive_under_sure_and_repeated_evidence(width):
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


def test_keeps_a_covariance_and_a_mean_every_64_tokens_and_the_gains():
    inputs = {name: x.requires_grad_() for name, x in arguments(1, 67, (1, 1), (3, 2)).items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        fused._filter(*(inputs[name] for name in NAMES), None, False, True, False)
    owned = {x.data_ptr() for x in inputs.values()}
    kept = [x.numel() for x in saved if x.data_ptr() not in owned and x.numel()]
    tile = tile_size(67, torch.float32)
    means = [-(-67 // tile) * 3 * 2, 67 * 2, 67 * tile]  # at the entry of tiles; errors, and inverses they came from
    assert sorted(kept) == sorted([67 * 3, 67, -(-67 // CHUNK) * padded_width(3) ** 2, *means])


def test_meets_the_dispatcher_as_an_operator_should():
    inputs = arguments(1, 18, (1, 2), (3, 2))
    leaves = [inputs[name].requires_grad_() for name in NAMES]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    rows = torch.tensor([[0, 2, 14]], dtype=torch.int32, device=DEVICE)
    for last in ((None, True, True, False), (rows, False, False, False)):  # rows, variance, keep, cuda
        torch.library.opcheck(fused._filter, (*leaves, *last), test_utils=checks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_long_sequences_go_stretch_by_stretch(monkeypatch, dtype):
    monkeypatch.setattr(primitives, "MIN_SPLIT_TOKENS", 70)
    monkeypatch.setattr(primitives, "SPLIT_PROGRAM_COUNTS", range(4, 5))
    inputs = arguments(2, 135, (1, 2), (3, 2), "head", dtype=dtype)
    assert len(primitives.time_splits(inputs["k"], 2, 16, 1, None)) == 2
    check(inputs)
