"""`dense` in tiles of tokens, exact and parallel inside a tile: torch only.

Keys narrower than 16 are filtered in float64. Only beliefs step from tile to tile; all else is done for several tiles
of a sequence at once. The steps of a long sequence would be a long graph: they are a custom op that loops inside.
Training keeps the beliefs before every 8 tiles, or before each where they are no larger than its tokens (`lanes`), and
computes the rest again: its memory is O(T (K + V) + T K (K + V) / 128).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.beliefs import DenseBelief
from kalmix.ops._dense.sequence_batching import Lanes, working_dtype
from kalmix.ops._dense.signals import DenseSignals
from kalmix.ops._dense.tile_statistics import Tokens, follow, look, look_back
from kalmix.ops._dense.tile_update import (
    Crossing,
    State,
    Tile,
    crossing,
    gains,
    gains_back,
    leave,
    meet,
    pull_back,
    symmetric,
    turned,
    variance_of,
)
from kalmix.ops._shared.custom_op import needs_grad, register_filter_op
from kalmix.ops._shared.isolation import isolate
from kalmix.segments import Segments
from kalmix.types import Filtered

ABSENT = (0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)  # signals of a token that says nothing


def dense(signals: DenseSignals, belief: DenseBelief, segments: Segments | None, variance: bool) -> Filtered:
    """Proposition 1 of Memory by Design, tile by tile, with a backward of its own. See `kalmix.ops.dense`."""
    rows = None if segments is None else segments.rows

    def filtered(*tokens: Tensor | None) -> Filtered:
        tensors = (*tokens, *belief)
        mean, var, *after = _filter(*tensors, rows, variance, needs_grad(*tensors))
        return Filtered(mean, var if variance else None, DenseBelief(*after[:2]))

    return isolate(filtered, signals, belief, segments, ABSENT)


class _Block:
    """A few steps of all lanes: R tiles, those of a step side by side, those of its heads together."""

    def __init__(self, lanes: Lanes, steps: range, signals: DenseSignals) -> None:
        self.places, self.counts = lanes.places(steps), [lanes.counts[j] * lanes.heads for j in steps]
        self.kept = sum(self.counts[:: lanes.every])
        pairs = zip(signals, ABSENT, strict=True)
        cut = (None if x is None else lanes.cut(self.places, x, absent) for x, absent in pairs)
        self.tokens = Tokens(*cut)  # type: ignore[arg-type]
        self.path = follow(self.tokens)
        self.outlook = look(self.tokens, self.path)

    def advance(self, state: State) -> tuple[Tile, State]:
        """All tiles, and the beliefs of all lanes after them."""
        tiles = []
        for outlook, v, count in zip(
            self._each(self.outlook), self.tokens.v.split(self.counts), self.counts, strict=True
        ):
            tiles.append(meet(outlook, v, _first(count, state)))
            state = _joined(leave(outlook, tiles[-1]), state)
        return Tile(*(torch.cat(x) for x in zip(*tiles, strict=True))), state

    def again(self, kept: State) -> Tile:
        """All tiles, from beliefs before all of them, or before the first of every lane."""
        whole = self.kept == sum(self.counts)
        return meet(self.outlook, self.tokens.v, kept) if whole else self.advance(kept)[0]

    def retreat(self, crossings: Crossing, state: State) -> tuple[State, State]:
        """The adjoints of the beliefs after every tile, before they turn, and of all lanes' before the first."""
        turn = self.outlook.turn
        turns = [None] * len(self.counts) if turn is None else (-turn).split(self.counts)
        passed = []
        for angle, cross, count in reversed(list(zip(turns, self._each(crossings), self.counts, strict=True))):
            passed.append(turned(_first(count, state), angle))
            state = _joined(cross(passed[-1]), state)
        to_mean, to_covariance = (torch.cat(x[::-1]) for x in zip(*passed, strict=True))
        return (to_mean, to_covariance), state

    def _each(self, tiles: Any) -> list[Any]:
        """Of R tiles, those of each step."""
        parts = ([None] * len(self.counts) if x is None else x.split(self.counts) for x in tiles)
        return [type(tiles)(*step) for step in zip(*parts, strict=True)]


def _first(count: int, state: State) -> State:
    return state[0][:count], state[1][:count]


def _joined(first: State, state: State) -> State:
    """The first lanes anew, the others as they are."""
    count = len(first[0])
    return first if count == len(state[0]) else (_spliced(first[0], state[0]), _spliced(first[1], state[1]))


