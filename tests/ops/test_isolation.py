"""NaN and infinity stay in the sequence where they come in, forward and backward, and reach no earlier token."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from kalmix.beliefs import DiagonalBelief, PointBelief, RidgeBelief
from kalmix.kernels.primitives import isolation
from kalmix.segments import Segments
from kalmix.solvers import Adaptive, Chebyshev, ConjugateGradient, Exact
from kalmix.types import Filtered

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H, K, V = 1, 3, 4
# Five sequences, one empty, with a gap before the second, between it and the third, and around the last.
RUNS = [(0, 0, 9), (0, 10, 31), (0, 32, 43), (1, 4, 4), (1, 5, 40)]
FEW = [(0, 0, 5), (0, 6, 13), (0, 14, 18), (1, 2, 2), (1, 3, 7)]  # for Triton's interpreter
VICTIM = 1  # a sequence
RIDGE = {"ridge": Adaptive(0.5), "solver": Chebyshev(8)}
OPS = {  # the shape of further signals, a draw to the signal, the belief
    "additive": ({"log_decay": "BTG", "gain": "BTG"}, PointBelief, {}),
    "additive-keys": ({"log_decay": "BTGK", "gain": "BTG"}, PointBelief, {}),
    "delta": ({"gain": "BTG", "log_decay": "BTG"}, PointBelief, {}),
    "delta-keys": ({"gain": "BTGK", "log_decay": "BTGK"}, PointBelief, {}),
    "diagonal": ({"precision": "BTGV", "log_decay": "GKV", "process_noise": "GKV"}, DiagonalBelief, {}),
    "ridge": ({"log_decay": "BTG", "gain": "BTG", "mix": "BTG"}, RidgeBelief, RIDGE),
    "ridge-exact": ({"log_decay": "BTG", "gain": "BTG", "mix": "BTG"}, RidgeBelief, RIDGE | {"solver": Exact()}),
    "ridge-conjugate": (
        {"log_decay": "BTG", "gain": "BTG", "mix": "BTG"},
        RidgeBelief,
        RIDGE | {"solver": ConjugateGradient(4)},
    ),
}
KERNELS = [
    (op, kernel)
    for op in OPS
    for kernel in ("reference", "chunked", "fused")
    if (op, kernel) != ("ridge-exact", "fused")  # not served
]
SHARED = ("log_decay", "process_noise")  # of `diagonal`: sums over all sequences are their gradients

Call = Callable[[dict[str, Tensor]], Filtered]


@pytest.fixture(params=KERNELS, ids=lambda x: "-".join(x))
def kernel(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(params=[False, True], ids=["values looked at", "values not looked at"])
def _looking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU kernels do not look at values: here, too."""
    if request.param:
        monkeypatch.setattr(isolation, "_finite", lambda signals: False)


def draw(op: str, sequences: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"B": B, "T": T, "H": H, "G": G, "K": K, "V": V, "N": sequences}

    def normal(shape: str) -> Tensor:
        return torch.randn([sizes[x] for x in shape], generator=generator)

    ranges = {"log_decay": lambda x: -0.1 * x.exp(), "gain": torch.sigmoid, "mix": torch.sigmoid}
    signals, belief, _ = OPS[op]
    found = {name: torch.nn.functional.normalize(normal(shape), dim=-1) for name, shape in TOKENS.items()}
    found |= {name: ranges.get(name, torch.exp)(normal(shape)) for name, shape in signals.items()}
    fields = {"gram": lambda: (lambda root: root @ root.mT)(normal("NGKK")), "variance": lambda: normal("NGKV").exp()}
    found |= {f"prior.{x}": fields.get(x, lambda: normal("NGKV"))() for x in belief._fields}
    return {name: x.to(DEVICE) for name, x in found.items()}


TOKENS = {"q": "BTHK", "k": "BTHK", "v": "BTGV"}


def caller(op: str, kernel: str, segments: Segments | None) -> Call:
    """The kernel itself, which checks no values."""
    signals, belief, options = OPS[op]
    name = op.split("-")[0]
    function = getattr(import_module(f"kalmix.kernels.{name}.{kernel}"), name)
    further = ("variance",) if name in ("diagonal", "ridge") else ()

    def run(x: dict[str, Tensor]) -> Filtered:
        prior = belief(*(x[f"prior.{field}"] for field in belief._fields))
        given = [x[y] for y in (*TOKENS, *signals)]
        return function(*given, *options.values(), prior, segments, *(True for _ in further))

    return run


