"""Independent float64 recursions, one per op, written from the equations of the ops' docstrings.

They share no code with the oracle and the kernels, so that an error in those cannot hide here. `filter_tokens` steps
through all sequences at once, one token at a time, in the dtype of its inputs. Evaluated in float32 it shows how far
rounding moves a straightforward algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kalmix.ops._ridge.linear_solvers import sketch_basis
from kalmix.ops._ridge.solvers import Adaptive, Chebyshev, ConjugateGradient, Exact, Sketch

Tensors = dict[str, Tensor]
Run = tuple[int, int, int]  # batch row, start, stop
State = tuple[Tensor, ...]
Step = Callable[[State, Tensors, dict[str, Any]], tuple[State, Tensor, Tensor | None]]

HALF_RESOLUTION = 2.0**-10  # smallest ridge of kernel "triton" with bfloat16 inputs, relative to ||H||_F
NOTHING = 1e-10  # ||H||_F below which the output of an adaptive ridge is 0


def filter_tokens(op: str, x: Tensors, options: dict[str, Any], runs: list[Run]) -> list[Tensor]:
    """Return mean, variance if there is one, and the final state, in the dtype of the inputs."""
    batch, length, heads, _ = x["v"].shape
    groups = heads // x["k"].shape[2]
    x = x | {name: x[name].repeat_interleave(groups, 2) for name in ("q", "k")}
    row, start, stop = torch.tensor(runs, dtype=torch.int64).reshape(-1, 3).unbind(1)
    state, reads, spreads = prior_of(op, x, len(runs)), [], []
    cells = {"log_decay", "process_noise"} if op == "diagonal" and x["log_decay"].ndim == 3 else set()  # [G, K, V]
    still = {name: x[name] for name in cells}
    signals = [name for name in x if "." not in name and name not in cells]
    longest = int((stop - start).max()) if runs else 0
    for t in range(longest):
        index = (start + t).clamp(max=length - 1)
        token = still | {name: x[name][row, index] for name in signals}
        if "rounding.turns" in x:
            token["turns"] = x["rounding.turns"][t]
        for name in ("solutions", "grams"):
            if f"rounding.{name}" in x:
                token[name] = x[f"rounding.{name}"][t]
        if "rounding.decays" in x and "log_decay" in token:  # its gradient is a sum of q dq - k dk, which both round
            decay = token["log_decay"] if token["log_decay"].ndim == 3 else token["log_decay"][..., None]
            slip = (x["rounding.decays"][t] - 1) * (decay - decay.detach())
            token |= {"q": token["q"] * (1 + slip), "k": token["k"] * (1 - slip)}
        after, mean, variance = STEPS[op](state, token, options)
        going = start + t < stop
        state = tuple(
            torch.where(going.view(-1, *(1,) * (old.ndim - 1)), new, old) for new, old in zip(after, state, strict=True)
        )
        reads.append(mean)
        spreads.append(variance)

    def lay_out(parts: list[Any], width: int) -> Tensor:
        laid = x["v"].new_zeros(batch, length, heads, width)
        if not parts:
            return laid
        step, run = torch.nonzero((torch.arange(longest)[:, None] + start) < stop, as_tuple=True)
        return laid.index_put((row[run], start[run] + step), torch.stack(parts)[step, run])

    outputs = [lay_out(reads, x["v"].shape[3])]
    if op not in ("additive", "delta"):
        outputs.append(lay_out(spreads, x["v"].shape[3] if op == "diagonal" else 1))
    return [*outputs, *state]


def stack_inputs(trials: list[Tensors], runs: list[Run]) -> tuple[Tensors, list[Run]]:
    """Combine several inputs of `filter_tokens` that have the same sequences; return the inputs and sequences of all.

    A signal has one row per batch row, a prior one per sequence. Ones that model rounding have the shape `[T, N, ...]`.
    """
    axes, rows = {name: int(name.startswith("rounding.")) for name in trials[0]}, trials[0]["v"].shape[0]
    stacked = {name: torch.cat([x[name] for x in trials], axis) for name, axis in axes.items()}
    return stacked, [(i * rows + row, start, stop) for i in range(len(trials)) for row, start, stop in runs]


FIELDS: dict[str, tuple[str, ...]] = {
    "additive": ("mean",),
    "delta": ("mean",),
    "diagonal": ("mean", "variance"),
    "dense": ("mean", "covariance"),
    "ridge": ("cross", "gram"),
}
SQUARES = ("covariance", "gram")


def symmetric(x: Tensor) -> Tensor:
    return (x + x.mT) / 2


def prior_of(op: str, x: Tensors, count: int) -> State:
    heads, keys, values = x["v"].shape[2], x["k"].shape[3], x["v"].shape[3]
    state = []
    for field in FIELDS[op]:
        if f"prior.{field}" in x:
            part = x[f"prior.{field}"]
            state.append(symmetric(part) if field in SQUARES else part)
            continue
        part = x["v"].new_zeros(count, heads, keys, keys if field in SQUARES else values)
        state.append(part + 1 if field == "variance" else part + torch.eye(keys) if field == "covariance" else part)
    return tuple(state)


def faded(matrix: Tensor, log_decay: Tensor | None) -> Tensor:
    """Return A M for log-decays per head `[N, G]` or per row `[N, G, K]`."""
    if log_decay is None:
        return matrix
    decay = log_decay.exp()
    return (decay[..., None, None] if decay.ndim == 2 else decay[..., None]) * matrix


def outer(x: Tensor, y: Tensor) -> Tensor:
    return x[..., :, None] * y[..., None, :]


def times(matrix: Tensor, x: Tensor) -> Tensor:
    """Return M x."""
    return (matrix * x[..., None, :]).sum(-1)


def read(matrix: Tensor, x: Tensor) -> Tensor:
    """Return M' x."""
    return (matrix * x[..., :, None]).sum(-2)


