"""Blocks of a model (a mixer and an optional MLP, both residual), and the list of layers that describes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from operator import index
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from kalmix.distributed.tensor_parallel import Plan, Split, check_divides
from kalmix.errors import ArgumentError
from kalmix.layers import mixer_class
from kalmix.layers.base import Mixer, option_types
from kalmix.layers.config_io import has_config, to_config
from kalmix.layers.fused import can_fuse_swiglu, swiglu, swiglu_linear, without_storing
from kalmix.layers.modules import RMSNorm, is_plain, sample_gaussian
from kalmix.segments import Segments
from kalmix.steps import Slots
from kalmix.types import Belief, Filtered
from kalmix.validation import check_positive_int

ACTIVATIONS = ("swiglu", "relu2")  # of MLPs
LayerEntry = str | Mapping[str, Any]  # a mixer's name, or a mapping of its options with its name as "mixer"


class LayerSpec(NamedTuple):
    """Parsed entry of a model's list of layers.

    Attributes:
        mixer: name of the mixer.
        options: options of the mixer, without `hidden_size`.
        mlp: hidden width of the MLP that follows the mixer; 0 for no MLP.
    """

    mixer: str
    options: dict[str, Any]
    mlp: int


def layer_specs(
    layers: Sequence[LayerEntry], hidden_size: int, *, heads: int | None = None, mlp: int | None = None
) -> list[LayerSpec]:
    """Parse a list of layers.

    Args:
        layers: one entry per block: a mixer's name, or a mapping of its options with its name as `"mixer"`, such as
            `{"mixer": "attention", "heads": 4}`. The key `"mlp"` sets the hidden width of the block's MLP, 0 for none.
            Default: none if the mixer has `includes_mlp`, otherwise `mlp`.
        hidden_size: width of the residual stream.
        heads: number of heads of mixers that have heads and do not name their number. Default: the mixer's own.
        mlp: default hidden width of MLPs. Default: 8/3 of `hidden_size`, rounded up to a multiple of 8.

    Returns:
        One `LayerSpec` per block.

    Raises:
        ArgumentError: `layers` is empty or not a list, names an unknown mixer or option, or has an option of the wrong
            type.

    Example:
        >>> from kalmix.models.blocks import layer_specs
        >>> layer_specs(["kla", {"mixer": "attention", "heads": 4}], 64)[1]
        LayerSpec(mixer='attention', options={'heads': 4}, mlp=176)
    """
    check_positive_int("hidden_size", hidden_size)
    if not isinstance(layers, list | tuple) or not layers:
        raise ArgumentError("layers", got=repr(layers), expected="a non-empty list of layer names or mappings")
    mlp = -(-8 * hidden_size // 24) * 8 if mlp is None else mlp
    return [_spec(entry, heads, mlp) for entry in layers]


def hybrid_layers(
    mixer: LayerEntry = "gated-kalmanet",
    *,
    blocks: int = 30,
    attention_at: Iterable[int] = (6, 14, 22, 29),
    attention: LayerEntry = "attention",
) -> list[str | dict[str, Any]]:
    """Build the list of layers of a hybrid model: attention in the blocks `attention_at`, `mixer` in all others.

    The defaults are the hybrid of *Gated KalmaNet*, appendix M: 26 blocks of Gated KalmaNet and 4 of attention.

    Args:
        mixer: layer of the blocks without attention: a name such as "kla", or a mapping of its options with its name as
            "mixer", such as `{"mixer": "bayesian", "heads": 4}`. `KalmixConfig` and `LanguageModel` check names and
            options; this function does not.
        blocks: number of blocks.
        attention_at: iterable of distinct indices of the blocks with attention, from 0 to `blocks - 1`, in any order;
            may be empty. The default needs at least 30 blocks.
        attention: layer of the blocks `attention_at`: a name or a mapping, like `mixer`. The default is
            `kalmix.layers.Attention`.

    Returns:
        A list of `blocks` names or mappings, for `KalmixConfig.layers` or `LanguageModel`. Each mapping is a shallow
        copy.

    Raises:
        ArgumentError: `blocks` is not a positive integer, `attention_at` does not contain integers, an index is
            negative, too large or repeated, or a layer is neither a string nor a mapping.

    Example:
        >>> from kalmix.models import hybrid_layers
        >>> hybrid_layers("kla", blocks=3, attention_at=[1])
        ['kla', 'attention', 'kla']
    """
    check_positive_int("blocks", blocks)
    for name, entry in (("mixer", mixer), ("attention", attention)):
        if not isinstance(entry, str | Mapping):
            raise ArgumentError(name, got=repr(entry), expected="the name of a layer or a mapping of its options")
    try:
        positions = list(map(index, attention_at))
    except TypeError:
        positions = [-1]  # refused below
    if not set(positions) <= set(range(blocks)) or len(set(positions)) != len(positions):
        raise ArgumentError("attention_at", got=repr(attention_at), expected=f"distinct indices from 0 to {blocks - 1}")
    entries = (attention if position in positions else mixer for position in range(blocks))
    return [entry if isinstance(entry, str) else dict(entry) for entry in entries]


def layers_to_json(layers: Sequence[LayerEntry]) -> list[str | dict[str, Any]]:
    """Return a list of layers that JSON can represent.

    A `Design` among the options becomes a mapping of its fields. A ridge or a solver becomes a mapping with its name
    (`kalmix.layers.config_io`).
    """

    def to_json(value: object) -> object:
        if has_config(value):
            return to_config(value)
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value

    return [entry if isinstance(entry, str) else {k: to_json(v) for k, v in entry.items()} for entry in layers]


def _spec(entry: object, heads: int | None, default_mlp: int) -> LayerSpec:
    options: dict[str, Any] = (
        {"mixer": entry} if isinstance(entry, str) else dict(entry) if isinstance(entry, Mapping) else {}
    )
    name = options.pop("mixer", None)
    if name is None:
        raise ArgumentError("layers", problem=f"contains {entry!r}", expected="layer names, or mappings with a 'mixer'")
    mlp = options.pop("mlp", None)
    mixer = mixer_class(name, options)
    if heads is not None and "heads" in option_types(mixer):
        options.setdefault("heads", heads)
    if mlp is None:
        mlp = 0 if mixer.includes_mlp else default_mlp
    if mlp != 0:
        check_positive_int("mlp", mlp)
    return LayerSpec(name, options, mlp)


class Posterior(NamedTuple):
    """Gaussian posterior of a block's read-out, before gate and output projection.

    Sample `mean` and `variance`, then pass each sample to `Block.finish` to get samples of the block's output.

    Attributes:
        residual: `[B, T, D]`, input of the block.
        mean: `[B, T, E]`, posterior mean of the read-out.
        variance: `[B, T, E]`, posterior variance of the read-out, in float32 (float64 if the block is).
        context: tensors that the mixer's output projection needs, as `Mixer.read` returns them.
    """

    residual: Tensor
    mean: Tensor
    variance: Tensor
    context: object


class Link(NamedTuple):
    """Slots of a block, and the addition that it takes from the previous block or leaves to the next one.

    Blocks that pass `update` on to the next one add it in the kernel of that block's first norm.

    Attributes:
        slots: slots of each row in a step, in which the mixer updates its pool of states in place; `None` for other
            calls.
        update: `update` of the previous block's output, to be added to the input.
        defer: whether to return the last summand of the output as `update`, instead of adding it.
    """

    slots: Slots | None = None
    update: Tensor | None = None
    defer: bool = False


UNLINKED = Link()


class BlockOutput(NamedTuple):
    """Output of a block.

    Attributes:
        hidden_state: `[B, T, D]`, residual stream after the block, without `update`.
        state: state of the mixer after the last token; `None` without `output_state`.
        mixer_input: `[B, T, D]`, normalized input of the mixer. With an earlier state it is enough to filter the tokens
            again. `None` without `output_state`.
        belief: `Filtered` of the mixer's output: mean and variance `[B, T, D]`. `None` without `output_belief`.
        posterior: posterior of the read-out. `None` without `output_posterior`, or if the mixer has no posterior.
        update: `[B, T, D]`, still to be added to `hidden_state`; only with `defer`, otherwise `None`.
    """

    hidden_state: Tensor
    state: Belief | None
    mixer_input: Tensor | None
    belief: Filtered | None
    posterior: Posterior | None
    update: Tensor | None = None


class MLP(nn.Module):
    """SwiGLU, `W_out (silu(W_gate x) * W_in x)`, or `W_out relu(W_in x)^2`; without biases.

    Args:
        hidden_size: input and output width D.
        intermediate_size: hidden width.
        activation: "swiglu" or "relu2".
    """

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str = "swiglu") -> None:
        super().__init__()
        self.activation = activation
        width = 2 * intermediate_size if activation == "swiglu" else intermediate_size
        self.in_proj: nn.Linear = nn.Linear(hidden_size, width, bias=False)
        self.out_proj: nn.Linear = nn.Linear(intermediate_size, hidden_size, bias=False)

    def head_plan(self, ranks: int) -> Plan:
        """Return how ranks divide the parameters: by hidden columns."""
        width = self.out_proj.in_features
        check_divides(self, "hidden columns", width, ranks)
        parts = (width,) * (self.in_proj.out_features // width)
        return {"in_proj.weight": Split(0, parts), "out_proj.weight": Split(1, (width,))}

    def keep_heads(self, ranks: int, rank: int) -> None:
        """Do nothing: no size but those of the weights depends on the number of ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to `x` `[..., D]`; return `[..., D]`."""
        is_product = is_plain(self.in_proj, nn.Linear) and self.in_proj.bias is None
        if is_product and self.activation == "swiglu" and can_fuse_swiglu(x, self.in_proj.weight):
            return self.out_proj(swiglu_linear(x, self.in_proj.weight))
        activate = swiglu if self.activation == "swiglu" else squared_relu
        return without_storing(partial(activate, self.in_proj(x)), self.out_proj)


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0) squared."""
    return F.relu(x).square()


