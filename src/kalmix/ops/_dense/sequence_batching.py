"""Batches of sequences whose tiles are filtered together, longest sequence first.

Packed, padded and whole sequences differ only in where the tokens of a tile are. With the longest sequence first, the
sequences that have not ended are always the first ones, so no step is spent on the others. Short sequences have batches
of their own, with smaller tiles. On a GPU, lengths of segments are not read; the number of sequences at each step is
bounded instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.ops._shared import batching
from kalmix.ops._shared.chunking import max_packed_chunks
from kalmix.ops._shared.packing import group_by_length
from kalmix.segments import Segments

TILE = 16  # tokens that share a factorisation; half as many for keys narrower than `FULL_TILE_WIDTH`
# If the keys of a tile span few directions, the innovation covariance has condition number L p / r^2, for variances p
# of the prior and r^2 of the noise. For L <= 2 K / 3, float32 factors it as accurately as it stores the belief.
FULL_TILE_WIDTH = 3 * TILE // 2
MIN_FLOAT32_WIDTH = TILE  # narrower keys are filtered in float64, which costs little
MAX_GROUP_STEPS = 8  # tiles of a sequence that are prepared together; for wide keys, one belief per group is stored
MAX_GROUP_NUMEL = 1 << 24  # numbers in the largest array of a group


class TokenIndex:
    """Positions of the tokens of R / G tiles, shared by all heads.

    Attributes:
        tokens: `[R / G, L]`, position in the flattened batch; B T for a missing token.
        valid: `[R / G, L]`, whether there is a token; `None` if all are valid.
    """

    def __init__(self, tokens: Tensor, valid: Tensor | None) -> None:
        self.tokens, self.valid = tokens, valid
        self._row_index: dict[tuple[int, int], Tensor] = {}

    def row_index(self, heads: int, repeats: int = 1) -> Tensor:
        """Return the rows of these tokens in `[B * T * heads, *]`; missing tokens have an index past the end."""
        if (heads, repeats) not in self._row_index:
            head = torch.arange(heads, device=self.tokens.device).repeat_interleave(repeats)
            self._row_index[heads, repeats] = (self.tokens[:, None] * heads + head[:, None]).flatten()
        return self._row_index[heads, repeats]


class SequenceBatch:
    """Tiles of N sequences in `[B, T]` tokens, for beliefs `[N, G, K, V]`.

    Step j processes the j-th tile of the first `active_counts[j]` sequences. A tile, and the belief before it, belong
    to one head: R tiles are those of R / G pairs of sequence and step.
    """

    @staticmethod
    def create(v: Tensor, mean: Tensor, rows: Tensor | None) -> list[SequenceBatch]:
        """Return the batches of a call: one for each size of tiles if lengths may be read, else one."""
        size, batches, first_checkpoint = _tile_size(v, mean), [], 0
        if rows is None or not batching.reads_lengths(v):
            return [SequenceBatch(v, mean, rows, size)]
        for members, own_size in group_by_length(rows[:, 2] - rows[:, 1], size):
            batch = SequenceBatch(v, mean[: len(members)], rows[members], own_size, members, first_checkpoint)
            first_checkpoint += batch.checkpoints
            batches.append(batch)
        return batches or [SequenceBatch(v, mean, rows, size)]

    def __init__(
        self,
        v: Tensor,
        mean: Tensor,
        rows: Tensor | None,
        tile_size: int,
        members: Tensor | None = None,
        first_checkpoint: int = 0,
    ) -> None:
        """Build a batch.

        Args:
            v: values `[B, T, G, V]`.
            mean: tensor of the shape of the means of these sequences.
            rows: rows of `Segments` of these sequences, or `None`.
            tile_size: tokens per tile.
            members: int64 `[n]`, these sequences; `None` for all.
            first_checkpoint: number of beliefs that other batches store before those of this batch.
        """
        self.token_shape, self.heads, self.dtype = v.shape[:2], v.shape[2], working_dtype(mean)
        self.tile_size, self.steps_per_group, self.checkpoint_interval = (
            tile_size,
            _steps_per_group(mean),
            _checkpoint_interval(mean),
        )
        self.covers_all_tokens = rows is None
        spans = Segments.whole(v.shape[0], v.shape[1], v.device).rows if rows is None else rows
        row, start, stop = spans.long().unbind(1)
        tiles = (stop - start + self.tile_size - 1) // self.tile_size
        order = tiles.argsort(descending=True, stable=True)
        self.order = order if members is None else members[order]
        self.tiles = tiles[order]
        checkpoints = (self.tiles + self.checkpoint_interval - 1) // self.checkpoint_interval
        self.first_checkpoint = first_checkpoint + checkpoints.cumsum(0) - checkpoints
        first = row * self.token_shape[1]
        self.first, self.end = (first + start)[order], (first + stop)[order]
        self.active_counts = [
            _active_sequences(j, v, mean, rows) for j in range(-(-self.token_shape[1] // self.tile_size))
        ]
        self.checkpoints = 0
        if rows is not None and batching.reads_lengths(v):
            self.active_counts = (len(tiles) - torch.bincount(tiles).cumsum(0)[:-1]).tolist()
            self.checkpoints = int(checkpoints.sum())

    @staticmethod
    def num_checkpoints(v: Tensor, mean: Tensor, rows: Tensor | None) -> int:
        """Return how many beliefs the buffer for the backward pass holds; no decision depends on the length."""
        span = _max_tile_size(mean) * _checkpoint_interval(mean)  # tokens between stored beliefs
        if rows is None:
            return mean.shape[1] * v.shape[0] * -(-v.shape[1] // span)
        return mean.shape[1] * (max_packed_chunks(v.shape[0], v.shape[1], span, rows.shape[0]) + 1)

    def checkpoint_index(self, steps: range, count: int) -> Tensor:
        """Return the positions, in a buffer of `count` beliefs, of the beliefs that are stored in some steps.

        Sequences follow one another. Those that have ended, whose number is unknown on a GPU, share the last position.
        """
        positions = [
            torch.where(j < self.tiles[:active], self.first_checkpoint[:active] + j // self.checkpoint_interval, -1)
            for j, active in list(zip(steps, self.active_counts[steps.start :], strict=False))[
                :: self.checkpoint_interval
            ]
        ]
        position = torch.cat(positions)[:, None] * self.heads + torch.arange(self.heads, device=self.order.device)
        return torch.where(position < 0, count + position, position).flatten()

    def step_groups(self) -> list[range]:
        """Return all steps, in groups that are prepared together."""
        count = len(self.active_counts)
        return [range(j, min(j + self.steps_per_group, count)) for j in range(0, count, self.steps_per_group)]

    def sort(self, states: Tensor) -> Tensor:
        """Convert states `[N, G, ...]` of all sequences to `[n * G, ...]`, in the order of the batch."""
        return states.index_select(0, self.order).flatten(0, 1).to(self.dtype)

    def unsort(self, states: Tensor, all_states: Tensor) -> None:
        """Store the states of this batch in the states `[N, G, ...]` of all sequences, in the original order."""
        all_states.index_copy_(0, self.order, states.unflatten(0, (-1, self.heads)).to(all_states.dtype))

    def token_index(self, steps: range) -> TokenIndex:
        """Return the positions of the tokens of the tiles of some steps."""
        offset = torch.arange(self.tile_size, device=self.first.device)
        token = torch.cat([self.first[: self.active_counts[j], None] + j * self.tile_size + offset for j in steps])
        end = torch.cat([self.end[: self.active_counts[j], None] for j in steps])
        valid = token < end
        all_valid = valid.device.type == "cpu" and bool(valid.all())  # reading values does not synchronise
        return TokenIndex(torch.where(valid, token, self.token_shape.numel()), None if all_valid else valid)

    def gather_tiles(self, index: TokenIndex, x: Tensor, fill: float = 0.0) -> Tensor:
        """Gather signals `[B, T, H or G, *]` as tiles `[R, L, *]`; missing tokens get `fill`."""
        row_index, rows = index.row_index(x.shape[2], self.heads // x.shape[2]), x.flatten(0, 2)
        row_index = row_index if index.valid is None else row_index.clamp(max=len(rows) - 1)
        x = rows.index_select(0, row_index).to(self.dtype).unflatten(0, (-1, self.tile_size))
        if index.valid is None:
            return x
        valid = index.valid.repeat_interleave(self.heads, 0)
        return torch.where(valid.view(*valid.shape, *(1,) * (x.ndim - 2)), x, fill)

    def empty_output(self, like: Tensor) -> Tensor:
        """Return a buffer for `[B, T, *]`, 0 outside sequences, with one more row for missing tokens."""
        new = like.new_empty if self.covers_all_tokens else like.new_zeros
        return new(self.token_shape.numel() + 1, *like.shape[2:], dtype=self.dtype)

    def scatter_tiles(self, index: TokenIndex, output: Tensor, x: Tensor) -> None:
        """Store tiles `[R, L, *]` in a buffer; value heads that share a key head are summed."""
        group_size = self.heads // output.shape[1]
        x = x if group_size == 1 else x.unflatten(0, (-1, group_size)).sum(1)
        output.flatten(0, 1).index_copy_(0, index.row_index(output.shape[1]), x.flatten(0, 1))

    def to_output(self, output: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the contents of a buffer, `[B, T, *]`."""
        return output[:-1].unflatten(0, self.token_shape).to(dtype)


