"""Layers: one file per paper, each a subclass of `Mixer`. `MIXERS` maps the names used in configurations to classes."""

from __future__ import annotations

from collections.abc import Mapping

from kalmix.errors import unknown_name
from kalmix.layers.afa import AdaptiveFilterAttention
from kalmix.layers.afa_transformer import AFATransformerBlock, AFATransformerState
from kalmix.layers.attention import Attention, AttentionState
from kalmix.layers.base import Mixer
from kalmix.layers.bayesian import BayesianLayer
from kalmix.layers.controlled_filter import ControlledFilter
from kalmix.layers.deltanet import DeltaNet
from kalmix.layers.design_layer import DesignLayer
from kalmix.layers.filter_conv2d import FilterConv2d
from kalmix.layers.gated_deltanet import GatedDeltaNet
from kalmix.layers.gated_kalmanet import GatedKalmaNet
from kalmix.layers.gla import GLA
from kalmix.layers.kda import KDA
from kalmix.layers.kla import KLA, KLAState
from kalmix.layers.linear_attention import LinearAttention
from kalmix.layers.mamba2 import Mamba2
from kalmix.layers.memory_base import MemoryState
from kalmix.layers.output_only import OutputOnly
from kalmix.layers.radial_tangential import RadialTangentialAttention
from kalmix.layers.recurrent_afa import RecurrentAFAState, RecurrentFilterAttention
from kalmix.layers.retnet import RetNet

MIXERS: dict[str, type[Mixer]] = {
    "kla": KLA,
    "bayesian": BayesianLayer,
    "gated-kalmanet": GatedKalmaNet,
    "afa": AdaptiveFilterAttention,
    "rt-afa": RadialTangentialAttention,
    "recurrent-afa": RecurrentFilterAttention,
    "afa-transformer": AFATransformerBlock,
    "controlled-afa": ControlledFilter,
    "deltanet": DeltaNet,
    "gated-deltanet": GatedDeltaNet,
    "kda": KDA,
    "linear-attention": LinearAttention,
    "retnet": RetNet,
    "gla": GLA,
    "mamba2": Mamba2,
    "attention": Attention,
    "design": DesignLayer,
}


def mixer_class(name: str, options: Mapping[str, object]) -> type[Mixer]:
    """Return the layer class called `name`, and check names and types of `options`. Build it by `cls(D, **options)`.

    Values such as sizes are not checked here: the constructor of the layer refuses wrong ones.

    Args:
        name: key of `MIXERS`, such as "kla"; in lower case.
        options: keyword arguments of the layer, without `hidden_size`; `{}` for none.

    Returns:
        The class, a subclass of `Mixer`.

    Raises:
        ArgumentError: no layer has this name; `options` is not a mapping; an option has an unknown name or the wrong
            type, or a required one is missing; or the op has no kernel of the name `options["kernel"]`.

    Example:
        >>> from kalmix.layers import mixer_class
        >>> mixer_class("kla", {"slots": 8}).__name__
        'KLA'
    """
    if not isinstance(name, str) or name not in MIXERS:
        raise unknown_name("mixer", name, MIXERS)
    MIXERS[name].check_options(name, options)
    return MIXERS[name]


__all__ = [
    "GLA",
    "KDA",
    "KLA",
    "MIXERS",
    "AFATransformerBlock",
    "AFATransformerState",
    "AdaptiveFilterAttention",
    "Attention",
    "AttentionState",
    "BayesianLayer",
    "ControlledFilter",
    "DeltaNet",
    "DesignLayer",
    "FilterConv2d",
    "GatedDeltaNet",
    "GatedKalmaNet",
    "KLAState",
    "LinearAttention",
    "Mamba2",
    "MemoryState",
    "Mixer",
    "OutputOnly",
    "RadialTangentialAttention",
    "RecurrentAFAState",
    "RecurrentFilterAttention",
    "RetNet",
    "mixer_class",
]
