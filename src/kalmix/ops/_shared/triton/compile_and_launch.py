"""Kernels to run: compiled side by side where they are new, since one after another would make the first call long, and
found once for all calls that are laid out alike, since Triton takes longer to find them than a GPU to run them.

A call is rehearsed before the first of its kind, through the same code, which then compiles kernels where it would run
them. So those of the backward pass are compiled beside those of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

MANY = 1024  # kinds of calls whose kernels are remembered


class Launch(NamedTuple):
    """A kernel to run."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        """Run it; in a rehearsal, begin to compile it."""
        _RUN.get()(self)


def launch(steps: list[Launch]) -> None:
    """Run kernels one after another; new ones are compiled first."""
    compiled(steps)
    for step in steps:
        step.run()


def compiled(steps: list[Launch]) -> None:
    """Compile kernels that are new, side by side."""
    if _RUN.get() is _compile:
        return
    types = [[x.dtype for x in step.arguments if isinstance(x, Tensor)] for step in steps]
    new = tuple((id(x.kernel), *x.options.values(), *kinds) for x, kinds in zip(steps, types, strict=True))
    if new not in _COMPILED and not knobs.runtime.interpret:
        with _rehearsal():
            for step in steps:
                step.run()
        _COMPILED.add(new)


def aside(chain: Launch) -> Callable[[], None]:
    """Run a kernel beside what the current stream has to do from then on; the result, once called, has it wait.

    It is meant for few programs that take long: on a stream that goes first, each has a multiprocessor of its own.
    """
    if knobs.runtime.interpret:
        chain.run()
        return lambda: None
    current, other = torch.cuda.current_stream(), _first(torch.cuda.current_device())
    other.wait_stream(current)
    with torch.cuda.stream(other):
        chain.run()
    return partial(current.wait_event, other.record_event())


@cache
def _first(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def rehearse(function: Callable[..., object], *arguments: Any) -> None:
    """Compile all that a call of `function` runs, before the first of its kind.

    Calls are of a kind if sizes from the third on are the same, and the first two of one magnitude.
    """
    kind = (function, *(_kind(x) if isinstance(x, Tensor) else x for x in arguments))
    if kind not in _COMPILED and not knobs.runtime.interpret:
        with _rehearsal():
            function(*arguments)
        _COMPILED.add(kind)


def perform(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns; kernels are found once for all calls whose arguments are laid out alike.

    What it launches must follow from that: from shapes and strides, never from values. Where kernels, their options or
    their integers differ nevertheless, they are found anew.
    """
    if knobs.runtime.interpret or _RUN.get() is _compile:
        return function(*arguments)
    layout = (function, torch.cuda.current_device(), *(_layout(x) if isinstance(x, Tensor) else x for x in arguments))
    performance = _Performance(_SCORES.get(layout, []))
    with _running(performance):
        result = function(*arguments)
    if len(_SCORES) >= MANY:
        _SCORES.clear()
    _SCORES[layout] = performance.score
    return result


class _Found(NamedTuple):
    """What a launch came to: the machine code, and what stands for constants, which are in it.

    Code is made for integers that are 1, or multiples of 16, and for tensors that begin at multiples of 16 bytes. Those
    that come from outside do as they did, by the layout of the call; all others are new, and the allocator aligns them.
    """

    kernel: Any
    options: dict[str, Any]
    integers: list[int]
    code: Any
    constants: tuple[None, ...]


class _Performance:
    """Launches of a call, by the score of one that was laid out alike."""

    def __init__(self, before: list[_Found]) -> None:
        self.before, self.score = before, []

    def __call__(self, step: Launch) -> None:
        place = len(self.score)
        found = self.before[place] if place < len(self.before) else None
        about = step.kernel, step.options, [x for x in step.arguments if type(x) is int]
        if found is None or found.code is None or found[:3] != about:
            found = _Found(*about, *_run(step))
        else:
            found.code[(*step.grid, 1, 1)[:3]](*step.arguments, *found.constants)
        self.score.append(found)


def _run(step: Launch) -> tuple[Any, tuple[None, ...]]:
    """Triton's way, which finds the code."""
    code = step.kernel[step.grid](*step.arguments, **step.options)
    return code, () if code is None else (None,) * (len(step.kernel.params) - len(step.arguments))


def _compile(step: Launch) -> None:
    coming = step.kernel.warmup(*step.arguments, grid=step.grid, **step.options)
    if isinstance(future := getattr(coming, "future", None), Future):
        future.add_done_callback(_load)


def _load(done: Future[Any]) -> None:
    """Load what was compiled, by the thread that did: that takes a launcher in C, which has to be compiled, too."""
    if done.exception() is None:
        _ = done.result().run


_RUN: ContextVar[Callable[[Launch], Any]] = ContextVar("run", default=_run)
_COMPILED: set[Any] = set()  # kinds of calls, and of lists of launches
_SCORES: dict[Any, list[_Found]] = {}


@contextmanager
def _running(run: Callable[[Launch], Any]) -> Iterator[None]:
    before = _RUN.set(run)
    try:
        yield
    finally:
        _RUN.reset(before)


@contextmanager
def _rehearsal() -> Iterator[None]:
    """Inside, kernels are compiled and not run; it ends when they are."""
    here = torch.cuda.current_device()
    pool = ThreadPoolExecutor(32, "compile", torch.cuda.set_device, (here,))
    with pool, triton.AsyncCompileMode(pool), _running(_compile):
        yield


def _kind(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, *((size - 1).bit_length() for size in x.shape[:2]), *x.shape[2:]


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.stride(), x.data_ptr() % 16
