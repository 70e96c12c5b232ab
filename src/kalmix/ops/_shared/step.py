"""Steps: one token for each row of a batch, in place on a pool of states. Every op's `step.py` uses these parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.errors import ArgumentError
from kalmix.ops._shared.environment import HAS_TRITON
from kalmix.rings import as_rings_like
from kalmix.types import Filtered, belief_dtype
from kalmix.validation import check_dtype_and_device, check_shape

Pool = TypeVar("Pool", bound=tuple[Any, ...])  # a belief whose first axis is slots

NO_SEQUENCE = -1


class Slots(NamedTuple):
    """Slots of a pool that each row of a batch reads and writes.

    Row b starts from the state in slot `read[b]` and stores its new state in slot `write[b]`. With `read[b]` equal to
    `NO_SEQUENCE` (-1) the row is padding: nothing is read or stored, its read-out is 0, and its signals may be NaN.
    With `write[b]` equal to `NO_SEQUENCE` the new state is not stored.

    A slot that a row writes may be read by that row only, and written by no other row. So two rows that continue from
    one slot, such as beams, write to two other slots. `kalmix.steps.check_slots` checks this.

    Attributes:
        read: int32 or int64 `[B]`, from 0 to N - 1 for a pool of N slots, or -1.
        write: int32 or int64 `[B]`, likewise.

    Example:
        >>> from kalmix import steps
        >>> slots = steps.Slots(torch.tensor([4, 0, -1]), torch.tensor([4, 2, -1]))  # the last row is padding
        >>> steps.check_slots(slots, 5)
    """

    read: Tensor
    write: Tensor


def check_slots(slots: Slots, count: int) -> None:
    """Check the slots of a step on the host. It copies them from the device; step functions do not check them.

    Args:
        slots: slots of a batch.
        count: number of slots of the pool.

    Raises:
        ArgumentError: an index is out of range, two rows write one slot, or a row reads a slot that another row writes.

    Example:
        >>> from kalmix import steps
        >>> steps.check_slots(steps.Slots(torch.tensor([0, 0]), torch.tensor([0, 1])), 2)
        Traceback (most recent call last):
        ...
        kalmix.errors.ArgumentError: `slots.read` has slot 0 in row 1, which row 0 writes; expected ...
    """
    sizes: dict[str, int] = {}
    for name, x in zip(slots._fields, slots, strict=True):
        check_shape(f"slots.{name}", x, "B", sizes)
        check_dtype_and_device(f"slots.{name}", x, (torch.int64, torch.int32), slots.read.device)
        if x.numel() and not -1 <= int(x.min()) <= int(x.max()) < count:
            problem = f"has values from {int(x.min())} to {int(x.max())}"
            raise ArgumentError(f"slots.{name}", problem=problem, expected=f"slots from 0 to {count - 1}, or -1")
    writer: dict[int, int] = {}
    rows = list(enumerate(zip(slots.read.tolist(), slots.write.tolist(), strict=True)))
    for row, (read, write) in rows:
        if read != NO_SEQUENCE and write != NO_SEQUENCE:
            if write in writer:
                problem = f"has slot {write} in rows {writer[write]} and {row}"
                raise ArgumentError("slots.write", problem=problem, expected="another slot for each row")
            writer[write] = row
    for row, (read, _) in rows:
        if read != NO_SEQUENCE and writer.get(read, row) != row:
            problem, expected = f"has slot {read} in row {row}, which row {writer[read]} writes", "a slot of its own"
            raise ArgumentError("slots.read", problem=problem, expected=expected, hint="Write to an unused slot")


def runs_triton(pool: tuple[Any, ...], kernel: str | None) -> bool:
    """Return whether a step runs its Triton form: on GPUs, or if `kernel` is "triton"; never if it is "torch"."""
    return kernel == "triton" or (kernel is None and HAS_TRITON and pool[0].is_cuda)


def step_in_torch(
    kernel: Callable[..., Filtered],
    signals: tuple[Any, ...],
    pool: tuple[Any, ...],
    slots: Slots,
    arguments: tuple[Any, ...] = (),
    out: Filtered | None = None,
) -> Filtered:
    """Filter one token per row by the kernel `reference` of an op, on copies of the states that rows read.

    Args:
        kernel: function `(signals, belief, segments, *arguments) -> Filtered`.
        signals: signals of the op, `[B, 1, ...]`.
        pool: states of N slots, updated in place.
        slots: slots of the rows.
        arguments: further arguments of the kernel.
        out: see `kalmix.steps`.
    """
    with torch.no_grad():
        mean, variance, after = kernel(signals, take_slots(pool, slots.read), None, *arguments)
        store_rows(pool, slots, after)
        return fill_output(Filtered(mean, variance, pool), slots, out)


def take_slots(pool: Pool, read: Tensor) -> Pool:
    """Return copies of the slots that rows read; padding rows get slot 0."""
    index = read.clamp(min=0)
    return type(pool)(*(x.index_select(0, index) for x in pool))


def store(pool: tuple[Any, ...], index: Tensor, belief: tuple[Any, ...]) -> None:
    """Copy the beliefs of sequences into slots of a pool, without gradients: those that an op returns for prompts.

    Args:
        pool: pool of N slots.
        index: int64 `[M]`, slot of each sequence, all different.
        belief: beliefs, or states of a layer, of M sequences. Of histories, the newest tokens are stored, as many as a
            slot has room for.

    Example:
        >>> from kalmix import PointBelief, steps
        >>> pool = PointBelief(torch.zeros(8, 1, 2, 2))
        >>> steps.store(pool, torch.tensor([3]), PointBelief(torch.ones(1, 1, 2, 2)))
        >>> pool.mean[:, 0, 0, 0].tolist()
        [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """
    with torch.no_grad():
        _copy(pool, index, as_rings_like(belief, pool))


def _copy(pool: Any, index: Tensor, state: Any) -> None:
    if isinstance(pool, Tensor):
        pool.index_copy_(0, index, state.to(pool.dtype))
        return
    for buffer, x in zip(pool, state, strict=True):
        _copy(buffer, index, x)


def history_pool(count: int, tokens: int, k: Tensor, v: Tensor) -> HistoryBelief:
    """Return a pool of empty histories for `kalmix.steps.attend`.

    Args:
        count: number of slots.
        tokens: number of tokens that a slot has room for.
        k: keys `[..., H, K]` of any sequences; only sizes, dtype and device are used.
        v: values `[..., G, V]`, likewise.

    Example:
        >>> from kalmix import steps
        >>> pool = steps.history_pool(8, 16, torch.empty(1, 4), torch.empty(2, 6))
        >>> pool.keys.shape, pool.values.shape
        (torch.Size([8, 16, 1, 4]), torch.Size([8, 16, 2, 6]))
    """
    dtype = belief_dtype(v.dtype)
    keys, values = (x.new_zeros(count, tokens, *x.shape[-2:], dtype=dtype) for x in (k, v))
    times = v.new_zeros(count, tokens, dtype=torch.float64)
    return HistoryBelief(keys, values, times, torch.full_like(times, -1, dtype=torch.int64))


def store_rows(pool: tuple[Any, ...], slots: Slots, states: tuple[Any, ...]) -> None:
    """Store the state of each row in the slot that it writes. Its launches do not depend on values of `slots`.

    A row that writes nothing repeats the write of the first row that does. If there is none, slot 0 is rewritten.

    Args:
        pool: tensors of N slots; updated in place.
        slots: slots of B rows; those that are read tell which rows are padding.
        states: tensors of B rows.

    Example:
        >>> from kalmix import steps
        >>> pool = torch.zeros(4)
        >>> steps.store_rows((pool,), steps.Slots(torch.tensor([1, -1]), torch.tensor([2, -1])), (torch.ones(2),))
        >>> pool.tolist()
        [0.0, 0.0, 1.0, 0.0]
    """
    read, write = slots
    if read.shape[0] == 0:
        return
    writes = (read >= 0) & (write >= 0)
    first, any_writes = writes.int().argmax(), writes.any()
    row = torch.where(writes, torch.arange(writes.shape[0], device=writes.device), first)
    index = write[row].clamp(min=0).long()
    for buffer, state in zip(pool, states, strict=True):
        kept = buffer.index_select(0, index)
        buffer.index_copy_(0, index, torch.where(any_writes, state[row].to(buffer.dtype), kept))


def fill_output(result: Filtered, slots: Slots, out: Filtered | None) -> Filtered:
    """Set read-outs of padding rows to 0, and copy them to `out` if it is given."""
    active = (slots.read >= 0).view(-1, 1, 1, 1)
    mean, variance = (None if x is None else torch.where(active, x, 0) for x in result[:2])
    if out is None:
        return Filtered(mean, variance, result.belief)  # pyright: ignore[reportArgumentType]
    for buffer, x in zip(out[:2], (mean, variance), strict=True):
        if buffer is not None and x is not None:
            buffer.copy_(x)
    return Filtered(*out[:2], result.belief)  # pyright: ignore[reportArgumentType]
