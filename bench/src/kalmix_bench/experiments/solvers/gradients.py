"""Errors of gradients through one and several layers, by solver, against float64 (Figures 1c and 1e)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, silu

from kalmix.ops import Adaptive, Chebyshev, ConjugateGradient, Exact, ridge
from kalmix.ops._ridge.solvers import Solver
from kalmix.ops._shared.custom_op import once_differentiable
from kalmix_bench.experiments.solvers.convergence import SOLVERS
from kalmix_bench.experiments.solvers.iterations import PUBLISHED, conjugate_gradient
from kalmix_bench.experiments.solvers.systems import ARITHMETICS, Arithmetic, Systems
from kalmix_bench.experiments.solvers.tokens import Tokens, draw
from kalmix_bench.runner.experiment import ProgressFn

Mixer = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v `[B, T, H, D]` to the mean
ROUNDED, LOWERED = "bfloat16 products", "bfloat16 model"  # rounding of the solver's operands; autocast of the model


@dataclass(frozen=True)
class Gradients:
    """Model of section F: random tokens of a vocabulary of 5,000, 2 heads of 128, blocks as in Llama.

    Attributes:
        scales: factors of the loss; linear solvers do not depend on them.
    """

    vocab_size: int = 5000
    length: int = 2048
    heads: int = 2
    width: int = 128
    layers: tuple[int, ...] = (1, 5)
    iterations: int = 30
    factor: float = 0.02
    scales: tuple[float, ...] = (1.0, 1e2, 1e4, 1e6)


@dataclass(frozen=True)
class Variant:
    """Mixer with the name of its solver and the arithmetic of the rest of the model."""

    solver: str
    mixer: Mixer
    arithmetic: str = "float32"


def variants(setting: Gradients) -> list[Variant]:
    """Return all variants that are compared."""
    count, factor = setting.iterations, setting.factor

    def op(name: str, solver: Solver, arithmetic: str = "float32") -> Variant:
        return Variant(name, partial(_op, factor=factor, solver=solver), arithmetic)

    def written(name: str, solver: str, arithmetic: str = "float32", *, unrolled: bool = False) -> Variant:
        options = {"iterations": count, "arithmetic": ARITHMETICS[arithmetic], "unrolled": unrolled}
        return Variant(name, partial(iterative_ridge, factor=factor, solver=solver, **options), arithmetic)

    ours = {f"Chebyshev {count}": Chebyshev(count), f"CG {count}": ConjugateGradient(count)}
    theirs = f"CG {count} + 1e-5"
    return [
        op("exact", Exact()),
        op(f"Chebyshev {count}", Chebyshev(count)),
        op(f"Chebyshev {2 * count}", Chebyshev(2 * count)),
        written(f"Chebyshev {count}, unrolled", "Chebyshev", unrolled=True),
        op(f"CG {count}", ConjugateGradient(count)),
        written(theirs, "CG + 1e-5"),
        written(f"Chebyshev {count}", "Chebyshev", ROUNDED),
        written(f"Chebyshev {count} by residuals", "Chebyshev by residuals", ROUNDED),
        written(f"CG {count}", "CG", ROUNDED),
        written(theirs, "CG + 1e-5", ROUNDED),
        op("exact", Exact(), LOWERED),
        *(op(*of, LOWERED) for of in ours.items()),
    ]


def _op(q: Tensor, k: Tensor, v: Tensor, *, factor: float, solver: Solver) -> Tensor:
    return ridge(q, k, v, ridge=Adaptive(factor), solver=solver, kernel="chunked").mean  # available on every device


def iterative_ridge(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    factor: float,
    solver: str,
    iterations: int,
    arithmetic: Arithmetic,
    unrolled: bool = False,
) -> Tensor:
    """Compute `kalmix.ops.ridge` with an iteration of this study, with any arithmetic and with implicit or plain
    gradients.

    Args:
        q, k, v: `[B, T, H, D]`.
        factor: strength a of the ridge.
        solver: a key of `SOLVERS`.
        iterations: number of iterations.
        arithmetic: arithmetic of the iteration.
        unrolled: differentiate through the iterations, instead of implicitly (Lemma 2).
    """
    queries, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B H, T, D]
    systems = Systems.of(Tokens(queries, keys), factor)
    rhs = systems.to_chunks(queries)

    def solve(systems: Systems, rhs: Tensor) -> Tensor:
        if solver == "CG + 1e-5":  # with an epsilon, the norm of H matters
            options = {"epsilon": PUBLISHED, "norm": systems.norm}
            *_, last = conjugate_gradient(systems, rhs, iterations, arithmetic, **options)
            return last.x / systems.norm
        *_, x = SOLVERS[solver](systems, rhs, iterations, arithmetic)
        return x / systems.norm

    if unrolled:
        x = solve(systems, rhs)
    else:
        with torch.no_grad():
            x = solve(systems, rhs)
        left = rhs - systems.norm * systems.apply(x, ARITHMETICS["float32"])
        x = _Implicit.apply(left, x, partial(solve, systems.detach()))
    x = x.flatten(1, 2)
    mean = (x @ keys.mT).tril() @ values
    return mean.unflatten(0, q.shape[::2][:2]).transpose(1, 2)


class _Implicit(torch.autograd.Function):
    """Return x with the gradient of x + S^{-1} left (Lemma 2)."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, x: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.solve = solve
        return x.clone()

    @staticmethod
    @once_differentiable("the implicit gradient of this study", "unrolled=True")
    def backward(ctx: Any, to_x: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.solve(to_x), None, None


class Block(nn.Module):
    """Llama block whose mixer is a ridge regression with unit queries and keys."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        total, self.heads = heads * width, heads
        hidden = 8 * total // 3
        self.norms = nn.ModuleList(nn.RMSNorm(total, eps=1e-6) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(total, total, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(total, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, total, bias=False)

    def forward(self, x: Tensor, mixer: Mixer) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)) for part in (self.q, self.k, self.v))
        q, k = normalize(q, dim=-1).to(v.dtype), normalize(k, dim=-1).to(v.dtype)
        x = x + self.o(mixer(q, k, v).flatten(-2))
        y = self.norms[1](x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Embedding, blocks, norm and head; weights are normal with a standard deviation of 0.02."""

    def __init__(self, setting: Gradients, layers: int, seed: int) -> None:
        super().__init__()
        total = setting.heads * setting.width
        self.embedding = nn.Embedding(setting.vocab_size, total)
        self.blocks = nn.ModuleList(Block(setting.heads, setting.width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(total, eps=1e-6), nn.Linear(total, setting.vocab_size, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                if weight.ndim == 2:
                    weight.normal_(0, 0.02, generator=generator)

    def forward(self, embedded: Tensor, mixer: Mixer) -> Tensor:
        x = embedded
        for block in self.blocks:
            x = block(x, mixer)
        return self.head(self.norm(x))


def gradients(setting: Gradients, seed: int, device: torch.device, on_progress: ProgressFn) -> dict[str, Any]:
    """Compute relative errors of gradients, ||G - G*|| / ||G*||, with G* from an exact solver in float64.

    The loss is the mean next-token cross entropy.

    Returns:
        "rows", with errors for all parameters (`parameters`) and for the embedded tokens (`inputs`); and "scaled", with
        errors under scaled losses. Arithmetic "bfloat16 products" rounds the products of the solver; "bfloat16 model"
        is
        autocast, so the op receives bfloat16.
    """
    compared = variants(setting)
    rows, total = [], len(setting.layers) * (len(compared) + 1) + 1
    for place, layers in enumerate(setting.layers):
        model = Model(setting, layers, seed).to(device)
        exact = partial(_op, factor=setting.factor, solver=Exact())
        on_progress(place * (len(compared) + 1) / total, f"{layers} layers, float64")
        want = _gradients(model.double(), setting, seed, exact)
        for number, variant in enumerate(compared):
            on_progress((place * (len(compared) + 1) + number + 1) / total, f"{layers} layers, {variant.solver}")
            gradient = _gradients(model.float(), setting, seed, variant.mixer, variant.arithmetic == LOWERED)
            errors = {name: float((gradient[name] - want[name]).norm() / want[name].norm()) for name in want}
            rows.append({"layers": layers, "solver": variant.solver, "arithmetic": variant.arithmetic, **errors})
    on_progress(1 - 1 / total, "one op, loss by scale")
    return {"rows": rows, "scaled": list(_scaled(setting, seed, device))}


def _gradients(
    model: Model, setting: Gradients, seed: int, mixer: Mixer, lowered: bool = False, scale: float = 1.0
) -> dict[str, Tensor]:
    """Return gradients of the parameters, concatenated, and of the embedded tokens, both float64."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(setting.vocab_size, (1, setting.length + 1), generator=generator).to(device)
    embedded = model.embedding(ids[:, :-1])
    embedded.retain_grad()
    model.zero_grad()
    with torch.autocast(device.type, torch.bfloat16) if lowered else nullcontext():
        logits = model(embedded, mixer)
    (scale * cross_entropy(logits.to(embedded.dtype).flatten(0, 1), ids[0, 1:])).backward()
    gradient = torch.cat([x.grad.flatten().double() for x in model.parameters() if x.grad is not None])
    assert embedded.grad is not None
    return {"parameters": gradient / scale, "inputs": embedded.grad.double() / scale}


def _scaled(setting: Gradients, seed: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield errors of the deepest model with scaled losses, and of the op alone with unit normal gradients."""
    model = Model(setting, max(setting.layers), seed).to(device)
    count = setting.iterations
    mixers = {x.solver: x.mixer for x in variants(setting) if x.arithmetic == "float32"}
    names = (f"CG {count} + 1e-5", f"CG {count}", f"Chebyshev {count}")
    exact = partial(_op, factor=setting.factor, solver=Exact())
    want = _gradients(model.double(), setting, seed, exact)["parameters"]
    for scale in setting.scales:
        for name in names:
            gradient = _gradients(model.float(), setting, seed, mixers[name], scale=scale)["parameters"]
            yield {"scale": scale, "solver": name, "parameters": float((gradient - want).norm() / want.norm())}
    tokens = draw("random", setting.heads, setting.length, setting.width, seed, device)
    generator = torch.Generator().manual_seed(seed + 1)
    v, to_mean = (
        torch.randn(1, setting.length, setting.heads, setting.width, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    for name in ("exact", *names):
        errors = _alone(tokens, v.to(device), to_mean.to(device), exact, mixers[name])
        yield {"scale": None, "solver": name, "parameters": errors}


def _alone(tokens: Tokens, v: Tensor, to_mean: Tensor, exact: Mixer, mixer: Mixer) -> float:
    """Return the error of the op's gradients of q, k and v for one upstream gradient."""

    def of(mixer: Mixer, dtype: torch.dtype) -> Tensor:
        q, k = (x.transpose(0, 1)[None] for x in tokens[:2])
        leaves = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
        grads = torch.autograd.grad(mixer(leaves[0], leaves[1], leaves[2]), leaves, to_mean.to(dtype))
        return torch.cat([x.double().flatten() for x in grads])

    actual, expected = of(mixer, torch.float32), of(exact, torch.float64)
    return float((actual - expected).norm() / expected.norm())
