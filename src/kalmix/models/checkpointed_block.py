"""Block whose activations transformers can compute again in the backward pass, and whose weights may be offloaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kalmix._extras import optional_imports

with optional_imports():
    from transformers.modeling_layers import GradientCheckpointingLayer

from kalmix.models.blocks import Block
from kalmix.models.offload import hook_whole_block


class KalmixBlock(GradientCheckpointingLayer, Block):
    """`Block` with the gradient checkpointing of transformers, all of whose options apply, and accelerate's offload."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`; before that, let accelerate load the weights of the whole block if they are offloaded."""
        if not torch.compiler.is_compiling():
            hook_whole_block(self)
        return super().__call__(*args, **kwargs)

    @property
    def _gradient_checkpointing_func(self) -> Callable[..., Any]:
        # Reentrant checkpoints see only tensors that are arguments or results themselves.
        return self._checkpoint if torch.compiler.is_compiling() else partial(_checkpoint_leaves, self._checkpoint)

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, function: Callable[..., Any]) -> None:
        self._checkpoint = function

    @_gradient_checkpointing_func.deleter
    def _gradient_checkpointing_func(self) -> None:
        del self._checkpoint


def _checkpoint_leaves(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    """Call `checkpoint(function, *args)` with all tensors inside `args` and the result passed one by one."""
    leaves, structure = pytree.tree_flatten(args)
    structures = []

    def flat(*leaves: Any) -> tuple[Any, ...]:
        results, results_structure = pytree.tree_flatten(function(*pytree.tree_unflatten(leaves, structure)))
        structures.append(results_structure)
        return tuple(results)

    return pytree.tree_unflatten(checkpoint(flat, *leaves), structures[0])