def _spliced(first: Tensor, lanes: Tensor) -> Tensor:
    return torch.cat([first, lanes[len(first) :]])


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    angle: Tensor | None,
    mean: Tensor,
    covariance: Tensor,
    rows: Tensor | None,
    variance: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    signals = DenseSignals(q, k, v, obs_noise, process_noise, log_decay, angle)
    lanes = Lanes(v, mean, rows)
    state = lanes.sort(mean), lanes.sort(covariance)
    read_mean, read_variance = lanes.blank(v), lanes.blank(v[..., : int(variance)])
    count = Lanes.kept(v, mean, rows) if keep else 0
    kept, filled = (state[0].new_zeros(count, *mean.shape[2:]), state[1].new_zeros(count, *covariance.shape[2:])), 0
    with torch.autocast(v.device.type, enabled=False):
        for steps in lanes.blocks():
            block = _Block(lanes, steps, signals)
            tile, state = block.advance(state)
            if keep:
                for onto, x in zip(kept, _first(block.kept, (tile.mean, tile.covariance)), strict=True):
                    onto[filled : filled + len(x)] = x
                filled += block.kept
            along = gains(block.outlook, tile)
            lanes.paste(block.places, read_mean, block.outlook.queries @ tile.mean + along @ tile.surprise)
            if variance:
                lanes.paste(block.places, read_variance, variance_of(block.outlook, tile, along))
    reads = lanes.pasted(read_mean, v.dtype), lanes.pasted(read_variance, mean.dtype)
    return *reads, lanes.unsort(state[0], mean.dtype), lanes.unsort(state[1], mean.dtype), *kept


def _forward_fake(q, k, v, obs_noise, process_noise, log_decay, angle, mean, covariance, rows, variance, keep):
    count = Lanes.kept(v, mean, rows) if keep else 0
    shapes = (*v.shape[:3], int(variance)), mean.shape, covariance.shape
    reads = torch.empty_like(v, memory_format=torch.contiguous_format), *(mean.new_empty(shape) for shape in shapes)
    kept = ((count, *x.shape[2:]) for x in (mean, covariance))
    return *reads, *(mean.new_empty(shape, dtype=working_dtype(mean)) for shape in kept)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    angle: Tensor | None,
    means: Tensor,
    covariances: Tensor,
    rows: Tensor | None,
    grad_mean: Tensor,
    grad_variance: Tensor,
    grad_last_mean: Tensor,
    grad_last_covariance: Tensor,
) -> list[Tensor]:
    signals = DenseSignals(q, k, v, obs_noise, process_noise, log_decay, angle)
    lanes = Lanes(v, grad_last_mean, rows)
    state = lanes.sort(grad_last_mean), symmetric(lanes.sort(grad_last_covariance))
    if not grad_variance.numel():  # no variance was read
        grad_variance = grad_mean.new_zeros(()).expand(*grad_mean.shape[:3], 1)
    given = [x for x in signals if x is not None]
    grads = [lanes.blank(x) for x in given]
    blocks = lanes.blocks()
    end = sum(lanes.counts[:: lanes.every]) * lanes.heads
    with torch.autocast(v.device.type, enabled=False):
        for steps in reversed(blocks):
            block = _Block(lanes, steps, signals)
            begin = end - block.kept
            tile = block.again((means[begin:end], covariances[begin:end]))
            end, along = begin, gains(block.outlook, tile)
            to_mean, to_variance = lanes.cut(block.places, grad_mean), lanes.cut(block.places, grad_variance)
            arguments = block.outlook, tile, along, gains_back(tile, to_mean), to_mean, to_variance
            after, state = block.retreat(crossing(*arguments), state)
            back = look_back(block.tokens, block.path, *pull_back(*arguments, after))
            for onto, x in zip(grads, (x for x in back if x is not None), strict=True):
                lanes.paste(block.places, onto, x)
    pasted = iter([lanes.pasted(onto, x.dtype) for onto, x in zip(grads, given, strict=True)])
    direct = [v.new_empty(0) if x is None else next(pasted) for x in signals]
    return [*direct, *(lanes.unsort(x, grad_last_mean.dtype) for x in state)]


_filter = register_filter_op(
    "kalmix::dense_chunked", _forward, _forward_fake, _backward, outputs=4, kernel="kernel 'chunked' of `dense`"
)
