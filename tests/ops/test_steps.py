"""Steps of all ops: a server's batches over a pool of slots agree with filtering each sequence alone.

Without a GPU, Triton's interpreter runs the kernels.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from kalmix import HistoryBelief, steps
from kalmix.errors import ArgumentError
from kalmix.ops import OPS, Adaptive, Chebyshev, ConjugateGradient, Dynamics, Exact, Fixed
from kalmix.testing.cases import parts
from kalmix.testing.scheduler import Server, check_steps, make_workload
from kalmix.testing.tolerances import budgets
from kalmix.types import belief_dtype, replace_fields

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = ["torch", "triton"] if find_spec("triton") else ["torch"]
HALF = torch.bfloat16
SEQUENCES, TOKENS = 5, 6


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(heads, keys, width, seed=0):
    """Return q, k and v of `SEQUENCES` sequences, with keys of norm 1."""
    shared, own = heads
    q, k = (
        torch.nn.functional.normalize(normal(SEQUENCES, TOKENS, shared, keys, seed=seed + i), dim=-1) for i in (1, 2)
    )
    return q, k, normal(SEQUENCES, TOKENS, own, width, seed=seed + 3)


def gate(*shape, seed):
    return normal(SEQUENCES, TOKENS, *shape, seed=seed).sigmoid()


def memory_problem(op, heads, keys, width, gain=None, decay=None):
    """Return signals and a prior of `additive` or `delta`, with gains and decays per "head", per "key" or absent."""
    q, k, v = tokens(heads, keys, width)
    shapes = {"head": (heads[1],), "key": (heads[1], keys)}
    gains = None if gain is None else gate(heads[1], seed=4)
    if gain == "key":
        gains = gains[..., None] * k.repeat_interleave(heads[1] // heads[0], 2)
    decays = None if decay is None else -gate(*shapes[decay], seed=5)
    kind = {"additive": steps.AdditiveSignals, "delta": steps.DeltaSignals}[op]
    prior = OPS[op].belief(normal(SEQUENCES, heads[1], keys, width))
    return kind(q=q, k=k, v=v, gain=gains, log_decay=decays), prior


def diagonal_problem(heads, keys, width, per_token=False):
    q, k, v = tokens(heads, keys, width)
    shape = (SEQUENCES, TOKENS, heads[1], keys, width) if per_token else (heads[1], keys, width)
    dynamics = -normal(*shape, seed=5).exp(), 0.1 * normal(*shape, seed=6).exp()
    signals = steps.DiagonalSignals(q, k, v, normal(*v.shape, seed=4).exp(), *dynamics)
    state = (SEQUENCES, heads[1], keys, width)
    return signals, OPS["diagonal"].belief(normal(*state, seed=7), normal(*state, seed=8).exp())


def covariances(heads, keys, seed):
    """Return random symmetric positive definite matrices `[SEQUENCES, heads, keys, keys]`."""
    root = normal(SEQUENCES, heads, keys, keys, seed=seed) / keys**0.5
    return (root @ root.mT + (root @ root.mT).mT) / 2 + 0.1 * torch.eye(keys, dtype=root.dtype)


def ridge_problem(heads, keys, width, full=True):
    q, k, v = tokens(heads, keys, width)
    factors = [-gate(heads[1], seed=4), gate(heads[1], seed=5), gate(heads[1], seed=6)] if full else []
    prior = OPS["ridge"].belief(normal(SEQUENCES, heads[1], keys, width, seed=7), covariances(heads[1], keys, 8))
    return steps.RidgeSignals(q, k, v, *factors), prior


def dense_problem(heads, keys, width, decay=None, rotates=False):
    q, k, v = tokens(heads, keys, width)
    noises = gate(heads[1], seed=4), 0.1 * gate(heads[1], seed=5)
    shape = {"head": (heads[1],), "key": (heads[1], keys // 2 if rotates else keys)}
    decays = None if decay is None else -gate(*shape[decay], seed=6)
    angle = normal(SEQUENCES, TOKENS, heads[1], keys // 2, seed=9) if rotates else None
    prior = OPS["dense"].belief(normal(SEQUENCES, heads[1], keys, width, seed=7), covariances(heads[1], keys, 8))
    return steps.DenseSignals(q, k, v, *noises, decays, angle), prior


def attend_problem(width, window=None, own_values=False, times=True):
    """Return signals of 1 key head and 2 value heads; the prior has 3 tokens, or none."""
    q, k, v = tokens((1, 2), width, width + 2 if own_values else width)
    one = torch.ones(1, dtype=torch.float64)

    def dynamics(channels, seed):
        return Dynamics(-0.2 * one, normal(1, channels, seed=seed), 0.3 * one, 0.5 * one, 0.7 * one)

    weighting = steps.Weighting(2 * one, 0.7 * one, 0.1 * one, own_values or window is None, window, True)
    stamps = normal(1, TOKENS, seed=4).abs().cumsum(1).expand(SEQUENCES, TOKENS) if times else None
    values = dynamics(v.shape[3] // 2, 6) if own_values else None
    past = HistoryBelief(
        *(normal(SEQUENCES, 3, *x.shape[2:], seed=7) for x in (k, v)),
        torch.tensor([[-3.0, -2.0, -0.5]]).double().expand(SEQUENCES, 3),
        torch.tensor([[-1, 0, 1], [0, 1, 2], [-1, -1, -1]])[torch.arange(SEQUENCES) % 3],
    )
    return steps.AttendSignals(q, k, v, stamps, dynamics(width // 2, 5), values, weighting), past


PROBLEMS = {
    "attend": lambda: attend_problem(4),
    "attend-window": lambda: attend_problem(6, window=4, times=False),
    "attend-values": lambda: attend_problem(4, own_values=True),
    "additive": lambda: memory_problem("additive", (1, 2), 5, 18),
    "additive-gains": lambda: memory_problem("additive", (2, 2), 3, 4, "head", "head"),
    "additive-keys": lambda: memory_problem("additive", (1, 1), 65, 3, None, "key"),
    "delta": lambda: memory_problem("delta", (2, 4), 5, 18, "head", "head"),
    "delta-keys": lambda: memory_problem("delta", (1, 2), 3, 7, "key", "key"),
    "delta-still": lambda: memory_problem("delta", (1, 1), 130, 1, "head"),
    "diagonal": lambda: diagonal_problem((1, 2), 5, 300),
    "ridge": lambda: ridge_problem((1, 2), 5, 18),
    "ridge-conjugate": lambda: ridge_problem((2, 2), 17, 3),
    "ridge-fixed": lambda: ridge_problem((1, 1), 3, 4, full=False),
    "ridge-exact": lambda: ridge_problem((1, 2), 3, 4, full=False),
    "ridge-wide": lambda: ridge_problem((1, 1), 130, 3),
    "dense": lambda: dense_problem((1, 2), 5, 18, "key"),
    "dense-heads": lambda: dense_problem((2, 2), 17, 3, "head"),
    "dense-turning": lambda: dense_problem((1, 2), 6, 4, "key", rotates=True),
    "dense-wide": lambda: dense_problem((1, 1), 130, 3, "key"),
    "diagonal-tokens": lambda: diagonal_problem((2, 2), 3, 4, per_token=True),
}


def problem(name, dtype):
    """Return the op, its step, signals in a dtype, and a prior in the dtype of its beliefs."""
    op = name.partition("-")[0]
    signals, prior = PROBLEMS[name]()
    kinds = {"q": dtype, "k": dtype, "v": dtype}
    kinds |= {"times": torch.float64}
    fields = {
        field: x.to(DEVICE, kinds.get(field, belief_dtype(dtype)))
        for field, x in signals._asdict().items()
        if isinstance(x, torch.Tensor)
    }
    if op == "attend":
        parts = ("key_dynamics", "value_dynamics", "weighting")
        fields |= {part: to_state(getattr(signals, part), belief_dtype(dtype)) for part in parts}
    return op, replace_fields(signals, **fields), prior.to(DEVICE, belief_dtype(dtype))


def to_state(record, dtype, device=DEVICE):
    """Convert the tensors of a named tuple to the dtype of states."""
    return record and type(record)(*(x.to(device, dtype) if isinstance(x, torch.Tensor) else x for x in record))


CASES = [
    (name, kernel, dtype)
    for name in PROBLEMS
    for kernel in KERNELS
    for dtype in (torch.float64, torch.float32, HALF)
    # In Triton, a series of `attend` has the accuracy of float32. Elsewhere float64 shows all but rounding.
    if dtype != (torch.float64 if (name.partition("-")[0], kernel) == ("attend", "triton") else torch.float32)
    if dtype != HALF or "-" not in name
]
SOLVERS = {  # of "ridge"
    "ridge-conjugate": {"ridge": Fixed(1.0), "solver": ConjugateGradient(8)},
    "ridge-fixed": {"ridge": Fixed(5.0), "solver": Chebyshev(8)},
    "ridge-exact": {"ridge": Adaptive(0.02), "solver": Exact()},
}


def options(name):
    """Return the options of a step that its kernel `reference` takes, too."""
    solver = {"ridge": Adaptive(10.0), "solver": Chebyshev(6)}
    choices = {"ridge": SOLVERS.get(name, solver)}
    op = name.partition("-")[0]
    return {} if op in ("additive", "delta") else {"variance": True} | choices.get(op, {})


def invariant(signals):
    """Return the names of signals without a token axis."""
    shared = isinstance(signals, steps.DiagonalSignals) and signals.log_decay.ndim == 3
    return ("log_decay", "process_noise") if shared else ()


def exact(name, signals, prior):
    """Filter in float64 with the kernel `reference`."""
    op = name.partition("-")[0]
    function = getattr(import_module(f"kalmix.ops._{op}.reference"), op)
    return function(signals, prior, None, **options(name))


def to_float64(signals, device=DEVICE):
    fields = signals._asdict()
    wide = {name: x.to(device, torch.float64) for name, x in fields.items() if isinstance(x, torch.Tensor)}
    nested = {name: to_state(x, torch.float64, device) for name, x in fields.items() if isinstance(x, tuple)}
    return replace_fields(signals, **wide, **nested)


def pool_of(signals, prior):
    """Return a pool of 12 slots; histories have room for all tokens, or for the window."""
    if not isinstance(prior, HistoryBelief):
        return None
    return steps.history_pool(12, signals.weighting.window or TOKENS + 3, prior.keys, prior.values)


def tolerances(name, signals, prior, dtype):
    """Return the change of the exact results when inputs are rounded a few times, relative."""
    signals = to_float64(signals, "cpu")
    fields = {name: x for name, x in signals._asdict().items() if isinstance(x, torch.Tensor)}
    beliefs = zip(prior._fields, prior, strict=True)
    inputs = fields | {f"prior.{name}": (x.double() if x.is_floating_point() else x).cpu() for name, x in beliefs}

    def outputs(inputs):
        belief = type(prior)(*(inputs[f"prior.{name}"] for name in prior._fields))
        result = exact(name, replace_fields(signals, **{name: inputs[name] for name in fields}), belief)
        return [x for x in result[:2] if x is not None] + parts(result.belief)

    state = belief_dtype(dtype)
    expected = outputs(inputs)
    return budgets(outputs, inputs, expected, state, [dtype, *[state] * (len(expected) - 1)])


COSTLY = ("ridge-conjugate", "dense-heads", "dense-turning")  # in the interpreter; `ridge` and `dense` stay


def is_slow(name, kernel, dtype):
    if kernel == "triton" and name in COSTLY and not torch.cuda.is_available():
        return True
    return name.endswith("-wide") or (kernel == "triton" and dtype == HALF and name not in ("delta", "attend"))


TRIED = [pytest.param(*case, marks=[pytest.mark.slow] if is_slow(*case) else []) for case in CASES]


@pytest.mark.parametrize(("name", "kernel", "dtype"), TRIED)
@pytest.mark.slow
def test_a_server_agrees_with_filtering_each_sequence_alone(name, kernel, dtype):
    op, signals, prior = problem(name, dtype)

    def alone(signals, prior):
        return exact(name, to_float64(signals), prior.to(torch.float64))

    step = partial(getattr(steps, op), **options(name), kernel=kernel)
    workload, bounds = make_workload(signals, prior, invariant(signals)), tolerances(name, signals, prior, dtype)
    check_steps(step, alone, workload, bounds, pool=pool_of(signals, prior), same_bits=kernel == "triton")


@pytest.mark.parametrize("parts", [64, 2])
def test_a_long_history_is_read_by_several_programs(parts, monkeypatch):
    """A Triton program reads a part of the window of 300 tokens: one block of it, or several."""
    pytest.importorskip("triton")
    monkeypatch.setattr("kalmix.ops._attend.triton.step.PARTS", parts)
    _, signals, _ = problem("attend-window", torch.float32)
    signals = replace_fields(signals, weighting=replace_fields(signals.weighting, window=300))
    one = {name: getattr(signals, name)[:2, :1] for name in ("q", "k", "v")}
    past = steps.history_pool(2, 400, signals.k, signals.v)
    for x in past[:2]:
        x.copy_(normal(*x.shape, seed=3).to(x))
    past.times.copy_(torch.arange(400))
    past.positions.copy_(torch.arange(400))
    pools = [steps.history_pool(3, 310, signals.k, signals.v) for _ in range(2)]
    results = []
    for pool, kernel in zip(pools, ("torch", "triton"), strict=True):
        steps.store(pool, torch.arange(2, device=DEVICE), past)
        slots = steps.Slots(*torch.tensor([[0, 1], [0, 2]], device=DEVICE))
        results.append(steps.attend(replace_fields(signals, **one), pool, slots, variance=True, kernel=kernel))
    torch.testing.assert_close(results[1].mean, results[0].mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[1].variance, results[0].variance, rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, *pools))


@pytest.mark.parametrize(("name", "kernel"), sorted({case[:2] for case in CASES if "-" not in case[0]}))
def test_steps_read_strided_signals_and_pools(name, kernel):
    op, signals, prior = problem(name, torch.float32)
    rows = torch.arange(3, device=DEVICE)
    fields = {name: x for name, x in signals._asdict().items() if name not in invariant(signals)}
    one = {name: x[rows, :1] for name, x in fields.items() if isinstance(x, torch.Tensor)}
    strided = {name: torch.stack([x, x], 1)[:, 1] for name, x in one.items()}
    strided |= {name: torch.cat([x, x], -1)[..., : x.shape[-1]] for name, x in one.items() if x.ndim == 4}
    pools = [
        type(prior)(*(x.clone() for x in prior)),
        type(prior)(*(torch.stack([x, x], 1)[:, 1] for x in prior)),
    ]
    slots = steps.Slots(rows + 1, rows + 1)
    step = partial(getattr(steps, op), slots=slots, **options(name), kernel=kernel)
    results = [
        step(replace_fields(signals, **fields), pool) for fields, pool in zip((one, strided), pools, strict=True)
    ]
    # cuBLAS, and a kernel that a GPU compiles for other strides, may round in another order.
    same = torch.equal if (kernel, DEVICE) == ("triton", "cpu") else partial(torch.allclose, rtol=1e-5, atol=1e-6)
    assert same(results[0].mean, results[1].mean)
    assert all(map(same, *pools))


@pytest.mark.parametrize(("name", "kernel"), sorted({case[:2] for case in CASES if "-" not in case[0]}))
def test_an_empty_batch_leaves_the_pool(name, kernel):
    op, signals, prior = problem(name, torch.float32)
    shared = invariant(signals)
    tensors = {name: x for name, x in signals._asdict().items() if isinstance(x, torch.Tensor) and name not in shared}
    signals = replace_fields(signals, **{name: x[:0, :1] for name, x in tensors.items()})
    pool = type(prior)(*(x.clone() for x in prior))
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    result = getattr(steps, op)(signals, pool, steps.Slots(none, none), **options(name), kernel=kernel)
    assert result.mean.shape[:2] == (0, 1)
    assert all(map(torch.equal, pool, prior))


def test_a_step_into_an_earlier_result_returns_the_pool():
    _, signals, prior = problem("delta", torch.float32)
    one = replace_fields(signals, **{name: x[:2, :1] for name, x in signals._asdict().items() if x is not None})
    pools = [type(prior)(*(x.clone() for x in prior)) for _ in range(2)]
    rows = torch.arange(2, device=DEVICE)
    out = steps.delta(one, pools[0], steps.Slots(rows, rows))
    again = steps.delta(one, pools[1], steps.Slots(rows, rows), out=out)
    assert again.mean is out.mean and again.belief is pools[1]


@pytest.mark.parametrize("name", ["delta", "attend"])
def test_stored_beliefs_leave_the_pool_without_gradients(name):
    _, signals, prior = problem(name, torch.float32)
    one = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    pool = pool_of(signals, prior) or prior.take(one.expand(12))
    belief = type(prior)(*(x.clone().requires_grad_() if x.is_floating_point() else x for x in prior.take(one)))
    steps.store(pool, one, belief)
    assert not any(x.requires_grad for x in pool)


def test_server_refuses_a_pool_without_a_free_slot():
    _, signals, prior = problem("delta", torch.float32)
    with pytest.raises(ArgumentError, match="`pool` has 4 slots; expected more than 4"):
        Server(make_workload(signals, prior), prior.take(torch.zeros(4, dtype=torch.int64, device=DEVICE)), rows=4)


def test_slots_that_conflict_are_refused():
    def check(read, write, count=4):
        steps.check_slots(steps.Slots(torch.tensor(read), torch.tensor(write)), count)

    check([0, 1, 3, -1, -1], [0, 2, -1, 0, -1])
    with pytest.raises(ArgumentError, match=r"`slots.write` has slot 2 in rows 0 and 1"):
        check([0, 1], [2, 2])
    with pytest.raises(ArgumentError, match=r"`slots.read` has slot 0 in row 1, which row 0 writes"):
        check([0, 0], [0, 1])
    with pytest.raises(ArgumentError, match=r"`slots.read` has values from 0 to 4; expected slots from 0 to 3, or -1"):
        check([0, 4], [0, 1])
