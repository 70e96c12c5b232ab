"""Loop over the tokens of a batch, for every op's `reference` kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix.segments import Segments
from kalmix.validation import can_check_values, check_dtype_and_device, check_shape

Readouts = tuple[Tensor, ...]


def run_steps(
    step: Callable[..., tuple[Readouts, Any]],
    belief: Any,
    tokens: Iterable[tuple[Any, ...]],
    segment_ids: Tensor | None,
) -> tuple[list[Tensor], Any]:
    """Filter a batch token by token, without in-place operations, so that autograd differentiates every step.

    It is the loop of the "reference" kernels; use it to write a filter of your own. A token is one time step of the
    whole batch. `*` stands for any size.

    Args:
        step: function `step(belief, *token)` that returns a tuple of read-outs `[B, *, *]` and the updated belief. Both
            its beliefs have B rows, one per batch row.
        belief: prior, a `NamedTuple` of tensors `[N, *, *, *]`, one row per sequence, such as `kalmix.PointBelief`.
            With `segment_ids` it must have a method `take(index)` that returns the belief of the rows `index`.
        tokens: T tuples in order of time, each with the arguments of `step` at that time: tensors `[B, ...]`, or
            `None`.
        segment_ids: int64 or int32 `[B, T]`, the sequence of each token, from 0 to N - 1, or -1 for tokens outside
            every sequence. All tokens of a sequence must be in one batch row; this is not checked. `None` if N = B and
            batch row b is sequence b.

    Returns:
        A pair. First a list of the read-outs, stacked over time to `[B, T, *, *]`, 0 at tokens outside every sequence;
        it is empty if T = 0. Then the final belief, of N rows; sequences without tokens keep their prior.

    Raises:
        ArgumentError: an argument has a type or shape other than described, `step` returns no tuple of read-outs, or
            `segment_ids` contains N or more. The last is checked on CPUs, and on GPUs inside `kalmix.checks()`.

    Example:
        Sum the tokens of each sequence:

        >>> from kalmix import PointBelief
        >>> from kalmix.ops import run_steps
        >>> def add(belief, token):
        ...     total = belief.mean + token[:, None, None, None]
        ...     return (total[:, 0],), PointBelief(total)
        >>> x = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]])  # 2 sequences of 3 tokens
        >>> (sums,), final = run_steps(add, PointBelief(torch.zeros(2, 1, 1, 1)), zip(x.unbind(1)), None)
        >>> sums[..., 0, 0].tolist(), final.mean.flatten().tolist()
        ([[1.0, 3.0, 6.0], [1.0, 2.0, 3.0]], [6.0, 3.0])
    """
    tokens, readouts = list(tokens), []
    _check_run(belief, tokens, segment_ids)
    for t, token in enumerate(tokens):
        current = belief if segment_ids is None else belief.take(segment_ids[:, t].clamp(min=0))
        readout, posterior = step(current, *token)
        if not isinstance(readout, tuple | list):
            problem = f"returns a {type(readout).__name__} and a belief"
            raise ArgumentError("step", problem=problem, expected="a tuple of read-outs and a belief")
        readouts.append(readout)
        belief = posterior if segment_ids is None else _update_rows(belief, posterior, segment_ids[:, t])
    stacked = [torch.stack(x, 1) for x in zip(*readouts, strict=True)]
    if segment_ids is not None:
        stacked = [torch.where((segment_ids >= 0)[..., None, None], x, 0) for x in stacked]
    return stacked, belief


def _check_run(belief: Any, tokens: list[tuple[Any, ...]], segment_ids: Tensor | None) -> None:
    """Check the arguments of `run_steps`."""
    if not isinstance(belief, tuple) or not belief or not all(isinstance(x, Tensor) for x in belief):
        raise ArgumentError("belief", got=f"a {type(belief).__name__}", expected="a named tuple of tensors")
    for token in tokens:
        if not isinstance(token, tuple | list):
            problem = f"contains a {type(token).__name__}"
            raise ArgumentError("tokens", problem=problem, expected="a tuple of tensors per time step")
    rows = belief[0].shape[0]
    if segment_ids is None:
        first = [x for token in tokens[:1] for x in token if isinstance(x, Tensor)]
        batch = first[0].shape[0] if first else rows
        if batch != rows:
            problem, hint = f"has {rows} sequences", "Other numbers require `segment_ids`"
            raise ArgumentError("belief", problem=problem, expected=f"{batch}, one per batch row", hint=hint)
        return
    check_shape("segment_ids", segment_ids, "B T", {"T": len(tokens)})
    check_dtype_and_device("segment_ids", segment_ids, (torch.int64, torch.int32), belief[0].device)
    if can_check_values(segment_ids) and segment_ids.numel() and int(segment_ids.max()) >= rows:
        problem = f"has a maximum of {int(segment_ids.max())}"
        raise ArgumentError("segment_ids", problem=problem, expected=f"values below {rows}, the rows of `belief`")


def optional_segment_ids(segments: Segments | None, batch: int, length: int) -> Tensor | None:
    """Return the sequence of each token `[B, T]` (-1 for none), or `None` without segments."""
    return None if segments is None else segments.segment_ids(batch, length)


def fill_outside(segment_ids: Tensor | None, *signals: Any, fill: float = 0.0) -> tuple[Any, ...]:
    """Replace signals by `fill` at tokens outside every sequence, which then have zero gradient.

    Args:
        segment_ids: as in `run_steps`; if `None`, signals are returned unchanged.
        signals: `[B, T, ...]`, or `None`.
        fill: value at those tokens.
    """
    if segment_ids is None:
        return signals
    inside = segment_ids >= 0
    shapes = [() if x is None else (*inside.shape, *[1] * (x.ndim - 2)) for x in signals]
    pairs = zip(signals, shapes, strict=True)
    return tuple(x if x is None else torch.where(inside.view(shape), x, fill) for x, shape in pairs)


def _update_rows(belief: Any, posterior: Any, segment_ids: Tensor) -> Any:
    """Replace the belief of each sequence that has a token in this step `[B]` by the posterior of its batch row."""
    matches = segment_ids == torch.arange(belief[0].shape[0], device=segment_ids.device)[:, None]  # [N, B]
    active, row = matches.any(1)[:, None, None, None], matches.int().argmax(1)
    return type(belief)(*(torch.where(active, new[row], old) for old, new in zip(belief, posterior, strict=True)))