def working_dtype(mean: Tensor) -> torch.dtype:
    """Return the dtype of beliefs between tiles."""
    return torch.float64 if mean.shape[2] < MIN_FLOAT32_WIDTH else mean.dtype


def _max_tile_size(mean: Tensor) -> int:
    return TILE if mean.shape[2] >= FULL_TILE_WIDTH else TILE // 2


def _tile_size(v: Tensor, mean: Tensor) -> int:
    """Return the number of tokens per tile, a power of two."""
    largest = _max_tile_size(mean)
    return largest if v.shape[1] >= largest else 1 << (int(v.shape[1]) - 1).bit_length()


def _steps_per_group(mean: Tensor) -> int:
    """Return the number of steps that are prepared together."""
    sequences, heads, width = mean.shape[:3]
    steps = torch.sym_min(MAX_GROUP_STEPS, MAX_GROUP_NUMEL // (sequences * heads * width * width))
    return torch.sym_max(1, steps)  # pyright: ignore[reportReturnType]


def _checkpoint_interval(mean: Tensor) -> int:
    """Return the number of steps between stored beliefs; 1 if a belief is no larger than its tokens."""
    return 1 if mean.shape[2] <= TILE else _steps_per_group(mean)


def _active_sequences(step: int, v: Tensor, mean: Tensor, rows: Tensor | None) -> int:
    """Return an upper bound of the number of sequences that have a tile at `step`."""
    sequences = mean.shape[0]
    if rows is None:
        return sequences
    tiles = v.shape[0] * v.shape[1] // _tile_size(v, mean) + sequences
    return min(sequences, tiles // (step + 1))
