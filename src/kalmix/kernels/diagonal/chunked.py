"""`diagonal` in tiles: torch only, parallel over the tiles of a sequence, training memory O(T (K + V) + T K V / TILE).

What a tile of tokens does to a cell's belief is a map of five bounded numbers (`_Advance`), so three passes filter a
sequence: the maps of all tiles at once, position by position; the belief that enters each tile, tile by tile; then
the filter itself, in all tiles at once. Training keeps the entering beliefs and recomputes the rest; adjoints go the
same way backwards (`_Retreat`). Where a batch is so wide that one tile fills the cache, tiles follow one another and
only the last pass remains.

Long sequences are worked off in blocks of tiles that fit the cache. A compiler sees a single block and maps composed
in groups, so that its graph does not grow with the sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from kalmix.beliefs import DiagonalBelief
from kalmix.segments import Segments
from kalmix.types import Filtered

TILE = 16  # tokens of a tile
CELLS = 1 << 18  # cells stepped at once on a CPU: a few such arrays fit the cache
CELLS_ELSEWHERE = 1 << 22  # elsewhere: enough to hide that every step is a launch
FAN = 16  # tiles of a group, where the graph must not grow with their number

State = tuple[Tensor, Tensor]  # mean and variance of cells, or the adjoints of these


def diagonal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: Tensor,
    log_decay: Tensor,
    process_noise: Tensor,
    belief: DiagonalBelief,
    segments: Segments | None,
    variance: bool,
) -> Filtered:
    """Equations 16 to 23 of Kalman Linear Attention in the moment form, with a backward of its own.

    Takes `log_decay` and `process_noise` as `[G, K, V]`. See `kalmix.ops.diagonal`.
    """
    rows = None if segments is None else segments.rows
    mean, var, *after = _Diagonal.apply(q, k, v, precision, log_decay, process_noise, *belief, rows, variance)
    return Filtered(mean, var if variance else None, DiagonalBelief(*after))


class _Diagonal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
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
    ) -> tuple[Tensor, ...]:
        grid, dynamics = _grid(v, mean, rows), _Dynamics.of(log_decay, process_noise, mean.dtype)
        prior = after = (mean, var)
        carry, entries, reads = grid.start(prior), [], []
        for block in grid.blocks:
            tokens = grid.tokens(block, q, k, v, precision, mean.dtype)
            maps = _advances(dynamics, tokens) if grid.linked(block) else None
            entry = grid.arrivals(block, carry, prior, maps)
            read, leaving = _filter(dynamics, tokens, entry, variance)
            carry, after = grid.edge(leaving, -1), grid.settle(block, after, leaving)
            entries.append(entry)
            reads.append(read)
        kept = (torch.cat(parts) for parts in zip(*entries, strict=True))
        ctx.save_for_backward(q, k, v, precision, log_decay, process_noise, mean, rows, *kept)
        read_mean, *read_var = (grid.paste(parts) for parts in zip(*reads, strict=True))
        if read_mean.dtype != v.dtype:  # a cast that changes nothing returns its input, whose gradient torch 2.11 loses
            read_mean = read_mean.to(v.dtype)
        return read_mean, *(read_var or [v.new_empty(0)]), *after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *adjoints: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, precision, log_decay, process_noise, mean, rows, *entries = ctx.saved_tensors
        grid, dynamics = _grid(v, mean, rows), _Dynamics.of(log_decay, process_noise, mean.dtype)
        final = before = (adjoints[2], adjoints[3])
        carry, pieces, shared = grid.start(final), [], []
        for block in reversed(grid.blocks):
            tokens = grid.tokens(block, q, k, v, precision, mean.dtype)
            reads = [grid.cut(block, x, mean.dtype)[..., None, :].unbind(0) for x in adjoints[:2] if x.numel()]
            entry = grid.part(block, entries)
            trace, maps = _replay(dynamics, tokens, reads, entry, grid.linked(block))
            leaving = grid.arrivals(block, carry, final, maps, backwards=True)
            parts, totals, entering = _adjoint(dynamics, tokens, reads, entry, trace, leaving)
            carry, before = grid.edge(entering, 0), grid.settle(block, before, entering, backwards=True)
            pieces.append(parts)
            shared.append(totals)
        dq, dk, dv, dprecision = (grid.paste(parts[::-1]) for parts in zip(*pieces, strict=True))
        dq, dk = (x.unflatten(2, (q.shape[2], -1)).sum(3) for x in (dq, dk))
        dlog_decay, dnoise = (torch.stack(parts).sum(0) for parts in zip(*shared, strict=True))
        grads = (dq, dk, dv, dprecision, dlog_decay, dnoise)
        inputs = (q, k, v, precision, log_decay, process_noise)
        return *(x.to(y.dtype) for x, y in zip(grads, inputs, strict=True)), *before, None, None


class _Dynamics(NamedTuple):
    """One token's prediction, `[G, K, V]`, or `[R, G, K, V]` where it differs between tiles."""

    decay: Tensor
    square: Tensor
    noise: Tensor

    @classmethod
    def of(cls, log_decay: Tensor, process_noise: Tensor, dtype: torch.dtype) -> _Dynamics:
        decay = log_decay.to(dtype).exp()
        return cls(decay, decay * decay, process_noise.to(dtype))

    def at(self, token: _Token) -> _Dynamics:
        """Where a tile has no token any more its belief stands still."""
        if token.here is None:
            return self
        return _Dynamics(*(torch.where(token.here, x, still) for x, still in zip(self, (1.0, 1.0, 0.0), strict=True)))


