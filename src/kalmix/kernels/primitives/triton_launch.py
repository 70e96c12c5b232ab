"""Kernels to run, compiled side by side where they are new: one after another would make the first call long."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs


class Launch(NamedTuple):
    """A kernel to run."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.options)


_COMPILED: set[Any] = set()


def launch(steps: list[Launch]) -> None:
    """Run kernels one after another; new ones are compiled first."""
    compiled(steps)
    for step in steps:
        step.run()


def compiled(steps: list[Launch]) -> None:
    """Compile kernels that are new, side by side, or the first call would take long."""
    types = [[x.dtype for x in step.arguments if isinstance(x, Tensor)] for step in steps]
    new = tuple((id(x.kernel), *x.options.values(), *kinds) for x, kinds in zip(steps, types, strict=True))
    if new not in _COMPILED and not knobs.runtime.interpret:
        with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):
            for kernel, grid, arguments, options in steps:
                kernel.warmup(*arguments, grid=grid, **options)
        _COMPILED.add(new)
