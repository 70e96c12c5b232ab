"""Functions as ops of PyTorch, which its compiler takes whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Make an op of a function that changes none of its arguments and returns none of them.

    What `torch.library.custom_op` makes, but ops made by that import the compiler when they first run, which takes two
    seconds. `torch.library` registers what compilers and gradients need, by the op.
    """

    def register(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(name, "CompositeExplicitAutograd")(function)
        space, own = name.split("::")
        return getattr(getattr(torch.ops, space), own).default

    return register
