"""Kernel "chunked" of `dense`, in plain torch: exact, and parallel over the tokens of a tile.

Only beliefs step from tile to tile; everything else is computed for several tiles of a sequence at once. The steps run
inside a custom op, because torch.compile would unroll them. Keys narrower than 16 are filtered in float64.

Training stores the belief before every 8 tiles, or before every tile if it is no larger than its tokens
(`sequence_batching`), and recomputes the rest: O(T (K + V) + T K (K + V) / 128) numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.beliefs import DenseBelief
from kalmix.ops._dense.sequence_batching import SequenceBatch, working_dtype
from kalmix.ops._dense.signals import DenseSignals
from kalmix.ops._dense.tile_statistics import Tokens, tile_statistics, tile_statistics_backward, tile_transitions
from kalmix.ops._dense.tile_update import (
    BackwardMap,
    State,
    TileUpdate,
    backward_map,
    final_state,
    readout_gains,
    readout_gains_backward,
    readout_variance,
    rotate_state,
    symmetrize,
    tile_vjp,
    update_tile,
)
from kalmix.ops._shared.custom_op import needs_grad, register_filter_op
from kalmix.ops._shared.isolation import isolate_non_finite
from kalmix.segments import Segments
from kalmix.types import Filtered, without_autocast

MISSING_TOKEN = (0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)  # signals of a token without effect


def dense(signals: DenseSignals, belief: DenseBelief, segments: Segments | None, variance: bool) -> Filtered:
    """Compute `kalmix.ops.dense` tile by tile, with an explicit backward pass."""
    rows = None if segments is None else segments.rows

    def run(*tokens: Tensor | None) -> Filtered:
        tensors = (*tokens, *belief)
        mean, var, *after = _filter(*tensors, rows, variance, needs_grad(*tensors))
        return Filtered(mean, var if variance else None, DenseBelief(*after[:2]))

    return isolate_non_finite(run, signals, belief, segments, MISSING_TOKEN)


class _StepGroup:
    """R tiles of a few consecutive steps, ordered by step, then sequence, then head."""

    def __init__(self, batch: SequenceBatch, steps: range, signals: DenseSignals) -> None:
        self.index, self.active_counts = batch.token_index(steps), [batch.active_counts[j] * batch.heads for j in steps]
        self.num_checkpoints = sum(self.active_counts[:: batch.checkpoint_interval])
        pairs = zip(signals, MISSING_TOKEN, strict=True)
        cut = (None if x is None else batch.gather_tiles(self.index, x, fill) for x, fill in pairs)
        self.tokens = Tokens(*cut)  # type: ignore[arg-type]
        self.transitions = tile_transitions(self.tokens)
        self.stats = tile_statistics(self.tokens, self.transitions)

    def forward(self, state: State, ended: list[State]) -> tuple[TileUpdate, State]:
        """Update all tiles in sequence; return the updates, and the beliefs after the last step.

        Beliefs of sequences that have no tile at a step are moved to `ended`.
        """
        updates = []
        for stats, v, count in zip(
            self._split_steps(self.stats), self.tokens.v.split(self.active_counts), self.active_counts, strict=True
        ):
            if count < len(state[0]):
                ended.append((state[0][count:], state[1][count:]))
            updates.append(update_tile(stats, v, _first(count, state)))
            state = final_state(stats, updates[-1])
        return TileUpdate(*(torch.cat(x) for x in zip(*updates, strict=True))), state

    def recompute(self, checkpoints: State) -> TileUpdate:
        """Return all updates, given the beliefs before every tile or before the first tile of every sequence."""
        complete = self.num_checkpoints == sum(self.active_counts)
        return update_tile(self.stats, self.tokens.v, checkpoints) if complete else self.forward(checkpoints, [])[0]

    def backward(self, maps: BackwardMap, state: State, final: State) -> tuple[State, State]:
        """Return adjoints of the beliefs after every tile (before rotation) and before the first tiles.

        Args:
            maps: maps of the adjoints.
            state: adjoints of the beliefs before the step after this group, or of no sequence.
            final: adjoints of the final beliefs of all sequences.
        """
        rotation = self.stats.rotation
        rotations = [None] * len(self.active_counts) if rotation is None else (-rotation).split(self.active_counts)
        grads = []
        for angle, step_map, count in reversed(
            list(zip(rotations, self._split_steps(maps), self.active_counts, strict=True))
        ):
            grads.append(rotate_state(_replace_first(state, _first(count, final)), angle))
            state = step_map(grads[-1])
        grad_means, grad_covariances = (torch.cat(x[::-1]) for x in zip(*grads, strict=True))
        return (grad_means, grad_covariances), state

    def _split_steps(self, tiles: Any) -> list[Any]:
        """Split a tuple of tensors of R tiles into one tuple per step."""
        columns = ([None] * len(self.active_counts) if x is None else x.split(self.active_counts) for x in tiles)
        return [type(tiles)(*step) for step in zip(*columns, strict=True)]


def _first(count: int, state: State) -> State:
    """Return the first `count` states."""
    return state[0][:count], state[1][:count]


def _replace_first(first: State, state: State) -> State:
    """Replace the first states."""
    count = len(first[0])
    return first if count == len(state[0]) else (_replace_rows(first[0], state[0]), _replace_rows(first[1], state[1]))


def _replace_rows(first: Tensor, rows: Tensor) -> Tensor:
    """Replace the first rows."""
    return torch.cat([first, rows[len(first) :]]) if len(first) else rows


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
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    signals = DenseSignals(q, k, v, obs_noise, process_noise, log_decay, angle)
    batches = SequenceBatch.create(v, mean, rows)
    readout_means, readout_variances = (batches[0].empty_output(x) for x in (v, v[..., : int(variance)]))
    count = SequenceBatch.num_checkpoints(v, mean, rows) if save else 0
    finals = [x.clone(memory_format=torch.contiguous_format) for x in (mean, covariance)]
    checkpoints = [x.new_zeros(count, *x.shape[2:], dtype=batches[0].dtype) for x in finals]
    with without_autocast(v.device):
        for batch in batches:
            state, ended = (batch.sort(mean), batch.sort(covariance)), []
            for steps in batch.step_groups():
                group = _StepGroup(batch, steps, signals)
                update, state = group.forward(state, ended)
                if save:
                    saved = _first(group.num_checkpoints, (update.mean, update.covariance))
                    for dest, x in zip(checkpoints, saved, strict=True):
                        dest.index_copy_(0, batch.checkpoint_index(steps, count), x)
                gains = readout_gains(group.stats, update)
                batch.scatter_tiles(
                    group.index, readout_means, group.stats.queries @ update.mean + gains @ update.innovation
                )
                if variance:
                    batch.scatter_tiles(group.index, readout_variances, readout_variance(group.stats, update, gains))
            for final, x in zip(finals, zip(*[state, *reversed(ended)], strict=True), strict=True):
                batch.unsort(torch.cat(x) if ended else x[0], final)
    outputs = batches[0].to_output(readout_means, v.dtype), batches[0].to_output(readout_variances, mean.dtype)
    return *outputs, finals[0], finals[1], checkpoints[0].flatten(), checkpoints[1].flatten()


def _forward_fake(q, k, v, obs_noise, process_noise, log_decay, angle, mean, covariance, rows, variance, save):
    count = SequenceBatch.num_checkpoints(v, mean, rows) if save else 0
    shapes = (*v.shape[:3], int(variance)), mean.shape, covariance.shape
    outputs = torch.empty_like(v, memory_format=torch.contiguous_format), *(mean.new_empty(shape) for shape in shapes)
    sizes = (count * x.shape[2] * x.shape[3] for x in (mean, covariance))  # flat, as in `Slicing.empty_stored`
    return *outputs, *(mean.new_empty(size, dtype=working_dtype(mean)) for size in sizes)


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
    grad_final_mean: Tensor,
    grad_final_covariance: Tensor,
) -> list[Tensor]:
    signals = DenseSignals(q, k, v, obs_noise, process_noise, log_decay, angle)
    batches = SequenceBatch.create(v, grad_final_mean, rows)
    grad_prior = [grad_final_mean.clone(memory_format=torch.contiguous_format), symmetrize(grad_final_covariance)]
    if not grad_variance.numel():  # the variance was not requested
        grad_variance = grad_mean.new_zeros(()).expand(*grad_mean.shape[:3], 1)
    inputs = [x for x in signals if x is not None]
    grads = [batches[0].empty_output(x) for x in inputs]
    checkpoints = [
        x.view(-1, *y.shape[2:]) for x, y in ((means, grad_final_mean), (covariances, grad_final_covariance))
    ]
    with without_autocast(v.device):
        for batch in batches:
            final = batch.sort(grad_prior[0]), batch.sort(grad_prior[1])
            state = _first(0, final)
            for steps in reversed(batch.step_groups()):
                group = _StepGroup(batch, steps, signals)
                index = batch.checkpoint_index(steps, len(checkpoints[0]))
                update = group.recompute((checkpoints[0][index], checkpoints[1][index]))
                gains = readout_gains(group.stats, update)
                readout_grads = (batch.gather_tiles(group.index, x) for x in (grad_mean, grad_variance))
                grad_readout, grad_readout_variance = readout_grads
                arguments = (
                    group.stats,
                    update,
                    gains,
                    readout_gains_backward(update, grad_readout),
                    grad_readout,
                    grad_readout_variance,
                )
                grad_after, state = group.backward(backward_map(*arguments), state, final)
                tile_grads = tile_vjp(*arguments, grad_after)
                token_grads = tile_statistics_backward(group.tokens, group.transitions, *tile_grads)
                for output, x in zip(grads, (x for x in token_grads if x is not None), strict=True):
                    batch.scatter_tiles(group.index, output, x)
            for grad, x in zip(grad_prior, _replace_first(state, final), strict=True):
                batch.unsort(x, grad)
    signal_grads = iter([batches[0].to_output(output, x.dtype) for output, x in zip(grads, inputs, strict=True)])
    return [*(v.new_empty(0) if x is None else next(signal_grads) for x in signals), *grad_prior]


_filter = register_filter_op(
    "kalmix::dense_chunked", _forward, _forward_fake, _backward, outputs=4, kernel="kernel 'chunked' of `dense`"
)