class _Token(NamedTuple):
    """The tokens at one position of R tiles; all zero where a tile is shorter."""

    q: Tensor  # [R, G, K, 1]
    k: Tensor  # [R, G, K, 1]
    value: Tensor  # [R, G, 1, V]
    precision: Tensor  # [R, G, 1, V]
    here: Tensor | None  # bool [R, 1, 1, 1]; absent if no tile is shorter


class _Advance(NamedTuple):
    """What some tokens do to a belief: with d = 1 / (1 + s J), s' = A^2 s d + C and m' = A (m + s eta) d + b.

    J and eta are what the tokens say of the belief before them, C and b the belief after them had the one before been
    certain and zero, A the path between. All stay bounded, whatever the decay, noise and precision.
    """

    path: Tensor
    mean: Tensor
    var: Tensor
    weight: Tensor
    evidence: Tensor

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
            torch.addcmul(after.mean, onward, torch.addcmul(self.mean, self.var, after.evidence)),
            torch.addcmul(after.var, onward * after.path, self.var),
            torch.addcmul(self.weight, self.path * path, after.weight),
            torch.addcmul(self.evidence, path, torch.addcmul(after.evidence, after.weight, self.mean, value=-1)),
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


def _advances(dynamics: _Dynamics, tokens: list[_Token]) -> _Advance:
    """The maps of R tiles, all `[R, G, K, V]`."""
    mean, var, weight, evidence = (torch.zeros_like(tokens[0].k * tokens[0].value) for _ in range(4))
    path = torch.ones_like(mean)
    for token in tokens:
        decay, square, noise = dynamics.at(token)
        scale = (token.k * token.k) * token.precision
        var = torch.addcmul(noise, square, var)
        grown = torch.addcmul(_one(var), scale, var)
        var.div_(grown)
        mean = decay * mean
        surprise = (token.k * (token.precision * token.value)).addcmul_(scale, mean, value=-1)
        mean.addcmul_(var, surprise)
        before = decay * path
        path = before / grown
        weight.addcmul_(before.mul_(path), scale)
        evidence.addcmul_(path, surprise)
    return _Advance(path, mean, var, weight, evidence)


def _filter(
    dynamics: _Dynamics, tokens: list[_Token], entry: State, variance: bool
) -> tuple[tuple[Tensor, ...], State]:
    """The read-outs `[L, R, G, V]` and the beliefs after R tiles."""
    (mean, var), means, variances = entry, [], []
    for token in tokens:
        decay, square, noise = dynamics.at(token)
        scale = (token.k * token.k) * token.precision
        var = torch.addcmul(noise, square, var)
        grown = torch.addcmul(_one(var), scale, var)
        var.div_(grown)
        mean = decay * mean
        surprise = (token.k * (token.precision * token.value)).addcmul_(scale, mean, value=-1)
        mean.addcmul_(var, surprise)
        means.append(_over_slots(token.q, mean))
        if variance:
            variances.append(_over_slots(token.q * token.q, var))
    return (torch.stack(means), torch.stack(variances)) if variance else (torch.stack(means),), (mean, var)


class _Step(NamedTuple):
    """What the adjoint of one position needs, `[R, G, K, V]`."""

    mean: Tensor
    var: Tensor
    shrink: Tensor  # 1 / (1 + k^2 precision predicted variance)
    error: Tensor  # value - k mean, after the update
    pull: Tensor  # k precision error


