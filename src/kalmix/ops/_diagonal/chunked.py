"""`diagonal` in tiles, in PyTorch: parallel over tiles, except for the scan of beliefs over them.

A tile maps the belief of a cell by five bounded numbers (`_TileMap`), so a sequence is filtered in three passes:
compute the maps of all tiles, position by position; scan the beliefs over tiles; filter inside all tiles, starting from
the beliefs found. Training stores these beliefs, and recomputes everything else in the backward pass. So it takes
O(T (K + V) + T K V / TILE) memory. Gradients pass from tile to tile in the same way (`_TileGradMap`). If the batch is
so large that one tile fills the cache, slices have one tile each, and only the last pass runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import DiagonalBelief
from kalmix.ops._diagonal.signals import DiagonalSignals
from kalmix.ops._shared.batching import Slicing, backpropagate_slices, empty_outputs, filter_slices
from kalmix.ops._shared.chunking import Chunks
from kalmix.ops._shared.custom_op import needs_grad, register_filter_op
from kalmix.ops._shared.isolation import isolate_non_finite
from kalmix.ops._shared.scan import State
from kalmix.segments import Segments
from kalmix.types import Filtered

TILE = 16  # tokens per tile


def diagonal(signals: DiagonalSignals, belief: DiagonalBelief, segments: Segments | None, variance: bool) -> Filtered:
    """Compute equations 16 to 23 of Kalman Linear Attention in moment form, with a backward pass of its own.

    `log_decay` and `process_noise` must be `[G, K, V]`. See `kalmix.ops.diagonal`.
    """
    q, k, v, precision, log_decay, process_noise = signals
    rows = None if segments is None else segments.rows

    def run(*tokens: Any) -> Filtered:
        tensors = (*tokens, log_decay, process_noise, *belief)
        mean, var, *final = _filter(*tensors, rows, variance, needs_grad(*tensors))[:4]
        return Filtered(mean, var if variance else None, DiagonalBelief(*final))

    return isolate_non_finite(run, (q, k, v, precision), belief, segments)


def _slicing(k: Tensor, v: Tensor, rows: Tensor | None) -> Slicing:
    return Slicing(v, k.shape[2], rows, TILE, 2 * v.shape[2] * k.shape[3] * v.shape[3])


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: Tensor,
    log_decay: Tensor,
    process_noise: Tensor,
    mean: Tensor,
    var: Tensor,
    rows: Tensor | None,
    variance: bool,
    store: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def filter_slice(chunks: Chunks, signals: list[Any], state: State) -> tuple[tuple[Tensor, ...], State, State]:
        dynamics = _Dynamics.create(chunks, log_decay, process_noise, mean.dtype)
        tokens = _split_tokens(chunks, signals, mean.dtype)
        maps = _tile_maps(dynamics, tokens) if chunks.needs_scan else None
        entry, scanned = _scan_tiles(chunks, maps, state)
        readouts, exits = _filter_tiles(dynamics, tokens, entry, variance)
        return tuple(chunks.merge(x) for x in readouts), _final(scanned or exits, state), entry

    state, slicing = (mean, var), _slicing(k, v, rows)
    readouts, final, stored = filter_slices(filter_slice, (q, k, v, precision), state, slicing, store)
    read_var = readouts[1] if variance else mean.new_empty(0)
    return readouts[0], read_var, final[0], final[1], stored[0], stored[1]


def _forward_fake(q, k, v, precision, log_decay, process_noise, mean, var, rows, variance, store):
    readout, *final = empty_outputs(v, (mean, var))
    read_var = mean.new_empty(v.shape if variance else 0)
    return readout, read_var, *final, *_slicing(k, v, rows).empty_stored((mean, var), store)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: Tensor,
    log_decay: Tensor,
    process_noise: Tensor,
    stored_mean: Tensor,
    stored_var: Tensor,
    rows: Tensor | None,
    grad_mean: Tensor,
    grad_var: Tensor | None,
    grad_final_mean: Tensor,
    grad_final_var: Tensor,
) -> list[Tensor]:
    dtype, shared_grads = stored_mean.dtype, [stored_mean.new_zeros(log_decay.shape) for _ in range(2)]

    def backward_slice(
        chunks: Chunks, signals: list[Any], entry: State, grad_readouts: list[Tensor], grad_state: State
    ) -> tuple[tuple[Tensor, ...], State]:
        dynamics = _Dynamics.create(chunks, log_decay, process_noise, dtype)
        tokens = _split_tokens(chunks, signals, dtype)
        readouts = [_positions_first(chunks, x, dtype)[..., None, :].unbind(0) for x in grad_readouts]
        trace, maps = _recompute(dynamics, tokens, readouts, entry, chunks.needs_scan)
        grad_exits, scanned = _scan_tiles(chunks, maps, grad_state, reverse=True)
        grads, shared, grad_entries = _backward_tiles(dynamics, tokens, readouts, entry, trace, grad_exits)
        for total, x in zip(shared_grads, shared, strict=True):
            total += x.flatten(0, 1)
        return tuple(chunks.merge(x) for x in grads), _final(scanned or grad_entries, grad_state)

    grads = [grad_mean] if grad_var is None else [grad_mean, grad_var], (grad_final_mean, grad_final_var)
    grad_signals, grad_state = backpropagate_slices(
        backward_slice, (q, k, v, precision), (stored_mean, stored_var), grads, _slicing(k, v, rows)
    )
    grad_decay, grad_noise = (x.to(y.dtype) for x, y in zip(shared_grads, (log_decay, process_noise), strict=True))
    return [*grad_signals, grad_decay, grad_noise, *grad_state]


_filter = register_filter_op(
    "kalmix::diagonal_chunked",
    _forward,
    _forward_fake,
    _backward,
    outputs=4,
    kernel="kernel 'chunked' of `diagonal`",
)


def _scan_tiles(
    chunks: Chunks, maps: _TileMap | _TileGradMap | None, states: State, reverse: bool = False
) -> tuple[State, State | None]:
    """Return the incoming state of each tile, and the final states, or `None` if `maps` is `None` (a single tile)."""
    states = tuple(chunks.group_heads(x) for x in states)
    return chunks.scan(maps, states, reverse) if maps else (chunks.entry_of_single_chunks(states), None)


def _final(states: State, like: State) -> State:
    """Return states in the shapes `[N, G, K, V]` of `like`."""
    return tuple(x.reshape(y.shape) for x, y in zip(states, like, strict=True))


class _Dynamics(NamedTuple):
    """Transition of one token, `[H, G / H, K, V]`, or `[P, H, G / H, K, V]` if it differs between tiles."""

    decay: Tensor
    decay_squared: Tensor
    noise: Tensor

    @classmethod
    def create(cls, chunks: Chunks, log_decay: Tensor, process_noise: Tensor, dtype: torch.dtype) -> _Dynamics:
        decay, noise = (chunks.group_heads(x[None].to(dtype))[0] for x in (log_decay, process_noise))
        decay = decay.exp()
        return cls(decay, decay * decay, noise)

    def at(self, token: _Token) -> _Dynamics:
        """Return the transition at one position; the identity in tiles that have no token there."""
        if token.valid is None:
            return self
        return _Dynamics(*(torch.where(token.valid, x, value) for x, value in zip(self, (1.0, 1.0, 0.0), strict=True)))


class _Token(NamedTuple):
    """Tokens at one position of all tiles `[chains, P, H, G / H]`; zeros in tiles that have no token there."""

    q: Tensor  # [..., 1, K, 1]
    k: Tensor  # [..., 1, K, 1]
    value: Tensor  # [..., 1, V]
    precision: Tensor  # [..., 1, V]
    valid: Tensor | None  # bool [P, 1, 1, 1, 1], whether a tile has a token here; `None` if all have


def _split_tokens(chunks: Chunks, signals: list[Tensor], dtype: torch.dtype) -> list[_Token]:
    q, k, v, precision = (_positions_first(chunks, x, dtype) for x in signals)
    columns = zip(q[..., None], k[..., None], v[..., None, :], precision[..., None, :], strict=True)
    return [_Token(*column, valid=chunks.valid_at(i)) for i, column in enumerate(columns)]


def _positions_first(chunks: Chunks, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert `[B, T, H or G, *]` to a contiguous `[L, chains, P, H, 1 or G / H, *]`."""
    return chunks.split(x, dtype).movedim(4, 0).contiguous()


