"""Weights that accelerate keeps on the CPU or on disk, and loads only while a module runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from kalmix.errors import ArgumentError


def hook_whole_block(block: nn.Module) -> None:
    """Make accelerate load all weights of a block, if they are offloaded, when the block or its mixer is called.

    By itself, accelerate loads the weights of each module that is called. A mixer also reads weights of modules that it
    does not call, such as its dynamics.

    Raises:
        ArgumentError: a part of the block is offloaded, and another is not.
    """
    mixer: Any = block.mixer
    whole = _is_offloaded(block)
    if whole and _is_offloaded(mixer):
        return
    if not (whole or any(map(_is_offloaded, (block.norm, getattr(mixer, "out_proj", mixer))))):  # few parts, for speed
        return
    with_weights = (part for part in block.modules() if next(part.parameters(recurse=False), None) is not None)
    if not whole and not all(map(_is_offloaded, with_weights)):
        expected = "whole blocks, `model.layers.N`"
        raise ArgumentError("device_map", problem="offloads a part of a block", expected=expected)
    from accelerate.hooks import attach_align_device_hook, remove_hook_from_module

    name, hook = next((name, vars(part)["_hf_hook"]) for name, part in block.named_modules() if _is_offloaded(part))
    path = hook.weights_map.prefix.removesuffix(".").removesuffix(name).removesuffix(".")
    remove_hook_from_module(block, recurse=True)
    for part, part_path in ((block, path), (mixer, f"{path}.mixer" if path else "mixer")):
        attach_align_device_hook(
            part,
            execution_device=hook.execution_device,
            offload=True,
            weights_map=hook.weights_map.dataset,
            offload_buffers=hook.offload_buffers,
            module_name=part_path,
            skip_keys=hook.skip_keys,
            preload_module_classes=[type(part).__name__],
            tied_params_map=hook.tied_params_map,
        )


def loaded(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which weights of a block or mixer are loaded, for calls of methods other than `forward`."""
    return _loaded(module) if _is_offloaded(module) else nullcontext()


@contextmanager
def _loaded(module: nn.Module) -> Iterator[None]:
    hook: Any = vars(module)["_hf_hook"]
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)


def _is_offloaded(module: Any) -> bool:
    """Return whether a hook of accelerate loads the weights of a module at each call."""
    return bool(getattr(vars(module).get("_hf_hook"), "offload", False))