class Block(nn.Module):
    """Residual block: x + mixer(norm(x)), then x + mlp(norm(x)) if the spec has an MLP.

    Args:
        hidden_size: width D of the residual stream.
        spec: mixer, its options and the MLP's width.
        norm_eps: epsilon of both norms.
        mlp_activation: activation of the MLP; see `MLP`.
    """

    def __init__(
        self, hidden_size: int, spec: LayerSpec, norm_eps: float = 1e-6, mlp_activation: str = "swiglu"
    ) -> None:
        super().__init__()
        self.norm: RMSNorm = RMSNorm(hidden_size, norm_eps)
        self.mixer: Mixer = mixer_class(spec.mixer, spec.options)(hidden_size, **spec.options)
        self.mlp_norm: RMSNorm | None = RMSNorm(hidden_size, norm_eps) if spec.mlp else None
        self.mlp: MLP | None = MLP(hidden_size, spec.mlp, mlp_activation) if spec.mlp else None

    def forward(
        self,
        x: Tensor,
        state: Belief | None = None,
        segments: Segments | None = None,
        *,
        sample: bool = False,
        output_state: bool = True,
        output_belief: bool = False,
        output_posterior: bool = False,
        link: Link = UNLINKED,
    ) -> BlockOutput:
        """Apply the block.

        Args:
            x: `[B, T, D]`.
            state: state of the mixer after the previous tokens; `None` for its prior.
            segments: sequences in `x`; `None` if each row is one sequence.
            sample: use a sample of the posterior as the read-out instead of its mean (section 5.5 of Kalman Linear
                Attention). Without effect if the mixer has no posterior.
            output_state: return the state and the input of the mixer. They contain views, which FSDP2 warns about.
            output_belief: return the belief about the mixer's output.
            output_posterior: return the posterior of the read-out.
            link: slots, and the addition that blocks pass on in a stack.
        """
        x, mixer_input = self._normalize(x, link.update)
        belief = posterior = None
        if link.slots is not None:
            final_state = state
            readout, context = self.mixer.read_step(mixer_input, state, link.slots)
        else:
            variance = self.mixer.has_posterior and (sample or output_belief or output_posterior)
            (mean, var, final_state), context = self.mixer.try_read(mixer_input, state, segments, variance)
            group = self.mixer.tensor_parallel
            readout = sample_gaussian(mean, var, group) if sample and var is not None else mean
            belief = self._output_belief(mean, var, final_state, context) if output_belief else None
            posterior = Posterior(x, mean, var, context) if output_posterior and var is not None else None
        if link.defer and type(self).finish is Block.finish:
            output, deferred = self._summands(x, readout, context)
        else:
            # Not the instance's `finish`: FSDP2 may have wrapped it, and torch 2.11 frees parameters after a wrapped
            # call.
            output, deferred = type(self).finish(self, x, readout, context), None
        returned = (final_state, mixer_input) if output_state else (None, None)
        return BlockOutput(output, *returned, belief, posterior, deferred)

    def _normalize(self, x: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum of x and `update`, and its norm."""
        if update is None:
            return x, self.norm(x)
        if is_plain(self.norm, RMSNorm):
            return self.norm.add(update, x)
        x = x + update
        return x, self.norm(x)

    def finish(self, residual: Tensor, readout: Tensor, context: object) -> Tensor:
        """Compute the block's output from a read-out.

        Args:
            residual: `[B, T, D]`, input of the block.
            readout: `[..., B, T, E]`, read-out of the mixer, or samples of it along leading dimensions.
            context: as `Posterior.context`.

        Returns:
            `[..., B, T, D]`, residual stream after the block.
        """
        total, last = self._summands(residual, readout, context)
        return total + last

    def _summands(self, residual: Tensor, readout: Tensor, context: object) -> tuple[Tensor, Tensor]:
        """Return two tensors whose sum is the block's output: the residual stream, and the last addition to it."""
        output = self.mixer.project_out(readout, context)
        if self.mlp is None or self.mlp_norm is None:
            return residual, output
        if not is_plain(self.mlp_norm, RMSNorm):
            x = residual + output
            return x, self.mlp(self.mlp_norm(x))
        x, mlp_input = self.mlp_norm.add(output, residual)
        return x, without_storing(partial(self.mlp_norm, x), self.mlp, mlp_input)

    def _output_belief(self, mean: Tensor, variance: Tensor | None, state: Belief, context: object) -> Filtered:
        output_variance = None if variance is None else self.mixer.project_out_variance(variance, context)
        return Filtered(self.mixer.project_out(mean, context), output_variance, state)
