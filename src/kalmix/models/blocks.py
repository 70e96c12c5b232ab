"""A block: a mixer in a residual stream, and an MLP behind the mixers that do not bring their own gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from kalmix.errors import ArgumentError
from kalmix.layers import mixer_class
from kalmix.layers.base import Mixer
from kalmix.layers.config_io import has_config, to_config
from kalmix.layers.modules import RMSNorm, sample_gaussian
from kalmix.segments import Segments
from kalmix.types import Belief, Filtered
from kalmix.validation import check_positive_int

LayerEntry = str | Mapping[str, Any]  # of a model's list of layers: a mixer's name, or a mapping of its options


class LayerSpec(NamedTuple):
    """One entry of a model's list of layers: a mixer's name, its options, and the width of the MLP behind it."""

    mixer: str
    options: dict[str, Any]
    mlp: int


def layer_specs(layers: Sequence[LayerEntry], hidden_size: int) -> list[LayerSpec]:
    """The specs of a list of layers, each a mixer's name or a mapping such as `{"mixer": "attention", "heads": 4}`.

    The MLP is absent (0) where the mixer is gated itself, otherwise 8/3 of the hidden size, unless `"mlp"` says.

    Raises:
        ArgumentError: no layers, an unknown mixer, or an option the mixer does not have.
    """
    check_positive_int("hidden_size", hidden_size)
    if not isinstance(layers, list | tuple) or not layers:
        raise ArgumentError("layers", got=repr(layers), expected="a list of mixer names or mappings, one a block")
    return [_spec(entry, hidden_size) for entry in layers]


def hybrid_layers(
    mixer: LayerEntry = "gated-kalmanet",
    *,
    blocks: int = 30,
    attention_at: Sequence[int] = (6, 14, 22, 29),
    attention: LayerEntry = "attention",
) -> list[str | dict[str, Any]]:
    """A list of layers in which attention takes the position of `mixer` at some positions.

    As it is, the hybrid of Gated KalmaNet's section M: 26 blocks of it and 4 of attention, with QK norm.

    Args:
        mixer, attention: entries of a model's list of layers, as `layer_specs` takes them.
        blocks: how many layers there are.
        attention_at: positions of attention, from 0.

    Raises:
        ArgumentError: `blocks` is no positive integer, or a position is not one of a block or is there twice.
    """
    check_positive_int("blocks", blocks)
    positions = set(attention_at)
    if not positions <= set(range(blocks)) or len(positions) != len(attention_at):
        raise ArgumentError("attention_at", got=repr(attention_at), expected=f"distinct indices from 0 to {blocks - 1}")
    entries = (attention if position in positions else mixer for position in range(blocks))
    return [entry if isinstance(entry, str) else dict(entry) for entry in entries]


def layers_to_json(layers: Sequence[LayerEntry]) -> list[str | dict[str, Any]]:
    """Return the same list as JSON can hold it: options that are dataclasses, such as a `Design`, become mappings.

    Ridges and solvers become those of `kalmix.layers.config_io`.
    """

    def plain(value: object) -> object:
        if has_config(value):
            return to_config(value)
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value

    return [entry if isinstance(entry, str) else {k: plain(v) for k, v in entry.items()} for entry in layers]


def _spec(entry: object, hidden_size: int) -> LayerSpec:
    options: dict[str, Any] = (
        {"mixer": entry} if isinstance(entry, str) else dict(entry) if isinstance(entry, Mapping) else {}
    )
    name = options.pop("mixer", None)
    if name is None:
        raise ArgumentError("layers", problem=f"contains {entry!r}", expected="layer names, or mappings with a 'mixer'")
    mlp = options.pop("mlp", None)
    mixer = mixer_class(name, options)
    if mlp is None:
        mlp = 0 if mixer.includes_mlp else -(-8 * hidden_size // 24) * 8
    if mlp != 0:
        check_positive_int("mlp", mlp)
    return LayerSpec(name, options, mlp)


class Posterior(NamedTuple):
    """What a block knows before it commits to an output: sample the read-out and `Block.finish` each sample."""

    residual: Tensor
    mean: Tensor
    variance: Tensor
    context: object


class BlockOutput(NamedTuple):
    """What a block hands on.

    Attributes:
        hidden_state: `[B, T, D]` residual stream behind the block.
        state: the mixer's state after the last token.
        mixer_input: `[B, T, D]` what the mixer was given, to filter it again from an earlier state.
        belief: the mixer's `Filtered` in output space, if asked for.
        posterior: the posterior before gate and projection, if asked for.
    """

    hidden_state: Tensor
    state: Belief
    mixer_input: Tensor
    belief: Filtered | None
    posterior: Posterior | None


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.in_proj: nn.Linear = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.out_proj: nn.Linear = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., D]` to `[..., D]`."""
        gate, value = self.in_proj(x).chunk(2, dim=-1)
        return self.out_proj(F.silu(gate) * value)


class Block(nn.Module):
    """x + mixer(norm(x)), then the same with an MLP if there is one."""

    def __init__(self, hidden_size: int, spec: LayerSpec, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.norm: RMSNorm = RMSNorm(hidden_size, norm_eps)
        self.mixer: Mixer = mixer_class(spec.mixer, spec.options)(hidden_size, **spec.options)
        self.mlp_norm: RMSNorm | None = RMSNorm(hidden_size, norm_eps) if spec.mlp else None
        self.mlp: MLP | None = MLP(hidden_size, spec.mlp) if spec.mlp else None

    def forward(
        self,
        x: Tensor,
        state: Belief | None = None,
        segments: Segments | None = None,
        *,
        sample: bool = False,
        output_belief: bool = False,
        output_posterior: bool = False,
    ) -> BlockOutput:
        """Pass on the posterior mean, or one sample of the posterior with `sample` (section 5.5)."""
        mixer_input = self.norm(x)
        variance = self.mixer.has_posterior and (sample or output_belief or output_posterior)
        (mean, var, after), context = self.mixer.read(mixer_input, state, segments, variance)
        readout = sample_gaussian(mean, var) if sample and var is not None else mean
        output = self._output_belief(mean, var, after, context) if output_belief else None
        kept = Posterior(x, mean, var, context) if output_posterior and var is not None else None
        return BlockOutput(self.finish(x, readout, context), after, mixer_input, output, kept)

    def finish(self, residual: Tensor, readout: Tensor, context: object) -> Tensor:
        """The residual stream behind the block, given a read-out, or samples of it stacked in front."""
        x = residual + self.mixer.project_out(readout, context)
        return x if self.mlp is None or self.mlp_norm is None else x + self.mlp(self.mlp_norm(x))

    def _output_belief(self, mean: Tensor, variance: Tensor | None, state: Belief, context: object) -> Filtered:
        spread = None if variance is None else self.mixer.project_out_variance(variance, context)
        return Filtered(self.mixer.project_out(mean, context), spread, state)
