"""FSDP2: keep the dynamics of layers in float32 while the rest of a model acts in bfloat16."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kalmix.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DYNAMICS = frozenset({"dynamics", "value_dynamics"})  # names of the modules that stay in float32
_WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod")  # inside of activation checkpointing and `torch.compile`


def shard_dynamics(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Shard the dynamics of all layers by FSDP2, in one group whose parameters act in float32.

    A mixed-precision policy of FSDP2 rounds all parameters of a module, but decay rates and noises need float32. Call
    this function before `fully_shard` of the blocks and of the model, which leaves these modules alone. Models for
    transformers need no call: accelerate, the Trainer and `DistributedConfig` let their dynamics act in float32.

    Args:
        model: a layer, a block, a `kalmix.models.LanguageModel`, or any module that contains layers.
        mesh: device mesh, as `fully_shard` takes it. Default: all ranks.

    Example:
        >>> from torch import distributed
        >>> from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        >>> from kalmix.distributed import shard_dynamics
        >>> from kalmix.layers import KLA
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> layer = KLA(16)
        >>> shard_dynamics(layer)
        >>> _ = fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        >>> layer(torch.randn(1, 8, 16))[0].dtype
        torch.bfloat16
        >>> distributed.destroy_process_group()
    """
    from torch.distributed.fsdp import fully_shard

    found = [module for _, module in _named(model, DYNAMICS)]
    if found:
        fully_shard(found, mesh=mesh, reshard_after_forward=False)


def start_in_float32(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """Convert 16-bit parameters of the named modules to float32, in place, in a new model; return the modules.

    Args:
        model: model that was built under any default dtype, such as that of `from_config(config, dtype=...)`.
        names: last parts of the names of the modules.
    """
    found = [module for _, module in _named(model, names)]
    for parameter in (x for module in found for x in module.parameters()):
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return found


def keep_float32(model: nn.Module, names: Collection[str]) -> None:
    """Let the named modules act in float32, after a program has sharded the model by FSDP2 and before its first call.

    Programs such as accelerate pass one mixed-precision policy to `fully_shard` for all modules. They shard the named
    modules by themselves, since a model lists their classes in `_no_split_modules`. So each has its own policy, which
    this function replaces. The outputs of the model itself, such as its loss, are not rounded any more. It does nothing
    to a model that is not sharded, and nothing in a second call.

    Args:
        model: model whose `fully_shard` call is done.
        names: last parts of the names of the modules.

    Raises:
        ArgumentError: a named module is sharded together with the module that contains it.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
    from torch.distributed.tensor import DTensor

    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return
    for module in model.modules():
        if isinstance(module, FSDPModule) and hasattr(module, "finish"):  # the marginal likelihood calls it
            register_fsdp_forward_method(module, "finish")
    state: Any
    if isinstance(model, FSDPModule):
        state = model._get_fsdp_state()
        if state._mp_policy.output_dtype in (torch.bfloat16, torch.float16):  # would round the loss to three digits
            state._mp_policy = replace(state._mp_policy, output_dtype=None)
    for name, module in _named(model, names):
        if isinstance(module, FSDPModule):
            # There is no public way to replace a policy. The tests check these attributes with torch 2.13.
            state = module._get_fsdp_state()
            state._mp_policy = state._fsdp_param_group.mp_policy = MixedPrecisionPolicy(cast_forward_inputs=False)
            module.set_reshard_after_forward(False)  # its few numbers stay until the backward pass
        elif not any(isinstance(p, DTensor) for p in module.parameters()):
            continue  # each rank has the whole parameters, by `ignored_params` of `fully_shard`
        elif policy := _policy_above(model, name):  # a caller's `auto_wrap_policy`
            problem = f"lets {name} act in {policy}, since it is sharded with the module around it"
            expected = "dynamics in groups of their own"
            hint = "Leave out `transformer_layer_cls_to_wrap`, or call `kalmix.distributed.shard_dynamics(model)` first"
            raise ArgumentError("fully_shard", problem=problem, expected=expected, hint=hint)


def _named(model: nn.Module, names: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with these names that have parameters, with their full names."""
    for name, module in model.named_modules():
        last = next((part for part in reversed(name.split(".")) if part not in _WRAPPED), "")
        wraps = any(part in _WRAPPED for part, _ in module.named_children())
        if last in names and not wraps and next(module.parameters(), None) is not None:
            yield name, module


def _policy_above(model: nn.Module, name: str) -> torch.dtype | None:
    """Return the low-precision dtype in which FSDP2 gathers the parameters of a module; `None` if there is none."""
    from torch.distributed.fsdp import FSDPModule

    while name:
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            dtype = state._mp_policy.param_dtype
            return dtype if dtype in (torch.bfloat16, torch.float16) else None
    return None