def _replay(
    dynamics: _Dynamics, tokens: list[_Token], reads: list[tuple[Tensor, ...]], entry: State, link: bool
) -> tuple[list[_Step], _Retreat | None]:
    """The filter again, keeping what the adjoint needs; and how adjoints cross the tiles, if they are to be linked."""
    (mean, var), trace = entry, []
    path = torch.ones_like(mean)
    tilt, to_mean, to_var = (torch.zeros_like(mean) for _ in range(3))
    for i, token in enumerate(tokens):
        decay, square, noise = dynamics.at(token)
        write = token.k * token.precision
        var = torch.addcmul(noise, square, var)
        mean = decay * mean
        error = torch.addcmul(token.value, token.k, mean, value=-1)
        gain = write * var
        shrink = torch.addcmul(_ones(token.value), token.k, gain).reciprocal_()
        mean.addcmul_(gain.mul_(shrink), error)
        var.mul_(shrink)
        pull = write.mul_(error.mul_(shrink))
        trace.append(_Step(mean, var, shrink, error, pull))
        if link:
            before = decay * path
            path = before * shrink
            tilt.addcmul_(before, pull)
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
    """From the adjoint after R tiles: those of q, k, value and precision `[L, R, G, K or V]`; of log-decay and noise
    `[G, K, V]`; and the one before the tiles."""
    to_mean, to_var = leaving
    to_decay, to_noise = torch.zeros_like(entry[0]), torch.zeros_like(entry[0])
    parts: list[tuple[Tensor, ...]] = []
    for i, token, step in reversed(list(zip(range(len(tokens)), tokens, trace, strict=True))):
        decay, square, _ = dynamics.at(token)
        before = trace[i - 1] if i else entry
        to_q = (reads[0][i] * step.mean).sum(-1)
        to_mean = torch.addcmul(to_mean, token.q, reads[0][i])
        if len(reads) > 1:
            to_q = torch.addcmul(to_q, token.q.squeeze(-1), (reads[1][i] * step.var).sum(-1), value=2)
            to_var = torch.addcmul(to_var, token.q * token.q, reads[1][i])
        gain = to_mean * step.var  # S
        spread = to_var * step.var  # Y
        slope = (to_mean * step.error).addcmul_(token.k, spread, value=-1).mul_(step.var)  # D
        spread.mul_(step.var).addcmul_(gain, step.mean)  # U
        to_value = _over_slots(token.k, gain) * token.precision.squeeze(-2)
        to_precision = _over_slots(token.k, slope)
        to_k = slope.addcmul_(token.k, spread, value=-1).mul_(token.precision).sum(-1)
        parts.append((to_q, to_k, to_value, to_precision))

        to_var = (to_var * step.shrink).addcmul_(to_mean, step.pull).mul_(step.shrink)
        to_mean = (to_mean * step.shrink).mul_(decay)
        kept = to_var if token.here is None else to_var * token.here
        to_noise.add_(kept)
        to_decay.addcmul_(kept * square, before[1], value=2)
        to_decay.addcmul_(to_mean if token.here is None else to_mean * token.here, before[0])
        to_var = to_var.mul_(square)
    signals = tuple(torch.stack(part[::-1]) for part in zip(*parts, strict=True))
    return signals, (to_decay.sum(0), to_noise.sum(0)), (to_mean, to_var)


def _over_slots(row: Tensor, cells: Tensor) -> Tensor:
    """`sum_n row_n cells_n`: `[R, G, K, 1]` and `[R, G, K, V]` to `[R, G, V]`."""
    if torch.compiler.is_compiling():
        return (row * cells).sum(-2)  # a product of matrices would not fuse
    return torch.matmul(row.mT, cells).squeeze(-2)


def _one(like: Tensor) -> Tensor:
    return like.new_ones(())


def _ones(like: Tensor) -> Tensor:
    """A row of ones: beside another broadcast operand a single one would not vectorise."""
    return like.new_ones(like.shape[-1])


_Map = TypeVar("_Map", _Advance, _Retreat)


def _scan(maps: _Map, state: State) -> State:
    """The states `[lanes, P, G, K, V]` before each of P maps, applied one after another to one `[lanes, G, K, V]`."""
    if not torch.compiler.is_compiling():
        return _walk(maps, state)
    count = maps.path.shape[1]
    mean, var = _climb(maps, state)
    return mean[:, :count], var[:, :count]


