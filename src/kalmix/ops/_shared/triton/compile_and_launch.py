"""Compilation and launch of Triton kernels.

`precompile` runs a function without executing its kernels, and compiles them in parallel: one after another they would
make a first call slow. `launch_cached` stores the compiled kernels of a call and launches them again in calls with the
same layout, because Triton's own lookup takes longer than a short kernel. From the third such call on it replays all
that the second one did, if it can, since its Python code takes longer than short kernels, too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from kalmix.ops._shared.triton.replay import STREAM, Recorder, Replay

RUN_TAKES_STREAM = triton.__version__.startswith("3.6.")  # as an argument of `run` of binaries: it is not public
MAX_CACHED_CALLS = 1024  # calls of different layouts whose launches are stored


class Launch(NamedTuple):
    """Kernel with its grid, arguments and compile-time options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        """Launch the kernel; in a dry run, start to compile it instead."""
        _LAUNCHER.get()(self)


def is_dry_run() -> bool:
    """Return whether `Launch.run` does something else than launching the kernel."""
    return _DRY_RUN.get()


def allocate_table(*sizes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a tensor for integers that kernels will write and later code uses as indices.

    It holds zeros in a dry run, where no kernel writes it: an index out of range would stop the process on a GPU.
    """
    allocate = torch.zeros if is_dry_run() else torch.empty
    return allocate(sizes, dtype=dtype, device=device)


def launch_on_side_stream(launch: Launch) -> Callable[[], None]:
    """Launch a kernel on a side stream, concurrently with later work of the current stream.

    The side stream has high priority. This suits kernels with few, long-running programs: each gets a multiprocessor
    of its own.

    Returns:
        A function that makes the current stream wait for the kernel.
    """
    if knobs.runtime.interpret or is_dry_run():
        launch.run()
        return lambda: None
    launcher = _LAUNCHER.get()
    if isinstance(launcher, _CachingLauncher):
        return launcher.launch_on_side_stream(launch)
    return _run_on_side_stream(launch.run)


def _run_on_side_stream(run: Callable[..., object], *arguments: Any) -> Callable[[], None]:
    """Call `run` on the side stream; return a function that makes the current stream wait."""
    current, side = torch.cuda.current_stream(), _high_priority_stream(torch.cuda.current_device())
    side.wait_stream(current)
    with torch.cuda.stream(side):
        run(*arguments)
    return partial(current.wait_event, side.record_event())


@cache
def _high_priority_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def precompile(function: Callable[..., object], *arguments: Any, key: Hashable = None) -> None:
    """Call `function` as a dry run that compiles all kernels it would launch, unless a similar call has done so.

    Calls are similar if their tensors agree in dtype, in the first two sizes rounded up to powers of two, in all later
    sizes, in the second stride, and in whether each later stride is 1 or a multiple of 16; and if all other arguments,
    `key` and the device are equal. In a dry run, `function` is called in any case.

    If similar calls launch different kernels, results are right, but Triton compiles the missing kernels one after
    another when they are launched.
    """
    if is_dry_run():
        function(*arguments)
        return
    if knobs.runtime.interpret:
        return
    sizes = (_size_class(x) if isinstance(x, Tensor) else x for x in arguments)
    entry = (function, torch.cuda.current_device(), key, *sizes)
    if entry not in _PRECOMPILED:
        with _compilation():
            function(*arguments)
        _PRECOMPILED.add(entry)


def launch_cached(
    function: Callable[..., Any],
    *arguments: Any,
    dry_run: Callable[..., object] | None = None,
    precompile_key: Callable[..., Hashable] | None = None,
) -> Any:
    """Call `function` and return its result, with the compiled kernels of an earlier call of the same layout.

    Two calls have the same layout if their tensors agree in dtype, shape, strides and address modulo 16, if the same
    positions share one tensor object, and if all other arguments are equal. What `function` does must depend on the
    layout, never on other state. The first call stores the binaries of its kernels. The second one records what it
    does, and later ones replay that: see `Recorder`. A function that is not replayed runs in every call; if a kernel,
    its options or its integer arguments then differ from the earlier call, Triton looks that kernel up again.

    Args:
        function: launches kernels.
        arguments: its arguments: tensors, lists of tensors, and values that can be hashed.
        dry_run: function to precompile before the first call of a layout; see `precompile`.
        precompile_key: returns the `key` of `precompile`, given the arguments. It must differ between calls that launch
            different kernels, or kernels with different options, if they are similar otherwise.
    """
    if knobs.runtime.interpret or is_dry_run():
        return function(*arguments)
    tensors: list[Tensor] = []
    layout = (function, torch.cuda.current_device(), *_layout(arguments, tensors))
    ids = [id(x) for x in tensors]
    if len(set(ids)) < len(ids):
        layout = (*layout, *map(ids.index, ids))
    cached = _LAUNCH_CACHE.get(layout)
    if isinstance(cached, Replay):
        if _has_hooks():
            return function(*arguments)
        return cached(tensors, driver.active.get_current_stream(layout[1]) if cached.uses_stream else None)
    if cached is None and dry_run is not None:
        precompile(dry_run, *arguments, key=None if precompile_key is None else precompile_key(*arguments))
    records = cached is not None and cached.may_be_recorded and not _has_hooks()
    recorder = Recorder(tensors) if records else None
    outer = _LAUNCHER.get()
    if isinstance(outer, _CachingLauncher) and outer.recorder is not None:
        outer.recorder.fail()  # it does not see the launches of this call
    launcher = _CachingLauncher(cached.launches if cached is not None else [], recorder)
    with _use_launcher(launcher), nullcontext() if recorder is None else recorder:
        result = function(*arguments)
    if cached is None or launcher.changed or recorder is not None:
        if len(_LAUNCH_CACHE) >= MAX_CACHED_CALLS:
            _LAUNCH_CACHE.clear()
        replay = None if recorder is None else recorder.replay(result)
        may_be_recorded = recorder is None and (cached is None or cached.may_be_recorded)
        _LAUNCH_CACHE[layout] = replay or _CachedCall(launcher.launches, may_be_recorded)
    return result


class _CachedLaunch(NamedTuple):
    """Cache entry of one launch: the binary, and placeholders for the constants compiled into it.

    Triton specialises a binary for integers that are 1 or multiples of 16, and for tensors whose address is a multiple
    of 16. Tensors that the caller passes are aligned as before, because the layout includes their alignment; all others
    are allocated by PyTorch, which aligns them.
    """

    kernel: Any
    options: dict[str, Any]
    integers: list[int]
    binary: Any
    placeholders: tuple[None, ...]


class _CachedCall(NamedTuple):
    """Cache entry of a call that is not replayed."""

    launches: list[_CachedLaunch]
    may_be_recorded: bool


class _CachingLauncher:
    """Launcher that reuses the binaries of an earlier call with the same layout, and stores those of this call."""

    def __init__(self, cached: list[_CachedLaunch], recorder: Recorder | None) -> None:
        self.cached, self.launches, self.changed, self.recorder = cached, [], False, recorder

    def __call__(self, launch: Launch) -> None:
        if self.recorder is None:
            self._run(launch)
            return
        with torch._C.DisableTorchFunction():  # launches read addresses, which is not part of the recording
            run, arguments = self._run(launch)
        binary = self.launches[-1].binary
        if binary is not None and RUN_TAKES_STREAM:
            grid = (*launch.grid, 1, 1)[:3]
            arguments = (*launch.arguments, *self.launches[-1].placeholders)
            arguments = (*grid, STREAM, binary.function, binary.packed_metadata, None, None, None, *arguments)
            self.recorder.add(binary.run, arguments, takes_addresses=True)
        else:
            self.recorder.add(run, arguments, takes_addresses=False)

    def launch_on_side_stream(self, launch: Launch) -> Callable[[], None]:
        """Launch a kernel on a side stream; return a function that makes the current stream wait."""
        if self.recorder is None:
            return _run_on_side_stream(self._run, launch)
        calls: list[Any] = []
        with torch._C.DisableTorchFunction():
            wait = _run_on_side_stream(lambda: calls.append(self._run(launch)))
        run, arguments = calls[0]
        return self.recorder.add_asynchronous(partial(_run_on_side_stream, run), arguments, wait)

    def _run(self, launch: Launch) -> tuple[Callable[..., object], tuple[Any, ...]]:
        """Launch a kernel; return a function that does this, and its arguments."""
        kernel, grid, arguments, options = launch
        index, integers = len(self.launches), [x for x in arguments if type(x) is int]
        entry = self.cached[index] if index < len(self.cached) else None
        if (
            entry is not None
            and entry.binary is not None
            and entry.kernel is kernel
            and entry.integers == integers
            and entry.options == options
        ):
            run, arguments = entry.binary[(*grid, 1, 1)[:3]], (*arguments, *entry.placeholders)
            run(*arguments)
        else:
            entry, self.changed = _CachedLaunch(kernel, options, integers, *_launch(launch)), True
            run = partial(kernel[grid], **options)
        self.launches.append(entry)
        return run, arguments


def _has_hooks() -> bool:
    """Return whether Triton must call functions, such as those of a profiler, before or after launches."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def _launch(launch: Launch) -> tuple[Any, tuple[None, ...]]:
    """Launch a kernel through Triton; return the binary and its placeholders."""
    binary = launch.kernel[launch.grid](*launch.arguments, **launch.options)
    return binary, () if binary is None else (None,) * (len(launch.kernel.params) - len(launch.arguments))


def _compile(launch: Launch) -> None:
    result = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
    if isinstance(future := getattr(result, "future", None), Future):
        future.add_done_callback(_load)


def _load(future: Future[Any]) -> None:
    """Load a compiled binary in the thread that compiled it, since this compiles a C launcher, too."""
    if future.exception() is None:
        _ = future.result().run


_LAUNCHER: ContextVar[Callable[[Launch], Any]] = ContextVar("launcher", default=_launch)
_DRY_RUN: ContextVar[bool] = ContextVar("dry_run", default=False)
_PRECOMPILED: set[Any] = set()  # one entry for all calls of `precompile` that are similar
_LAUNCH_CACHE: dict[Any, _CachedCall | Replay] = {}


@contextmanager
def _use_launcher(launcher: Callable[[Launch], Any]) -> Iterator[None]:
    previous = _LAUNCHER.set(launcher)
    try:
        yield
    finally:
        _LAUNCHER.reset(previous)


@contextmanager
def dry_run(launcher: Callable[[Launch], object]) -> Iterator[None]:
    """Call `launcher` instead of launching kernels; the code inside must not use their results."""
    previous = _DRY_RUN.set(True)
    try:
        with _use_launcher(launcher):
            yield
    finally:
        _DRY_RUN.reset(previous)


@contextmanager
def _compilation() -> Iterator[None]:
    """Compile kernels instead of launching them, in 32 threads; wait for all of them on exit."""
    device = torch.cuda.current_device()
    pool = ThreadPoolExecutor(32, "compile", torch.cuda.set_device, (device,))
    with pool, triton.AsyncCompileMode(pool), dry_run(_compile):
        yield


def _size_class(x: Tensor) -> tuple[Any, ...]:
    # CUDA kernels are compiled for the second stride, Triton's for strides of 1 and multiples of 16. Later strides may
    # depend on the length: do not compare their values, since each length would need a dry run.
    strides = *x.stride()[1:2], *((stride == 1, stride % 16 == 0) for stride in x.stride()[2:])
    return x.dtype, *((size - 1).bit_length() for size in x.shape[:2]), *x.shape[2:], *strides


def _layout(arguments: Iterable[Any], tensors: list[Tensor]) -> tuple[Any, ...]:
    """Return the layout of arguments, and append their tensors to `tensors`."""
    layout: list[Any] = []
    for x in arguments:
        if isinstance(x, Tensor):
            tensors.append(x)
            layout.append((x.dtype, x.shape, x.stride(), x.data_ptr() % 16))
        else:
            layout.append(_layout(x, tensors) if isinstance(x, list) else x)
    return tuple(layout)
