"""Signals of heads from the modules of a layer, in one kernel where it may replace calls of these modules."""

from __future__ import annotations

from torch import Tensor, nn

from kalmix.layers.fused import HeadSignal, can_fuse_signals, head_signals
from kalmix.layers.modules import is_plain
from kalmix.layers.parametrize import NoiseVariance, StepDecay, StepDynamics
from kalmix.types import replace_fields

_PLAIN_PARAMETERS = (Tensor, nn.Parameter)  # no subclasses, such as quantized or sharded tensors


def linear_signal(module: nn.Module | None, kind: str, constant: float = 1.0) -> HeadSignal | None:
    """Return the `HeadSignal` of activation(module(x)); `None` if the module is not a plain linear layer."""
    if not isinstance(module, nn.Linear) or not is_plain(module, nn.Linear):
        return None
    return HeadSignal(kind, module.weight, module.bias, None, constant)


def noise_signal(noise: nn.Module) -> HeadSignal | None:
    """Return the `HeadSignal` of the variances of a `NoiseVariance`; `None` if it has parts that must be called."""
    if not isinstance(noise, NoiseVariance) or not is_plain(noise, NoiseVariance):
        return None
    signal = linear_signal(noise.proj, "softplus", noise.floor)
    return None if signal is None or signal.bias is not None else replace_fields(signal, bias=noise.bias)


def decay_signal(decay: nn.Module | None, kind: str = "decay") -> HeadSignal | None:
    """Return the `HeadSignal` of a `StepDecay`; `None` if it has parts that must be called.

    The kind "decay" gives log-decays, "softplus" gives steps, and "decay-step" gives both.
    """
    if not isinstance(decay, StepDecay) or not is_plain(decay, StepDecay):
        return None
    dynamics, signal = decay.dynamics, linear_signal(decay.proj, kind, 0.0)
    if signal is None or signal.bias is not None or not is_plain(dynamics, StepDynamics):
        return None
    log_rate = None if kind == "softplus" else dynamics.log_rate
    return replace_fields(signal, bias=dynamics.step_bias, log_rate=log_rate)


def fused_signals(x: Tensor, *groups: HeadSignal | None) -> list[Tensor] | None:
    """Return `head_signals` of tokens `[B, T, D]`; `None` if a group is `None` or no kernel fits."""
    signals = [signal for signal in groups if signal is not None]
    if len(signals) < len(groups) or not can_fuse_signals(x, signals):
        return None
    tensors = [tensor for s in signals for tensor in (s.weight, s.bias, s.log_rate) if tensor is not None]
    return head_signals(x, signals) if all(type(tensor) in _PLAIN_PARAMETERS for tensor in tensors) else None