def per_token(op: str, name: str) -> bool:
    return not name.startswith("prior.") and not (op == "diagonal" and name in SHARED)


def reads(found: Filtered) -> list[Tensor]:
    return [found.mean] if found.variance is None else [found.mean, found.variance]


def gradients(
    run: Call, x: dict[str, Tensor], to_reads: Callable[[Tensor], Tensor], to_belief: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Gradients of all inputs, from random ones of all outputs that two functions change."""
    leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
    found = run(leaves)
    generator = torch.Generator().manual_seed(1)

    def weights(y: Tensor) -> Tensor:
        return torch.randn(y.shape, generator=generator).to(y)

    outputs = [*reads(found), *found.belief]
    given = [to_reads(weights(y)) for y in reads(found)] + [to_belief(weights(y)) for y in found.belief]
    grads = torch.autograd.grad(outputs, list(leaves.values()), given, allow_unused=True)
    return {name: torch.zeros_like(y) if g is None else g for (name, y), g in zip(x.items(), grads, strict=True)}


def packed() -> tuple[Segments, Tensor, Tensor]:
    """The runs; which tokens are in one that is not the victim `[B, T]`; which are the victim's."""
    segments = Segments.of(torch.tensor(RUNS, device=DEVICE))
    owner = segments.owner(B, T)
    return segments, (owner >= 0) & (owner != VICTIM), owner == VICTIM


def check_same(got: Tensor, want: Tensor, name: str = "") -> None:
    assert bool(want.isfinite().all()), name
    torch.testing.assert_close(got, want, rtol=0, atol=0, msg=lambda text: f"{name}: {text}")


def put(where: Tensor, value: float) -> Callable[[Tensor], Tensor]:
    """Put a value where a mask `[B, T]` or `[N]` says."""
    return lambda x: x.masked_fill(where.view(*where.shape, *(1,) * (x.ndim - where.ndim)), value)


SILENT = torch.arange(len(RUNS), device=DEVICE) == VICTIM


def spoiled(x: dict[str, Tensor], op: str, value: float, where: Tensor, *names: str) -> dict[str, Tensor]:
    return {n: put(where, value)(y) if per_token(op, n) and (not names or n in names) else y for n, y in x.items()}


@pytest.mark.usefixtures("_looking")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["token", "prior"])
def test_no_other_sequence_is_reached(kernel, value, place):
    segments, others, own = packed()
    run, x = caller(*kernel, segments), draw(kernel[0], len(RUNS))
    victim = torch.zeros_like(own)
    victim[0, TOKEN] = True
    bad = spoiled(x, kernel[0], value, victim)
    if place == "prior":
        bad = {n: put(SILENT, value)(y) if n.startswith("prior.") else y for n, y in x.items()}
    got, want = run(bad), run(x)
    for a, b in zip(reads(got), reads(want), strict=True):
        check_same(a[others], b[others])
        assert not bool(a[own][-1].isfinite().all())
        outside = ~(others | own)
        assert not a[outside].any()
    for a, b in zip(got.belief, want.belief, strict=True):
        check_same(a[~SILENT], b[~SILENT])

    quiet = put(own, 0.0), put(SILENT, 0.0)
    got, want = (gradients(run, y, *quiet) for y in (bad, x))
    for name, b in want.items():
        if per_token(kernel[0], name):
            check_same(got[name][others], b[others], name)
        elif name.startswith("prior."):
            check_same(got[name][~SILENT], b[~SILENT], name)


@pytest.mark.usefixtures("_looking")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_no_gradient_reaches_another_sequence(kernel, value):
    """Gradients of what is read of one sequence, and of its belief, that are not finite."""
    segments, others, own = packed()
    run, x = caller(*kernel, segments), draw(kernel[0], len(RUNS))
    got = gradients(run, x, put(own, value), put(SILENT, value))
    want = gradients(run, x, put(own, 0.0), put(SILENT, 0.0))
    for name, b in want.items():
        if per_token(kernel[0], name):
            check_same(got[name][others], b[others], name)
        elif name.startswith("prior."):
            check_same(got[name][~SILENT], b[~SILENT], name)