class _TileMap(NamedTuple):
    """Maps of the belief (m, s) by a series of tokens.

    With d = 1 / (1 + s J): s' = A^2 s d + C and m' = A (m + s eta) d + b. J (`information`) and eta
    (`information_mean`) are what the tokens contribute to the belief before them, in information form; b and C are the
    belief after them if the one before is 0 without uncertainty; A is the product of decays and shrinkages in between.
    All are bounded for any decay, noise and precision.
    """

    factor: Tensor  # A
    information: Tensor  # J
    information_mean: Tensor  # eta
    mean: Tensor  # b
    var: Tensor  # C

    def __call__(self, state: State) -> State:
        mean, var = state
        factor = self.factor / torch.addcmul(_one(var), var, self.information)
        mean = torch.addcmul(self.mean, torch.addcmul(mean, var, self.information_mean), factor)
        return mean, torch.addcmul(self.var, factor.mul_(self.factor), var)


class _TileGradMap(NamedTuple):
    """Maps of the gradient (gm, gs) with respect to the belief after a series of tokens to that before them.

    gm' = F gm + lm and gs' = F (F gs + kappa gm) + ls, where lm and ls come from the read-outs of those tokens.
    """

    factor: Tensor  # F
    coupling: Tensor  # kappa
    mean: Tensor  # lm
    var: Tensor  # ls

    def __call__(self, state: State) -> State:
        mean, var = state
        var = torch.addcmul(self.var, self.factor, (self.factor * var).addcmul_(self.coupling, mean))
        return torch.addcmul(self.mean, self.factor, mean), var


