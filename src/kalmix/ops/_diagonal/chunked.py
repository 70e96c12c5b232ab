"""`diagonal` in tiles: torch only, parallel over the tiles of a sequence, training memory O(T (K + V) + T K V / TILE).

What a tile of tokens does to a cell's belief is a map of five bounded numbers (`_Advance`), so three passes filter a
sequence: the maps of all tiles at once, position by position; the belief that enters each tile, tile by tile; then
the filter itself, in all tiles at once. Training keeps the entering beliefs and recomputes the rest; adjoints go the
same way backwards (`_Retreat`). Where a batch is so wide that one tile fills the cache, tiles follow one another and
only the last pass remains.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import DiagonalBelief
from kalmix.ops._diagonal.signals import DiagonalSignals
from kalmix.ops._shared.batching import in_blocks
from kalmix.ops._shared.chunking import Chunks
from kalmix.ops._shared.custom_op import once_differentiable
from kalmix.ops._shared.isolation import isolate
from kalmix.ops._shared.scan import State
from kalmix.segments import Segments
from kalmix.types import Filtered

TILE = 16  # tokens of a tile


def diagonal(signals: DiagonalSignals, belief: DiagonalBelief, segments: Segments | None, variance: bool) -> Filtered:
    """Equations 16 to 23 of Kalman Linear Attention in the moment form, with a backward of its own.

    Takes `log_decay` and `process_noise` as `[G, K, V]`. See `kalmix.ops.diagonal`.
    """
    q, k, v, precision, log_decay, process_noise = signals

    def block(*tensors: Any) -> tuple[Tensor, ...]:
        return _Diagonal.apply(variance, log_decay, process_noise, *tensors)

    def filtered(*tokens: Any) -> Filtered:
        return in_blocks(block, tokens, belief, segments, 2 * log_decay.numel(), TILE)

    return isolate(filtered, (q, k, v, precision), belief, segments)


class _Diagonal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, variance: bool, *inputs: Any) -> tuple[Tensor, ...]:
        log_decay, process_noise, q, k, v, precision, mean, var, rows = inputs
        chunks = Chunks.of(v, q.shape[2], rows, TILE)
        dynamics = _Dynamics.of(chunks, log_decay, process_noise, mean.dtype)
        tokens = _tokens(chunks, q, k, v, precision, mean.dtype)
        maps = _advances(dynamics, tokens) if chunks.linked else None
        entry, after = _carried(chunks, maps, (mean, var))
        reads, leaving = _filter(dynamics, tokens, entry, variance)
        ctx.save_for_backward(log_decay, process_noise, q, k, v, precision, rows, *entry)
        read_mean, *read_var = (chunks.paste(x) for x in reads)
        if read_mean.dtype != v.dtype:  # a cast that changes nothing returns its input, whose gradient torch 2.11 loses
            read_mean = read_mean.to(v.dtype)
        return read_mean, *read_var, *(x.reshape(mean.shape) for x in after or leaving)

    @staticmethod
    @once_differentiable("kernel 'chunked' of `diagonal`")
    def backward(ctx: Any, *adjoints: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *inputs, rows, entry_mean, entry_var = ctx.saved_tensors
        log_decay, process_noise, q, k, v, precision = inputs
        *to_reads, to_mean, to_var = adjoints
        chunks, entry = Chunks.of(v, q.shape[2], rows, TILE), (entry_mean, entry_var)
        dynamics = _Dynamics.of(chunks, log_decay, process_noise, to_mean.dtype)
        tokens = _tokens(chunks, q, k, v, precision, to_mean.dtype)
        reads = [_positions(chunks, x, to_mean.dtype)[..., None, :].unbind(0) for x in to_reads]
        trace, maps = _replay(dynamics, tokens, reads, entry, chunks.linked)
        leaving, before = _carried(chunks, maps, (to_mean, to_var), backwards=True)
        parts, totals, entering = _adjoint(dynamics, tokens, reads, entry, trace, leaving)
        grads = (*(x.flatten(0, 1) for x in totals), *(chunks.paste(x) for x in parts))
        to_inputs = (x.to(y.dtype) for x, y in zip(grads, inputs, strict=True))
        return None, *to_inputs, *(x.reshape(to_mean.shape) for x in before or entering), None


def _carried(
    chunks: Chunks, maps: _Advance | _Retreat | None, states: State, backwards: bool = False
) -> tuple[State, State | None]:
    """What comes to each tile, and what is left after all of them; a tile that is alone needs no map."""
    states = tuple(chunks.states(x) for x in states)
    return chunks.scan(maps, states, backwards) if maps else (tuple(x[:, None] for x in states), None)


class _Dynamics(NamedTuple):
    """One token's prediction, `[H, G / H, K, V]`, or `[P, H, G / H, K, V]` where it differs between tiles."""

    decay: Tensor
    square: Tensor
    noise: Tensor

    @classmethod
    def of(cls, chunks: Chunks, log_decay: Tensor, process_noise: Tensor, dtype: torch.dtype) -> _Dynamics:
        decay, noise = (chunks.states(x[None].to(dtype))[0] for x in (log_decay, process_noise))
        decay = decay.exp()
        return cls(decay, decay * decay, noise)

    def at(self, token: _Token) -> _Dynamics:
        """Where a tile has no token any more its belief stands still."""
        if token.here is None:
            return self
        return _Dynamics(*(torch.where(token.here, x, still) for x, still in zip(self, (1.0, 1.0, 0.0), strict=True)))


