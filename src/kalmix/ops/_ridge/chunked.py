"""Kernel "chunked" of `ridge`, in plain torch.

An iterative solver multiplies by H of a token without forming it: it uses H at the entry of the chunk and the keys of
the chunk. Only `Exact` forms the matrices. Training stores three times as much as `additive`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import RidgeBelief
from kalmix.ops._additive import chunked as memory
from kalmix.ops._ridge.assembly import NormalEquations, assemble
from kalmix.ops._ridge.linear_solvers import decode_solver, encode_solver, solve, spectrum_scale
from kalmix.ops._ridge.signals import RidgeSignals
from kalmix.ops._ridge.solvers import Adaptive, Exact, Fixed, Ridge, Sketch, Solver
from kalmix.ops._shared.batching import Slicing, filter_slices
from kalmix.ops._shared.chunking import Chunks
from kalmix.ops._shared.custom_op import custom_op
from kalmix.ops._shared.decay_products import Decays
from kalmix.ops._shared.isolation import isolate_non_finite
from kalmix.ops._shared.scan import DecayAndWrite, State
from kalmix.ops._shared.step_loop import fill_outside, optional_segment_ids
from kalmix.segments import Segments
from kalmix.types import Filtered

CHUNK = 32  # tokens of a chunk


def ridge(
    signals: RidgeSignals, belief: RidgeBelief, segments: Segments | None, variance: bool, ridge: Ridge, solver: Solver
) -> Filtered:
    """Compute `kalmix.ops.ridge` for all chunks at once; the backward pass solves one more system per token."""

    def run(*tokens: Any) -> Filtered:
        options = (belief, segments, variance, ridge, solver)
        return assemble(memory.additive, _solve_systems, RidgeSignals(*tokens), *options)

    tokens = fill_outside(optional_segment_ids(segments, *signals.v.shape[:2]), *signals)
    return isolate_non_finite(run, tokens, belief, segments)


def _solve_systems(rhs: Tensor, equations: NormalEquations, ridge: Ridge, solver: Solver) -> Tensor:
    """Return S^{-1} rhs of every token, both `[B, T, G, K]`."""
    fixed = isinstance(ridge, Fixed)
    return _solve(rhs, *equations, fixed, float(ridge.value if fixed else ridge.factor), encode_solver(solver))


def _solve_all_chunks(
    rhs: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    norm: Tensor,
    gram: Tensor,
    rows: Tensor | None,
    fixed: bool,
    ridge_parameter: float,
    solver_code: list[int],
) -> Tensor:
    """Solve the systems of all chunks; a custom op, so that `torch.compile` does not trace every iteration."""
    solver, ridge = decode_solver(solver_code), Fixed(ridge_parameter) if fixed else Adaptive(ridge_parameter)

    def solve_slice(chunks: Chunks, signals: list[Any], state: State) -> tuple[State, State, State]:
        rhs, k, log_decay, gain, norm = signals
        keys, scale = chunks.split(k, rhs.dtype), spectrum_scale(ridge, chunks.split(norm[..., None], rhs.dtype))
        decays = Decays(chunks.split_decay(log_decay, keys))
        weighted_keys = keys if gain is None else keys * chunks.split(gain[..., None], rhs.dtype)
        writes = DecayAndWrite(decays.total, (keys * decays.to_end).mT @ weighted_keys)
        (entry_gram,), (final_gram,) = chunks.scan(writes, (chunks.group_heads(state[0]),))
        assert decays.pairwise is not None
        systems = _ChunkSystems(
            entry_gram,
            keys,
            weighted_keys,
            scale.inverse * decays.pairwise,
            scale.inverse * decays.from_start,
            scale.shift,
        )
        x = scale.inverse * solve(solver, systems, chunks.split(rhs, rhs.dtype), scale.rho)
        return (chunks.merge(x),), (final_gram.flatten(1, 2),), (entry_gram,)

    inner_solver = solver.solver if isinstance(solver, Sketch) else solver
    max_width = k.shape[3] ** 2 if isinstance(inner_solver, Exact) else k.shape[3]
    slicing = Slicing(rhs, k.shape[2], rows, CHUNK, CHUNK * norm.shape[2] * max_width)
    return filter_slices(solve_slice, (rhs, k, log_decay, gain, norm), (gram,), slicing, store=False)[0][0]


def _solve_fake(rhs, *_):
    return rhs.new_empty(rhs.shape)


_solve = custom_op("kalmix::ridge_chunked", _solve_all_chunks, _solve_fake)


class _ChunkSystems(NamedTuple):
    """Scaled systems of the L tokens of a chunk: H at the entry of the chunk, and the keys of the chunk."""

    gram: Tensor  # [..., K, K]
    keys: Tensor  # [..., L, K]
    weighted_keys: Tensor  # [..., L, K]
    weights: Tensor  # [..., L, L], weight of the key of token s in H of token t
    entry_decay: Tensor  # [..., L, 1], weight of `gram` in H of each token
    shift: Tensor | float  # [..., L, 1]

    def apply(self, x: Tensor) -> Tensor:
        recent = (self.weights * (x @ self.keys.mT)) @ self.weighted_keys
        return self.entry_decay * (x @ self.gram) + recent + self.shift * x

    def matrix(self) -> Tensor:
        pairs = torch.einsum("...ts,...si,...sj->...tij", self.weights, self.keys, self.weighted_keys)
        eye = torch.eye(self.keys.shape[-1], dtype=pairs.dtype, device=pairs.device)
        shift = self.shift[..., None] if isinstance(self.shift, Tensor) else self.shift
        return self.entry_decay[..., None] * self.gram[..., None, :, :] + pairs + shift * eye

    def restrict(self, basis: Tensor) -> _ChunkSystems:
        restricted = (basis.mT @ self.gram @ basis, self.keys @ basis, self.weighted_keys @ basis)
        return _ChunkSystems(*restricted, *self[3:])
