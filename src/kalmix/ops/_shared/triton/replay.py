"""Recording of a function that allocates tensors and launches kernels, to run it again without its Python code.

The functions that launch kernels compute sizes, strides, grids and options, which depend only on the layout of their
arguments. This takes longer on the host than the allocations and launches themselves. `Recorder` records the latter;
`Replay` runs them again on other arguments of the same layout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import getitem, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

# Functions of tensors that return the same value for all tensors of a layout; "__get__" stands for attributes.
LAYOUT_FUNCTIONS = frozenset(
    ["__get__", "__len__", "dim", "element_size", "get_device", "is_contiguous", "is_floating_point", "numel", "size",
     "stride"]
)  # fmt: skip
ALLOCATIONS = frozenset({"empty", "empty_like", "new_empty"})
STREAM = object()  # stands for the current stream among the arguments of a launch
MAX_SCRATCH = 1 << 26  # bytes; larger calls allocate their scratch tensors one by one, which limits peak memory
ALIGNMENT = 512  # bytes, of PyTorch's allocations on GPUs


class _Step(NamedTuple):
    """Call of a recorded function, with positions in the list of values.

    Attributes:
        function: function to call.
        arguments: returns the tuple of its arguments from the list of values.
        result: position of its result.
        last_uses: positions of values that no later step uses. They are set to `None`, so that memory is freed.
    """

    function: Callable[..., Any]
    arguments: Callable[[list[Any]], tuple[Any, ...]]
    result: int
    last_uses: tuple[int, ...]


class Replay(NamedTuple):
    """Recorded calls of PyTorch functions and launches of kernels.

    Attributes:
        values: list of values before the first step, after the tensors that the function takes and the stream:
            constants, and `None` for results of steps.
        steps: the calls in order.
        result: position of the result.
        uses_stream: whether a step has the current stream among its arguments.
        scratch: positions of the addresses of scratch tensors, and their offsets in one allocation.
        scratch_bytes: size of this allocation.
        device: its device.
    """

    values: list[Any]
    steps: list[_Step]
    result: int
    uses_stream: bool
    scratch: list[tuple[int, int]]
    scratch_bytes: int
    device: torch.device | None

    def __call__(self, tensors: list[Tensor], stream: int | None) -> Any:
        """Run the steps on other tensors, and return the result of the recorded function."""
        values = [*tensors, stream, *self.values]
        if self.scratch:
            memory = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=self.device)
            address = memory.data_ptr()
            for i, offset in self.scratch:
                values[i] = address + offset
        for function, get_arguments, result, last_uses in self.steps:
            values[result] = function(*get_arguments(values))
            for i in last_uses:
                values[i] = None
        return values[self.result]


class _Call(NamedTuple):
    """Recorded call, with positions in the list of values; `takes_addresses` is described at `Recorder.add`."""

    function: Callable[..., Any]
    arguments: list[int]
    result: int
    takes_addresses: bool = False


class Recorder(TorchFunctionMode):
    """Mode that records the PyTorch functions called inside, and the launches passed to `add`.

    Recording fails, and `replay` returns `None`, if a function reads values of tensors or uses a tensor that is neither
    an argument nor recorded.

    Args:
        tensors: tensors that the recorded function takes. If two of them are one object, they must be in every replay.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._num_tensors, self._values = len(tensors), [None] * (len(tensors) + 1)
        self._calls: list[_Call] = []
        self._allocations: dict[int, tuple[int, torch.device]] = {}  # bytes and device by position
        self._positions = WeakTensorKeyDictionary()  # intermediate tensors are freed as if they were not recorded
        self._failed = self._calls_function = False
        for i, x in enumerate(tensors):
            self._positions[x] = i

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._calls_function = True
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self._calls_function = False
        name = func.__name__
        if result is None or _contains_tensor(result):
            is_argument = isinstance(result, Tensor) and result in self._positions
            if kwargs or name.endswith("_") or not is_argument:  # not `contiguous` of a contiguous tensor
                self._record(func, args, kwargs or {}, result)
                if name in ALLOCATIONS and not self._failed:
                    self._allocations[self._calls[-1].result] = (result.untyped_storage().nbytes(), result.device)
        elif name not in LAYOUT_FUNCTIONS:
            self._failed = True
        return result

    def fail(self) -> None:
        """Give up the recording."""
        self._failed = True

    def add(self, launch: Callable[..., Any], arguments: tuple[Any, ...], takes_addresses: bool) -> None:
        """Record a function that launches a kernel and returns nothing.

        `takes_addresses` tells whether it takes addresses in place of tensors.
        """
        self._record(launch, arguments, {}, None, takes_addresses)

    def add_asynchronous(
        self, launch: Callable[..., Any], arguments: tuple[Any, ...], wait: Callable[[], None]
    ) -> Callable[[], None]:
        """Record a function that launches a kernel and returns a function that waits for it: `wait` in this call.

        Return a function that waits and records this. Replays keep the arguments until then.
        """
        self._record(launch, arguments, {}, None)
        if self._failed:
            return wait
        _, positions, own, _ = self._calls[-1]

        def wait_and_record() -> None:
            wait()
            self._calls.append(_Call(_call_first, [own, *positions], self._append(None)))

        return wait_and_record

    def replay(self, result: Any) -> Replay | None:
        """Return the replay of the recorded calls, given the result of the function; `None` if recording failed."""
        position = self._position(result)
        if self._failed:
            return None
        scratch, scratch_bytes, device = self._place_scratch(position)
        scratch_positions = {i for i, _ in scratch}
        used, steps = {position, self._num_tensors, *scratch_positions}, []
        for function, arguments, own, _ in reversed(self._calls):
            if own not in scratch_positions:
                last_uses = {own, *arguments} - used
                used |= last_uses
                freed = tuple(i for i in last_uses if self._values[i] is None)
                steps.append(_Step(function, _getter(arguments), own, freed))
        uses_stream = any(self._num_tensors in call.arguments for call in self._calls)
        values = self._values[self._num_tensors + 1 :]
        return Replay(values, steps[::-1], position, uses_stream, scratch, scratch_bytes, device)

    def _place_scratch(self, result: int) -> tuple[list[tuple[int, int]], int, torch.device | None]:
        """Place the tensors that only launches use in one allocation; see `Replay`."""
        scratch = {i: x for i, x in self._allocations.items() if i != result}
        for call in self._calls:
            if not call.takes_addresses:
                for i in call.arguments:
                    scratch.pop(i, None)
        offsets, end = [], 0
        for i, (size, _) in scratch.items():
            offsets.append((i, end))
            end += -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        devices = {device for _, device in scratch.values()}
        return (offsets, end, devices.pop()) if len(devices) == 1 and end <= MAX_SCRATCH else ([], 0, None)

    def _append(self, value: Any) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def _record(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        takes_addresses: bool = False,
    ) -> None:
        if self._failed or self._calls_function:  # such as a launch inside a PyTorch function
            self._failed = True
            return
        if _contains_tensor(kwargs):
            function, args = partial(_call_with_names, function, len(args), tuple(kwargs)), (*args, *kwargs.values())
        elif kwargs:
            function = partial(function, **kwargs)
        arguments, own = [self._position(x) for x in args], self._append(None)
        self._calls.append(_Call(function, arguments, own, takes_addresses))
        self._store(result, own)

    def _store(self, result: Any, position: int) -> None:
        """Store the position of a result, and record how its items are taken from it."""
        if isinstance(result, Tensor):
            if result not in self._positions:
                self._positions[result] = position
        elif isinstance(result, tuple | list):
            for i, x in enumerate(result):
                own = self._append(None)
                self._calls.append(_Call(getitem, [position, self._append(i)], own))
                self._store(x, own)

    def _position(self, value: Any) -> int:
        """Return the position of an argument; record how a tuple or list is made of its items."""
        if isinstance(value, Tensor):
            position = self._positions.get(value)
            self._failed |= position is None
            return 0 if position is None else position
        if value is STREAM:
            return self._num_tensors
        if not _contains_tensor(value):
            return self._append(value)
        if type(value) not in (tuple, list):
            self._failed = True
            return 0
        items, own = [self._position(x) for x in value], self._append(None)
        self._calls.append(_Call(partial(_collect, type(value)), items, own))
        return own


def _contains_tensor(value: Any) -> bool:
    if isinstance(value, slice):
        return any(isinstance(x, Tensor) for x in (value.start, value.stop, value.step))
    if isinstance(value, dict):
        return any(map(_contains_tensor, value.values()))
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(map(_contains_tensor, value)))


def _call_first(function: Callable[[], None], *_kept: Any) -> None:
    """Call a function while other arguments are kept."""
    function()


def _collect(kind: type, *items: Any) -> Any:
    return kind(items)


def _call_with_names(function: Callable[..., Any], count: int, names: tuple[str, ...], *arguments: Any) -> Any:
    """Call a function with `count` positional arguments; the others have names."""
    return function(*arguments[:count], **dict(zip(names, arguments[count:], strict=True)))


def _getter(positions: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Return a function that takes the values at positions from a list, as a tuple."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return (lambda values: (values[positions[0]],)) if positions else (lambda _: ())