def _evidence(token: _Token) -> tuple[Tensor, Tensor]:
    """Return the information of an observation: k^2 precision, and k precision value."""
    return (token.k * token.k) * token.precision, token.k * (token.precision * token.value)


def _update(
    dynamics: _Dynamics, information: Tensor, information_mean: Tensor, mean: Tensor, var: Tensor
) -> tuple[Tensor, ...]:
    """Predict and update the belief by one token.

    Returns:
        The posterior mean and variance; the ratio of predicted to posterior variance, 1 + information times predicted
        variance; and the weighted innovation k precision (value - k predicted mean).
    """
    var = torch.addcmul(dynamics.noise, dynamics.decay_squared, var)
    ratio = torch.addcmul(_one(var), information, var)
    var.div_(ratio)
    mean = dynamics.decay * mean
    innovation = torch.addcmul(information_mean, information, mean, value=-1)
    mean.addcmul_(var, innovation)
    return mean, var, ratio, innovation


def _tile_maps(dynamics: _Dynamics, tokens: list[_Token]) -> _TileMap:
    """Compute the maps of all tiles."""
    mean, var, information, information_mean = (torch.zeros_like(tokens[0].k * tokens[0].value) for _ in range(4))
    factor = torch.ones_like(mean)
    for token in tokens:
        current = dynamics.at(token)
        evidence = _evidence(token)
        mean, var, ratio, innovation = _update(current, *evidence, mean, var)
        predicted = current.decay * factor
        factor = predicted / ratio
        information.addcmul_(predicted.mul_(factor), evidence[0])
        information_mean.addcmul_(factor, innovation)
    return _TileMap(factor, information, information_mean, mean, var)


def _filter_tiles(
    dynamics: _Dynamics, tokens: list[_Token], entry: State, variance: bool
) -> tuple[tuple[Tensor, ...], State]:
    """Filter inside all tiles; return the read-outs `[chains, P, H, G / H, L, V]` and the beliefs after the tiles."""
    (mean, var), means, variances = entry, [], []
    for token in tokens:
        mean, var = _update(dynamics.at(token), *_evidence(token), mean, var)[:2]
        means.append(_sum_over_keys(token.q, mean))
        if variance:
            variances.append(_sum_over_keys(token.q * token.q, var))
    return tuple(torch.stack(x, 4) for x in (means, variances) if x), (mean, var)


class _Step(NamedTuple):
    """Quantities of all cells at one position that the backward pass needs."""

    mean: Tensor
    var: Tensor
    shrinkage: Tensor  # 1 / (1 + k^2 precision predicted variance)


def _recompute(
    dynamics: _Dynamics, tokens: list[_Token], grad_readouts: list[tuple[Tensor, ...]], entry: State, needs_maps: bool
) -> tuple[list[_Step], _TileGradMap | None]:
    """Filter inside all tiles again and return all steps, and the maps of gradients if `needs_maps`."""
    (mean, var), trace = entry, []
    factor = torch.ones_like(mean)
    coupling, grad_mean, grad_var = (torch.zeros_like(mean) for _ in range(3))
    for i, token in enumerate(tokens):
        current = dynamics.at(token)
        mean, var, ratio, innovation = _update(current, *_evidence(token), mean, var)
        shrinkage = ratio.reciprocal_()
        trace.append(_Step(mean, var, shrinkage))
        if needs_maps:
            factor = (current.decay * factor).mul_(shrinkage)
            coupling.addcmul_(factor, innovation)
            grad = (token.q * grad_readouts[0][i]).mul_(factor)
            grad_mean.add_(grad)
            grad_var.addcmul_(grad, coupling)
            if len(grad_readouts) > 1:
                grad_var.addcmul_((token.q * token.q * grad_readouts[1][i]).mul_(factor), factor)
    return trace, _TileGradMap(factor, coupling, grad_mean, grad_var) if needs_maps else None