def _climb(maps: _Map, state: State) -> State:
    """As `_walk`, after padding with maps that change nothing, by groups: the graph grows with the logarithm of P.

    Two levels at least, so that it is the same for any P up to the square of a group.
    """
    kind, lanes, groups = type(maps), maps.path.shape[0], -(-maps.path.shape[1] // FAN)
    maps = _filled(maps, groups * FAN)
    columns = [kind(*(x[:, i::FAN] for x in maps)) for i in range(FAN)]  # one map of every group
    whole = columns[0]
    for column in columns[1:]:
        whole = whole.then(column)
    starts = _walk(_filled(whole, FAN), state) if groups <= FAN else _climb(whole, state)
    grouped = kind(*(x.unflatten(1, (groups, FAN)).flatten(0, 1) for x in maps))
    mean, var = _walk(grouped, (starts[0][:, :groups].flatten(0, 1), starts[1][:, :groups].flatten(0, 1)))
    return mean.unflatten(0, (lanes, groups)).flatten(1, 2), var.unflatten(0, (lanes, groups)).flatten(1, 2)


def _filled(maps: _Map, count: int) -> _Map:
    """`count` maps, the added ones changing nothing: a path of 1 and all else 0."""
    after = (0, 0) * 3 + (0, count - maps.path.shape[1])
    return type(maps)(pad(maps.path, after, value=1.0), *(pad(x, after) for x in maps[1:]))


def _walk(maps: _Map, state: State) -> State:
    """As `_scan`, one after another."""
    kind, states = type(maps), [state]
    for column in list(zip(*(x.unbind(1) for x in maps), strict=True))[:-1]:
        states.append(kind(*column)(states[-1]))
    return torch.stack([mean for mean, _ in states], 1), torch.stack([var for _, var in states], 1)


class _Grid:
    """Batch rows as lanes of tiles, blocks of which are worked off one after another; R = lanes x tiles of a block."""

    def __init__(self, v: Tensor, cells: torch.Size, lanes: int, tiles: int) -> None:
        self.batch, self.length, self.device = v.shape[0], v.shape[1], v.device
        self.heads, self.lanes, self.size, self.count = cells[0], lanes, _tile(self.length), tiles
        room = (CELLS if v.device.type == "cpu" else CELLS_ELSEWHERE) // (lanes * cells.numel())
        width = tiles if torch.compiler.is_compiling() else min(tiles, room) if room >= 4 else 1
        self.blocks = [slice(i, min(i + width, tiles)) for i in range(0, tiles, width)]

    def linked(self, block: slice) -> bool:
        """Whether a block has tiles side by side."""
        return block.stop - block.start > 1

    def tokens(
        self, block: slice, q: Tensor, k: Tensor, v: Tensor, precision: Tensor, dtype: torch.dtype
    ) -> list[_Token]:
        """A block's tokens by their position in a tile."""
        q, k, v, precision = (self.cut(block, x, dtype) for x in (q, k, v, precision))
        q, k = (x.repeat_interleave(self.heads // x.shape[2], 2)[..., None] for x in (q, k))
        columns = zip(q, k, v[..., None, :], precision[..., None, :], strict=True)
        return [_Token(*column, here=self.here(block, i)) for i, column in enumerate(columns)]

    def here(self, block: slice, position: int) -> Tensor | None:
        """Which tiles have a token at `position`: `[R, 1, 1, 1]`, or `None` for all."""
        if (block.stop - 1) * self.size + position < self.length:
            return None
        index = torch.arange(block.start, block.stop, device=self.device) * self.size + position
        return (index < self.length).repeat(self.lanes)[:, None, None, None]

    def cut(self, block: slice, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`[B, T, ...]` to `[L, R, ...]`, zero where there is no token."""
        x = x[:, block.start * self.size : block.stop * self.size].to(dtype)
        x = pad(x, (0, 0, 0, 0, 0, (block.stop - block.start) * self.size - x.shape[1]))
        return x.unflatten(1, (-1, self.size)).permute(2, 0, 1, 3, 4).flatten(1, 2).contiguous()

    def paste(self, parts: tuple[Tensor, ...]) -> Tensor:
        """`[L, R, ...]` of every block to `[B, T, ...]`, zero where no sequence is."""
        rows = [x.unflatten(1, (self.lanes, -1)).permute(1, 2, 0, 3, 4).flatten(1, 2) for x in parts]
        return torch.cat(rows, 1)[:, : self.length]

    def start(self, state: State) -> State:
        """What comes to the first block of every lane (backwards, the last)."""
        return state

    def arrivals(self, block: slice, carry: State, fresh: State, maps: _Map | None, backwards: bool = False) -> State:
        """The states that come to a block's tiles, `[R, G, K, V]`, each from the tile before (backwards, after)."""
        if maps is None:
            return carry
        lanes = type(maps)(*(x.unflatten(0, (self.lanes, -1)) for x in maps))
        if backwards:
            lanes = type(maps)(*(x.flip(1) for x in lanes))
        mean, var = (x.flip(1) if backwards else x for x in _scan(lanes, carry))
        return mean.flatten(0, 1), var.flatten(0, 1)

    def edge(self, state: State, tile: int) -> State:
        """Of R tiles, every lane's `tile`."""
        mean, var = state
        return mean.unflatten(0, (self.lanes, -1))[:, tile], var.unflatten(0, (self.lanes, -1))[:, tile]

    def part(self, block: slice, states: list[Tensor]) -> State:
        """One block of the states of all tiles, blocks laid end to end."""
        mean, var = (x[block.start * self.lanes : block.stop * self.lanes] for x in states)
        return mean, var

    def settle(self, block: slice, ends: State, states: State, backwards: bool = False) -> State:
        """The states after (backwards, before) every sequence, once a block is done."""
        return self.edge(states, 0 if backwards else -1)


class _Runs(_Grid):
    """The tiles of all runs as one lane, where runs start from their own prior (backwards, final adjoint)."""

    def __init__(self, v: Tensor, cells: torch.Size, segments: Segments) -> None:
        self.tiles = segments.tiles(v.shape[0], v.shape[1], _tile(v.shape[1]))
        super().__init__(v, cells, 1, self.tiles.token.shape[0])
        index = torch.arange(self.count, device=v.device)
        ends = (self.tiles.last[self.tiles.sequence] == index) & (self.tiles.count > 0)
        self.fresh = self.tiles.first[:, None, None, None], ends[:, None, None, None]
        pieces = (segments.rows[:, 2] - segments.rows[:, 1] + self.size - 1) // self.size
        self.ends = self.tiles.last, torch.where(pieces > 0, self.tiles.last - pieces + 1, -1)

    def here(self, block: slice, position: int) -> Tensor | None:
        return (self.tiles.count[block] > position)[:, None, None, None]

    def index(self, block: slice) -> tuple[Tensor, Tensor]:
        """Where tokens lie in the flattened batch, and which are any: `[L, R]`."""
        position = torch.arange(self.size, device=self.device)[:, None]
        here = position < self.tiles.count[block]
        return torch.where(here, self.tiles.token[block] + position, 0), here

    def cut(self, block: slice, x: Tensor, dtype: torch.dtype) -> Tensor:
        index, here = self.index(block)
        return torch.where(here[..., None, None], x.flatten(0, 1)[index].to(dtype), 0.0)

    def paste(self, parts: tuple[Tensor, ...]) -> Tensor:
        x, total = torch.cat(parts, 1).flatten(0, 1), self.batch * self.length
        index, here = self.index(slice(0, self.count))
        flat = x.new_zeros(total + 1, *x.shape[1:])  # what belongs nowhere goes to the extra row
        flat = flat.index_copy(0, torch.where(here, index, total).flatten(), x)
        return flat[:total].unflatten(0, (self.batch, self.length))

    def start(self, state: State) -> State:
        nothing = torch.zeros_like(state[0][:1])
        return nothing, nothing

    def arrivals(self, block: slice, carry: State, fresh: State, maps: _Map | None, backwards: bool = False) -> State:
        anew, owner = self.fresh[int(backwards)][block], self.tiles.sequence[block]
        fresh = fresh[0][owner], fresh[1][owner]
        if maps is not None:  # a tile that starts anew forgets what came before
            mean, var = maps(fresh)
            mean, var = torch.where(anew, mean, maps.mean), torch.where(anew, var, maps.var)
            maps = type(maps)(*(x.masked_fill(anew, 0.0) for x in maps))._replace(mean=mean, var=var)
        mean, var = super().arrivals(block, carry, fresh, maps, backwards)
        return torch.where(anew, fresh[0], mean), torch.where(anew, fresh[1], var)

    def settle(self, block: slice, ends: State, states: State, backwards: bool = False) -> State:
        tile = self.ends[int(backwards)] - block.start
        inside = ((tile >= 0) & (tile < block.stop - block.start))[:, None, None, None]
        tile = tile.clamp(0, block.stop - block.start - 1)
        return torch.where(inside, states[0][tile], ends[0]), torch.where(inside, states[1][tile], ends[1])


def _grid(v: Tensor, mean: Tensor, rows: Tensor | None) -> _Grid:
    if rows is not None:
        return _Runs(v, mean.shape[1:], Segments(rows))
    return _Grid(v, mean.shape[1:], v.shape[0], -(-v.shape[1] // _tile(v.shape[1])))


def _tile(length: int) -> int:
    return min(TILE, length)
