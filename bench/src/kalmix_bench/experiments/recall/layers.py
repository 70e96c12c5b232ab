"""Layers that benchmarks compare, by name, and options that give them equal state sizes."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from kalmix.errors import ArgumentError, unknown_name
from kalmix.layers import MIXERS, Mixer, mixer_class
from kalmix.validation import check_positive_int

Options = dict[str, Any]

# Every mixer that needs only a hidden size, variants from the papers, and layers of other packages. To add a layer to
# all benchmarks, add a name here.
LAYERS: dict[str, Options] = {
    **{name: {"mixer": name} for name in MIXERS if name != "design"},
    "kla-noise-free": {"mixer": "kla", "process_noise": False},  # section 5.6 of Kalman Linear Attention
    "kla-plus": {"mixer": "kla", "samples": 10},  # KLA+: trains and predicts with posterior samples
    "kla-zoh": {"mixer": "kla", "discretization": "zoh"},
    "kalmanet-bare": {"mixer": "gated-kalmanet", "decay": False, "gain": None, "mix": False},  # GKA, Figure 2a
    # MesaNet: all past tokens as in Gated KalmaNet, but a constant ridge (which MesaNet learns, from 1 on) and CG
    "mesanet": {
        "mixer": "gated-kalmanet",
        "ridge": {"name": "fixed", "value": 1.0},
        "solver": {"name": "conjugate-gradient", "iterations": 30},
        "mix": False,
    },
    "bayesian": {"mixer": "bayesian", "decays_per_head": "key"},  # Memory by Design; not the default of the layer
    "bayesian-no-conv": {"mixer": "bayesian", "decays_per_head": "key", "conv": 0},
    "bayesian-one-decay": {"mixer": "bayesian", "decays_per_head": 1},
    "bayesian-slow": {"mixer": "bayesian-slow"},  # one decay per head, with initial rates 16 times lower
    "gated-deltanet-no-conv": {"mixer": "gated-deltanet", "conv": 0},
    "mamba2-no-conv": {"mixer": "mamba2", "conv": 1},
    "mamba-1": {"mixer": "mamba-1"},
    "mamba-1-no-conv": {"mixer": "mamba-1", "conv": 0},
    "mlstm": {"mixer": "mlstm"},
    "mlstm-no-conv": {"mixer": "mlstm", "conv": 0},
    "rwkv-7": {"mixer": "rwkv-7"},
    "rwkv-7-no-shift": {"mixer": "rwkv-7", "shift": False},
}


def parse_layer(text: str) -> Options:
    """Return a layer as an entry of a model's list of layers.

    Args:
        text: a name of `LAYERS` or `MIXERS`, optionally followed by a colon and options as a JSON object, such as
            `kla:{"slots": 8}`. The options override those of the name.

    Raises:
        ArgumentError: there is no such layer, or an option is unknown or has the wrong type.
    """
    name, overrides = _split(text)
    options = dict(LAYERS.get(name) or {"mixer": name})
    if options["mixer"] not in MIXERS:  # variants and layers of other packages register on import
        import_module("kalmix_bench.experiments.recall.variants")
        import_module("kalmix_bench.experiments.recall.baselines")
    mixer = options.pop("mixer")
    options |= overrides
    mixer_class(mixer, {option: value for option, value in options.items() if option != "samples"})
    if "samples" in options:
        check_positive_int("samples", options["samples"])
    return {"mixer": mixer, **options}


def layer_name(text: str) -> str:
    """Return the canonical text of a layer, independent of the order and spacing of its options.

    Raises:
        ArgumentError: there is no such layer, or its options are not a JSON object.
    """
    name, overrides = _split(text)
    return f"{name}:{json.dumps(overrides, sort_keys=True)}" if overrides else name


def _split(text: str) -> tuple[str, Options]:
    name, colon, json_text = str(text).partition(":")
    if name not in LAYERS and name not in MIXERS:
        raise unknown_name("layer", name, dict.fromkeys((*LAYERS, *MIXERS)))
    if not colon:
        return name, {}
    try:
        overrides = json.loads(json_text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        overrides = None
    if not isinstance(overrides, dict):
        expected = 'a name, a colon and options as a JSON object, such as kla:{"slots": 8}'
        raise ArgumentError("layer", got=repr(text), expected=expected)
    return name, overrides


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def sized(options: Options, width: int, state: int, heads: int, values: float = 1.0) -> Options:
    """Return a layer with about `state` state elements, matched as in Table 11 of Kalman Linear Attention.

    Sizes given in `options` are kept; its `heads` override `heads`.

    Raises:
        ArgumentError: the state size does not divide into these sizes.
    """
    sizes = MIXERS[options["mixer"]].options_for_state_size(
        width, state, **{"heads": heads, "values": values, **options}
    )
    return {**sizes, **options}


def state_size(mixer: Mixer) -> int | None:
    """Return `Mixer.state_size`, or `None` if it grows with the sequence length."""
    one, two = mixer.state_size(1), mixer.state_size(2)
    return one if one == two else None