class _Token(NamedTuple):
    """The tokens at one position of all tiles; all zero where a tile is shorter. For `[lanes, P, H, G / H]` tiles:"""

    q: Tensor  # [..., 1, K, 1]
    k: Tensor  # [..., 1, K, 1]
    value: Tensor  # [..., 1, V]
    precision: Tensor  # [..., 1, V]
    here: Tensor | None  # bool [P, 1, 1, 1, 1]; absent if no tile is shorter


def _tokens(chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, precision: Tensor, dtype: torch.dtype) -> list[_Token]:
    q, k, v, precision = (_positions(chunks, x, dtype) for x in (q, k, v, precision))
    columns = zip(q[..., None], k[..., None], v[..., None, :], precision[..., None, :], strict=True)
    return [_Token(*column, here=chunks.here(i)) for i, column in enumerate(columns)]


def _positions(chunks: Chunks, x: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B, T, H or G, *]` to `[L, lanes, P, H, 1 or G / H, *]`, each position in one piece."""
    return chunks.cut(x, dtype).movedim(4, 0).contiguous()


class _Advance(NamedTuple):
    """What some tokens do to a belief: with d = 1 / (1 + s J), s' = A^2 s d + C and m' = A (m + s eta) d + b.

    J and eta are what the tokens say of the belief before them, C and b the belief after them had the one before been
    certain and zero, A the path between. All stay bounded, whatever the decay, noise and precision.
    """

    path: Tensor
    weight: Tensor
    evidence: Tensor
    mean: Tensor
    var: Tensor

    def __call__(self, state: State) -> State:
        mean, var = state
        path = self.path / torch.addcmul(_one(var), var, self.weight)
        mean = torch.addcmul(self.mean, torch.addcmul(mean, var, self.evidence), path)
        return mean, torch.addcmul(self.var, path.mul_(self.path), var)

    def then(self, after: _Advance) -> _Advance:
        shrink = torch.addcmul(_one(self.var), self.var, after.weight).reciprocal_()
        path, onward = self.path * shrink, after.path * shrink
        return _Advance(
            self.path * onward,
            torch.addcmul(self.weight, self.path * path, after.weight),
            torch.addcmul(self.evidence, path, torch.addcmul(after.evidence, after.weight, self.mean, value=-1)),
            torch.addcmul(after.mean, onward, torch.addcmul(self.mean, self.var, after.evidence)),
            torch.addcmul(after.var, onward * after.path, self.var),
        )


class _Retreat(NamedTuple):
    """What some tokens do to the adjoint (gm, gs) of the belief after them: gm' = F gm + lm,
    gs' = F (F gs + kappa gm) + ls, where lm and ls come from what was read off those tokens."""

    path: Tensor
    tilt: Tensor
    mean: Tensor
    var: Tensor

    def __call__(self, state: State) -> State:
        mean, var = state
        var = torch.addcmul(self.var, self.path, (self.path * var).addcmul_(self.tilt, mean))
        return torch.addcmul(self.mean, self.path, mean), var

    def then(self, after: _Retreat) -> _Retreat:
        return _Retreat(
            self.path * after.path,
            torch.addcmul(after.tilt, after.path, self.tilt),
            *after((self.mean, self.var)),
        )


def _evidence(token: _Token) -> tuple[Tensor, Tensor]:
    """k^2 precision, and k precision value."""
    return (token.k * token.k) * token.precision, token.k * (token.precision * token.value)


def _update(dynamics: _Dynamics, scale: Tensor, seen: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
    """Mean and variance after a token, given its evidence; 1 + scale times predicted variance, by which it divides the
    latter; and k precision (value - k predicted mean)."""
    var = torch.addcmul(dynamics.noise, dynamics.square, var)
    grown = torch.addcmul(_one(var), scale, var)
    var.div_(grown)
    mean = dynamics.decay * mean
    surprise = torch.addcmul(seen, scale, mean, value=-1)
    mean.addcmul_(var, surprise)
    return mean, var, grown, surprise


def _advances(dynamics: _Dynamics, tokens: list[_Token]) -> _Advance:
    """The maps of all tiles."""
    mean, var, weight, evidence = (torch.zeros_like(tokens[0].k * tokens[0].value) for _ in range(4))
    path = torch.ones_like(mean)
    for token in tokens:
        here = dynamics.at(token)
        scale, seen = _evidence(token)
        mean, var, grown, surprise = _update(here, scale, seen, mean, var)
        before = here.decay * path
        path = before / grown
        weight.addcmul_(before.mul_(path), scale)
        evidence.addcmul_(path, surprise)
    return _Advance(path, weight, evidence, mean, var)


def _filter(
    dynamics: _Dynamics, tokens: list[_Token], entry: State, variance: bool
) -> tuple[tuple[Tensor, ...], State]:
    """The read-outs `[lanes, P, H, G / H, L, V]` and the beliefs after all tiles."""
    (mean, var), means, variances = entry, [], []
    for token in tokens:
        mean, var = _update(dynamics.at(token), *_evidence(token), mean, var)[:2]
        means.append(_over_slots(token.q, mean))
        if variance:
            variances.append(_over_slots(token.q * token.q, var))
    return tuple(torch.stack(x, 4) for x in (means, variances) if x), (mean, var)


class _Step(NamedTuple):
    """What the adjoint of one position needs, of all cells."""

    mean: Tensor
    var: Tensor
    shrink: Tensor  # 1 / (1 + k^2 precision predicted variance)


def _replay(
    dynamics: _Dynamics, tokens: list[_Token], reads: list[tuple[Tensor, ...]], entry: State, link: bool
) -> tuple[list[_Step], _Retreat | None]:
    """The filter again, keeping its steps; and how adjoints cross the tiles, if they are to be linked."""
    (mean, var), trace = entry, []
    path = torch.ones_like(mean)
    tilt, to_mean, to_var = (torch.zeros_like(mean) for _ in range(3))
    for i, token in enumerate(tokens):
        here = dynamics.at(token)
        write = token.k * token.precision
        # `_evidence` in another order: a compiler that found these steps in `_filter` would keep them all from there.
        mean, var, grown, surprise = _update(here, token.k * write, write * token.value, mean, var)
        shrink = grown.reciprocal_()
        trace.append(_Step(mean, var, shrink))
        if link:
            path = (here.decay * path).mul_(shrink)
            tilt.addcmul_(path, surprise)
            read = (token.q * reads[0][i]).mul_(path)
            to_mean.add_(read)
            to_var.addcmul_(read, tilt)
            if len(reads) > 1:
                to_var.addcmul_((token.q * token.q * reads[1][i]).mul_(path), path)
    return trace, _Retreat(path, tilt, to_mean, to_var) if link else None


def _adjoint(
    dynamics: _Dynamics,
    tokens: list[_Token],
    reads: list[tuple[Tensor, ...]],
    entry: State,
    trace: list[_Step],
    leaving: State,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], State]:
    """From the adjoint after all tiles: those of q, k, value and precision `[lanes, P, H, 1 or G / H, L, K or V]`; of
    log-decay and noise `[H, G / H, K, V]`; and the one before the tiles."""
    to_mean, to_var = leaving
    to_decay, to_noise = torch.zeros_like(entry[0]), torch.zeros_like(entry[0])
    parts: list[tuple[Tensor, ...]] = []
    for i, token, step in reversed(list(zip(range(len(tokens)), tokens, trace, strict=True))):
        decay, square, _ = dynamics.at(token)
        before_mean, before_var = trace[i - 1][:2] if i else entry
        to_q = _over_channels(step.mean, reads[0][i])
        to_mean = torch.addcmul(to_mean, token.q, reads[0][i])
        if len(reads) > 1:
            to_q = torch.addcmul(to_q, token.q.squeeze(-1), _over_channels(step.var, reads[1][i]), value=2)
            to_var = torch.addcmul(to_var, token.q * token.q, reads[1][i])
        gain = to_mean * step.var
        to_mean.mul_(step.shrink)
        # value - k mean, times the adjoint of mean: from the predicted mean, lest a small error be lost to rounding
        error = torch.addcmul(token.value, token.k, decay * before_mean, value=-1).mul_(to_mean)
        spread = to_var * step.var
        slope = torch.addcmul(error, token.k, spread, value=-1).mul_(step.var)
        spread.mul_(step.var).addcmul_(gain, step.mean)
        to_value = _over_slots(token.k, gain) * token.precision.squeeze(-2)
        to_precision = _over_slots(token.k, slope)
        to_k = _over_channels(slope.addcmul_(token.k, spread, value=-1), token.precision)
        parts.append((to_q.sum(3, keepdim=True), to_k.sum(3, keepdim=True), to_value, to_precision))

        to_var = (to_var * step.shrink).addcmul_(error, token.k * token.precision).mul_(step.shrink)
        to_noise.add_(to_var if token.here is None else to_var * token.here)
        to_mean, to_var = to_mean.mul_(decay), to_var.mul_(square)
        to_decay.addcmul_(to_mean if token.here is None else to_mean * token.here, before_mean)
        to_decay.addcmul_(to_var if token.here is None else to_var * token.here, before_var, value=2)
    signals = tuple(torch.stack(part[::-1], 4) for part in zip(*parts, strict=True))
    return signals, (to_decay.sum((0, 1)), to_noise.sum((0, 1))), (to_mean, to_var)


def _over_slots(row: Tensor, cells: Tensor) -> Tensor:
    """`sum_n row_n cells_n`: `[..., 1, K, 1]` and `[..., G / H, K, V]` to `[..., G / H, V]`."""
    if torch.compiler.is_compiling():
        return (row * cells).sum(-2)  # a product of matrices would not fuse
    return torch.matmul(row.mT, cells).squeeze(-2)


def _over_channels(cells: Tensor, row: Tensor) -> Tensor:
    """`sum_d cells_d row_d`: `[..., K, V]` and `[..., 1, V]` to `[..., K]`."""
    if torch.compiler.is_compiling():
        return (cells * row).sum(-1)
    return torch.matmul(cells, row.mT).squeeze(-1)


def _one(like: Tensor) -> Tensor:
    return like.new_ones(())
