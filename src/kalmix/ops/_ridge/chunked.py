"""`ridge` in chunks: torch only. Of a chunk's systems only H before it is written out, but for an exact solver.

Memory for training is that of `additive`, three times over.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import PointBelief, RidgeBelief
from kalmix.ops._additive import chunked as memory
from kalmix.ops._ridge.assembly import NormalEquations, assemble
from kalmix.ops._ridge.linear_solvers import packed, scale_of, solve, unpacked
from kalmix.ops._ridge.signals import RidgeSignals
from kalmix.ops._ridge.solvers import Adaptive, Exact, Fixed, Ridge, Sketch, Solver
from kalmix.ops._shared.batching import in_blocks
from kalmix.ops._shared.chunking import Chunks
from kalmix.ops._shared.custom_op import custom_op
from kalmix.ops._shared.decay_products import Decays
from kalmix.ops._shared.isolation import isolate
from kalmix.ops._shared.scan import Writes
from kalmix.ops._shared.step_loop import inside, owners
from kalmix.segments import Segments, unchecked
from kalmix.types import Filtered

CHUNK = 32  # tokens of a chunk


def ridge(
    signals: RidgeSignals, belief: RidgeBelief, segments: Segments | None, variance: bool, ridge: Ridge, solver: Solver
) -> Filtered:
    """Gated KalmaNet, all chunks at once, gradients by one more solve. See `kalmix.ops.ridge`."""

    def filtered(*tokens: Any) -> Filtered:
        options = (belief, segments, variance, ridge, solver)
        return assemble(memory.additive, _solutions, RidgeSignals(*tokens), *options)

    tokens = inside(owners(segments, *signals.v.shape[:2]), *signals)
    return isolate(filtered, tokens, belief, segments)


def _solutions(rhs: Tensor, equations: NormalEquations, ridge: Ridge, solver: Solver) -> Tensor:
    """S^{-1} rhs, both `[B, T, G, K]`."""
    fixed = isinstance(ridge, Fixed)
    return _solve(rhs, *equations, fixed, float(ridge.value if fixed else ridge.factor), packed(solver))


def _solve_blocks(
    rhs: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    norm: Tensor,
    gram: Tensor,
    rows: Tensor | None,
    fixed: bool,
    level: float,
    code: list[int],
) -> Tensor:
    """An operator, or a compiler would see every iteration."""
    solver, strength = unpacked(code), Fixed(level) if fixed else Adaptive(level)

    def block(
        rhs: Tensor, k: Tensor, log_decay: Tensor | None, gain: Tensor | None, norm: Tensor, gram: Tensor,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        chunks = Chunks.of(rhs, k.shape[2], rows, CHUNK)
        keys, scale = chunks.cut(k, rhs.dtype), scale_of(strength, chunks.cut(norm[..., None], rhs.dtype))
        decays = Decays(chunks.cut_decay(log_decay, keys))
        written = keys if gain is None else keys * chunks.cut(gain[..., None], rhs.dtype)
        advance = Writes(decays.path, (keys * decays.until).mT @ written)
        (entry,), (after,) = chunks.scan(advance, (chunks.states(gram),))
        assert decays.matrix is not None
        systems = _Chunk(entry, keys, written, scale.inverse * decays.matrix, scale.inverse * decays.since, scale.shift)
        x = scale.inverse * solve(solver, systems, chunks.cut(rhs, rhs.dtype), scale.rho)
        return chunks.paste(x), after.flatten(1, 2)

    within = solver.solver if isinstance(solver, Sketch) else solver
    widest = k.shape[3] ** 2 if isinstance(within, Exact) else k.shape[3]
    segments = None if rows is None else unchecked(rows)
    entries = CHUNK * norm.shape[2] * widest
    return in_blocks(
        block, (rhs, k, log_decay, gain, norm), PointBelief(gram), segments, entries, CHUNK
    ).mean.contiguous()


def _solve_fake(rhs, *_):
    return rhs.new_empty(rhs.shape)


_solve = custom_op("kalmix::ridge_chunked", _solve_blocks, _solve_fake)


class _Chunk(NamedTuple):
    """The systems of a chunk's L tokens, scaled: H before the chunk, and what its tokens wrote since."""

    gram: Tensor  # [..., K, K]
    keys: Tensor  # [..., L, K]
    written: Tensor  # [..., L, K]
    weights: Tensor  # [..., L, L], of what each token wrote, at each token
    since: Tensor  # [..., L, 1], of `gram`
    shift: Tensor | float  # [..., L, 1]

    def apply(self, x: Tensor) -> Tensor:
        recent = (self.weights * (x @ self.keys.mT)) @ self.written
        return self.since * (x @ self.gram) + recent + self.shift * x

    def matrix(self) -> Tensor:
        pairs = torch.einsum("...ts,...si,...sj->...tij", self.weights, self.keys, self.written)
        eye = torch.eye(self.keys.shape[-1], dtype=pairs.dtype, device=pairs.device)
        shift = self.shift[..., None] if isinstance(self.shift, Tensor) else self.shift
        return self.since[..., None] * self.gram[..., None, :, :] + pairs + shift * eye

    def within(self, basis: Tensor) -> _Chunk:
        parts = (basis.mT @ self.gram @ basis, self.keys @ basis, self.written @ basis)
        return _Chunk(*parts, *self[3:])