def step_additive(state: State, s: Tensors, options: dict[str, Any]) -> tuple[State, Tensor, None]:
    gain = s["gain"][..., None] if "gain" in s else 1.0
    memory = faded(state[0], s.get("log_decay")) + outer(gain * s["k"], s["v"])
    return (memory,), read(memory, s["q"]), None


def step_delta(state: State, s: Tensors, options: dict[str, Any]) -> tuple[State, Tensor, None]:
    gain = s["gain"] if s["gain"].ndim == 3 else s["gain"][..., None] * s["k"]
    before = faded(state[0], s.get("log_decay"))
    memory = before + outer(gain, s["v"] - read(before, s["k"]))
    return (memory,), read(memory, s["q"]), None


def step_diagonal(state: State, s: Tensors, options: dict[str, Any]) -> tuple[State, Tensor, Tensor]:
    decay, key = s["log_decay"].exp(), s["k"][..., :, None]
    evidence = outer(s["k"], s["precision"])
    before = decay**2 * state[1] + s["process_noise"]
    variance = before / (1 + key * evidence * before)
    mean = decay * state[0] + variance * evidence * (s["v"][..., None, :] - key * decay * state[0])
    return (mean, variance), read(mean, s["q"]), read(variance, s["q"].square())


def step_dense(state: State, s: Tensors, options: dict[str, Any]) -> tuple[State, Tensor, Tensor]:
    """Step `dense`; raise `options["certainty"]`, if given, to the largest p k'k / r^2 (p: largest variance so far)."""
    diffuses, decay = torch.ones_like(s["k"]), s.get("log_decay")
    angle = s.get("angle")
    if angle is not None:
        diffuses[..., s["k"].shape[-1] // 2 :] = 0
        decay = decay.repeat(1, 1, 2) if decay is not None and decay.ndim == 3 else decay
    if angle is not None and "turns" in s:  # with summed angles, a token's own rotation cancels except for rounding
        slip = ((s["turns"] - 1) * (angle - angle.detach())).repeat(1, 1, 2)
        s = s | {name: s[name] * (1 + slip) for name in "qk"}

    def move(x: Tensor) -> Tensor:
        if angle is not None:
            real, hidden = x.chunk(2, -2)
            cos, sin = angle.cos()[..., None], angle.sin()[..., None]
            x = torch.cat([cos * real - sin * hidden, sin * real + cos * hidden], -2)
        return faded(x, decay)

    before = move(state[0])
    spread = move(move(state[1]).mT) + s["process_noise"][..., None, None] * torch.diag_embed(diffuses)
    spread_key = times(spread, s["k"])
    if "certainty" in options:
        widest = torch.maximum(spread.diagonal(dim1=-2, dim2=-1).amax(-1), options.get("widest", torch.zeros(())))
        evidence = widest * s["k"].square().sum(-1) / s["obs_noise"]
        options |= {"widest": widest, "certainty": max(options["certainty"], float(evidence.max()))}
    gain = spread_key / (s["obs_noise"] + (s["k"] * spread_key).sum(-1))[..., None]
    mean = before + outer(gain, s["v"] - read(before, s["k"]))
    covariance = symmetric(spread - outer(gain, spread_key))
    return (mean, covariance), read(mean, s["q"]), (s["q"] * times(covariance, s["q"])).sum(-1, keepdim=True)


def step_ridge(state: State, s: Tensors, options: dict[str, Any]) -> tuple[State, Tensor, Tensor]:
    gain = s["gain"][..., None] if "gain" in s else 1.0
    gram = faded(state[1], s.get("log_decay")) + outer(gain * s["k"], s["k"])
    cross = faded(state[0], s.get("log_decay")) + outer(gain * s["k"], s["v"])
    solutions = s.get("solutions", torch.ones_like(s["q"]).repeat(1, 1, 2)).chunk(2, -1)  # for x, for its adjoint
    solved = gram * symmetric(s["grams"]) if "grams" in s else gram
    x = solution(solved, s["q"], options["ridge"], options["solver"], solutions, HALF_RESOLUTION * ("solutions" in s))
    mix = s["mix"][..., None] if "mix" in s else 1.0
    reader = mix * x + (1 - mix) * s["q"]
    mean = read(cross, reader) + read(
        cross - cross.detach(), (reader * (solutions[0] - 1)).detach()
    )  # changes only the gradient
    return (cross, gram), mean, (s["q"] * x).sum(-1, keepdim=True)


def solution(
    gram: Tensor, query: Tensor, ridge: Any, solver: Any, previous: Sequence[Tensor], resolution: float
) -> Tensor:
    """Return x = (H + lambda I)^{-1} q by the solver, with the gradients of its docstring.

    lambda is at least `resolution` ||H||_F. Implicit gradients multiply x by `previous[0]` and its adjoint by
    `previous[1]`, ones that model rounding.
    """
    square = gram.square().sum((-2, -1))
    something = square > NOTHING**2
    norm = torch.where(something, torch.where(something, square, 1.0).sqrt(), 0.0)
    level = ridge.factor * norm if isinstance(ridge, Adaptive) else torch.full_like(norm, ridge.value)
    level = torch.maximum(level, resolution * norm)
    solvable = level > 0
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype)
    system = gram + torch.where(solvable, level, 1.0)[..., None, None] * eye
    least, most = (x[..., None] for x in (torch.where(solvable, level, 1.0), torch.where(solvable, level + norm, 2.0)))
    if isinstance(solver, Exact):
        x = torch.linalg.solve(system, query)
    elif isinstance(solver, Chebyshev) and solver.backward == "unrolled":
        x = chebyshev(system, query, least, most, solver.iterations)
    else:
        solve = partial(iterate, solver=solver, least=least.detach(), most=most.detach())
        x = _Implicit.apply(system, query, solve, previous)
    return torch.where(solvable[..., None], x, 0.0)