def _backward_tiles(
    dynamics: _Dynamics,
    tokens: list[_Token],
    grad_readouts: list[tuple[Tensor, ...]],
    entry: State,
    trace: list[_Step],
    grad_exits: State,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], State]:
    """Compute gradients inside all tiles, given those with respect to the beliefs after them.

    Returns:
        Gradients of q, k, value and precision, `[chains, P, H, 1 or G / H, L, K or V]`; of log-decay and process noise,
        `[H, G / H, K, V]`; and of the beliefs before the tiles.
    """
    grad_mean, grad_var = grad_exits
    grad_log_decay, grad_noise = torch.zeros_like(entry[0]), torch.zeros_like(entry[0])
    grads: list[tuple[Tensor, ...]] = []
    for i, token, step in reversed(list(zip(range(len(tokens)), tokens, trace, strict=True))):
        decay, decay_squared, _ = dynamics.at(token)
        previous_mean, previous_var = trace[i - 1][:2] if i else entry
        grad_q = _sum_over_values(step.mean, grad_readouts[0][i])
        grad_mean = torch.addcmul(grad_mean, token.q, grad_readouts[0][i])
        if len(grad_readouts) > 1:
            square_sum = _sum_over_values(step.var, grad_readouts[1][i])
            grad_q = torch.addcmul(grad_q, token.q.squeeze(-1), square_sum, value=2)
            grad_var = torch.addcmul(grad_var, token.q * token.q, grad_readouts[1][i])
        weighted = grad_mean * step.var
        grad_mean.mul_(step.shrinkage)
        # (value - k mean) times the gradient of the mean, from the predicted mean: no rounding of a small difference
        error = torch.addcmul(token.value, token.k, decay * previous_mean, value=-1).mul_(grad_mean)
        spread = grad_var * step.var
        slope = torch.addcmul(error, token.k, spread, value=-1).mul_(step.var)
        spread.mul_(step.var).addcmul_(weighted, step.mean)
        grad_value = _sum_over_keys(token.k, weighted) * token.precision.squeeze(-2)
        grad_precision = _sum_over_keys(token.k, slope)
        grad_k = _sum_over_values(slope.addcmul_(token.k, spread, value=-1), token.precision)
        grads.append((grad_q.sum(3, keepdim=True), grad_k.sum(3, keepdim=True), grad_value, grad_precision))

        grad_var = (grad_var * step.shrinkage).addcmul_(error, token.k * token.precision).mul_(step.shrinkage)
        grad_noise.add_(_mask(grad_var, token))
        grad_mean, grad_var = grad_mean.mul_(decay), grad_var.mul_(decay_squared)
        grad_log_decay.addcmul_(_mask(grad_mean, token), previous_mean)
        grad_log_decay.addcmul_(_mask(grad_var, token), previous_var, value=2)
    signals = tuple(torch.stack(x[::-1], 4) for x in zip(*grads, strict=True))
    return signals, (grad_log_decay.sum((0, 1)), grad_noise.sum((0, 1))), (grad_mean, grad_var)


def _mask(x: Tensor, token: _Token) -> Tensor:
    """Return x, with zeros in tiles that have no token at this position."""
    return x if token.valid is None else x * token.valid


def _sum_over_keys(row: Tensor, cells: Tensor) -> Tensor:
    """Compute `sum_n row_n cells_n`: `[..., 1, K, 1]` and `[..., G / H, K, V]` to `[..., G / H, V]`."""
    return torch.matmul(row.mT, cells).squeeze(-2)


def _sum_over_values(cells: Tensor, row: Tensor) -> Tensor:
    """Compute `sum_d cells_d row_d`: `[..., K, V]` and `[..., 1, V]` to `[..., K]`."""
    return torch.matmul(cells, row.mT).squeeze(-1)


def _one(like: Tensor) -> Tensor:
    return like.new_ones(())