@pytest.mark.usefixtures("_looking")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_padding_reaches_nothing(kernel, value):
    """Values outside every sequence and gradients of what is read there; their own gradients are 0."""
    segments, others, own = packed()
    run, x = caller(*kernel, segments), draw(kernel[0], len(RUNS))
    outside = ~(others | own)
    bad = spoiled(x, kernel[0], value, outside)
    for a, b in zip([*reads(run(bad)), *run(bad).belief], [*reads(run(x)), *run(x).belief], strict=True):
        check_same(a, b)
    got = gradients(run, bad, put(outside, value), lambda y: y)
    want = gradients(run, x, lambda y: y, lambda y: y)
    for name, b in want.items():
        check_same(got[name], b, name)
        assert not per_token(kernel[0], name) or not b[outside].any()


@pytest.mark.usefixtures("_looking")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_no_other_batch_row_is_reached(kernel, value):
    run, x = caller(*kernel, None), draw(kernel[0], B)
    where = torch.zeros(B, T, dtype=torch.bool, device=DEVICE)
    where[0, TOKEN] = True
    first = torch.arange(B, device=DEVICE) == 0
    bad = spoiled(x, kernel[0], value, where)
    got, want = run(bad), run(x)
    for a, b in zip([*reads(got), *got.belief], [*reads(want), *want.belief], strict=True):
        check_same(a[1], b[1])
    quiet, loud = put(first, 0.0), put(first, value)
    want = gradients(run, x, quiet, quiet)
    for got in (gradients(run, bad, quiet, quiet), gradients(run, x, loud, loud)):
        for name, b in want.items():
            if name.startswith("prior.") or per_token(kernel[0], name):
                check_same(got[name][1], b[1], name)


@pytest.mark.usefixtures("_looking")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_no_earlier_token_is_reached(kernel, value):
    """Signal after signal. In Triton tokens of one tile share products: there a tile is the grain."""
    segments, _, _ = packed()
    op, module = kernel
    first = 10 if module == "fused" else TOKEN  # tiles of 16 begin at 10 and at 26
    for rows in (None, segments):
        run, x = caller(op, module, rows), draw(op, B if rows is None else len(RUNS))
        where = torch.zeros(B, T, dtype=torch.bool, device=DEVICE)
        where[0, TOKEN] = True
        first = TOKEN if module != "fused" else 16 if rows is None else 10
        names = [name for name in x if per_token(op, name)]
        for name in names if module != "fused" else ("k",):
            got, want = run(spoiled(x, op, value, where, name)), run(x)
            for a, b in zip(reads(got), reads(want), strict=True):
                check_same(a[0, :first], b[0, :first], name)
                if name != "q" or a is got.mean:
                    assert not bool(a[0, TOKEN].isfinite().all()), name
            if name not in ("q", "mix") or module == "chunked":
                assert not all(bool(y[0 if rows is None else VICTIM].isfinite().all()) for y in got.belief), name


@pytest.mark.parametrize("module", ["reference", "chunked", "fused"])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_a_sequence_that_diverges_reaches_no_other(module, compiled):
    """Three in a row of finite tokens; the second one's memory grows by a factor of 1e4 a token."""
    if compiled and module != "chunked":
        return
    length, width = 200, 4
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 3 * length, 1, width, generator=generator).to(DEVICE) for _ in range(3))
    gain = torch.full((1, 3 * length, 1), 0.1, device=DEVICE)
    wild = gain.clone()
    wild[:, length : 2 * length] = 1e4
    function: Any = import_module(f"kalmix.kernels.delta.{module}").delta
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)
    segments = Segments.packed(torch.tensor([0, length, 2 * length, 3 * length], device=DEVICE))
    prior = PointBelief(torch.zeros(3, 1, width, width, device=DEVICE))
    results = []
    for g in (gain, wild):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, g)]
        found = function(*leaves, None, prior, segments)
        loss = found.mean[:, 2 * length :].sum() + found.mean[:, :length].sum() + found.belief.mean[[0, 2]].sum()
        results.append([found.mean, *torch.autograd.grad(loss, leaves)])
        if g is wild:
            assert not bool(found.mean[:, length : 2 * length].isfinite().all())
            assert bool(found.belief.mean[[0, 2]].isfinite().all())
    for want, got in zip(*results, strict=True):
        check_same(got[:, :length], want[:, :length])
        check_same(got[:, 2 * length :], want[:, 2 * length :])