def iterate(system: Tensor, rhs: Tensor, solver: Any, least: Tensor, most: Tensor) -> Tensor:
    if isinstance(solver, Chebyshev):
        return chebyshev(system, rhs, least, most, solver.iterations)
    if isinstance(solver, ConjugateGradient):
        return conjugate_gradient(system, rhs, solver.iterations)
    if isinstance(solver, Exact):
        return torch.linalg.solve(system, rhs)
    assert isinstance(solver, Sketch)
    basis = sketch_basis(solver, rhs)
    return iterate(basis.mT @ system @ basis, rhs @ basis, solver.solver, least, most) @ basis.mT


def chebyshev(system: Tensor, rhs: Tensor, least: Tensor, most: Tensor, iterations: int) -> Tensor:
    """Solve by Algorithm 1 of Gated KalmaNet, for eigenvalues between `least` and `most`."""
    total = most + least
    rho_squared, weight = ((most - least) / total) ** 2, torch.full_like(least, 2.0)
    before, x = torch.zeros_like(rhs), 2 * rhs / total
    for _ in range(iterations):
        weight = 4 / (4 - rho_squared * weight)
        step = 2 * weight / total * (times(system, x) - rhs)
        before, x = x, x - step + (weight - 1) * (x - before)
    return x


def conjugate_gradient(system: Tensor, rhs: Tensor, iterations: int) -> Tensor:
    """Solve until the backward error ||r|| / (||S||_F ||x||) is an eighth of the dtype's precision.

    Further iterations would divide rounding errors by rounding errors.
    """
    x, residual, direction = torch.zeros_like(rhs), rhs, rhs
    precise = (torch.finfo(rhs.dtype).eps / 8) ** 2 * system.square().sum((-2, -1))[..., None]
    for _ in range(iterations):
        square, image = residual.square().sum(-1, keepdim=True), times(system, direction)
        curvature = (direction * image).sum(-1, keepdim=True)
        going = (curvature > 0) & (square > precise * x.square().sum(-1, keepdim=True))
        if not going.any():
            break
        step = torch.where(going, square / torch.where(going, curvature, 1.0), 0.0)
        x, residual = x + step * direction, residual - step * image
        share = torch.where(going, residual.square().sum(-1, keepdim=True) / torch.where(going, square, 1.0), 0.0)
        direction = residual + share * direction
    return x


class _Implicit(torch.autograd.Function):
    """A solution whose gradient is one more solve (Lemma 2 of Gated KalmaNet): y = S^-1 g, dq = y, dS = -y x'."""

    @staticmethod
    def forward(
        ctx: Any, system: Tensor, rhs: Tensor, solve: Callable[[Tensor, Tensor], Tensor], previous: Sequence[Tensor]
    ) -> Tensor:
        x = solve(system, rhs)
        ctx.save_for_backward(system, x)
        ctx.solve, ctx.kept = solve, previous
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        system, x = ctx.saved_tensors
        y = ctx.solve(system, grad)
        return -symmetric(outer(ctx.kept[1] * y, ctx.kept[0] * x)), y, None, None


STEPS: dict[str, Step] = {
    "additive": step_additive,
    "delta": step_delta,
    "diagonal": step_diagonal,
    "dense": step_dense,
    "ridge": step_ridge,
}
