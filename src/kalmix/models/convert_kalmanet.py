"""Converter of released Gated KalmaNet checkpoints (awslabs/hybrid-model-factory) to models with the same logits.

The released models are Qwen3 models in which Gated KalmaNet replaces some attention layers ("hybrid_qwen3"). They
differ from `kalmix.layers.GatedKalmaNet` in three ways, each converted exactly:

- Their write gate scales both key and value, so its square enters the state: `gain="squared"`.
- They scale the read-out by 1 / sqrt(head_dim) before the output norm: the epsilon of our norm is head_dim times
  theirs.
- They may have more query heads than key and value heads (grouped-query attention), each with its own gates. A state
  belongs to a query head, so the weights of shared keys and values are repeated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix.models.checkpoint_io import (
    TIED_WEIGHTS,
    check_allowed,
    check_config,
    load_converted_weights,
    read_checkpoint,
    squeeze_conv_weight,
)
from kalmix.models.huggingface import KalmixConfig, KalmixForCausalLM

# Defaults of `HybridQwen3Config` and its `GKAConfig`, for keys that a config.json lacks.
DEFAULTS: dict[str, Any] = {
    **{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-6},
    **{"tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
GKA_DEFAULTS: dict[str, Any] = {
    **{"use_alpha_connection": True, "use_forgetting_gate": True, "use_beta_gate": True, "use_gate": True},
    **{"gla_rescale": True, "num_iter": 30, "ridge_strength": 0.02, "conv_size": 4, "norm_eps": 1e-6},
}
# Values that kalmix supports; an absent key counts as the first, except the model type. Other keys change no output.
REQUIRED: dict[str, tuple[Any, ...]] = {
    "model_type": ("hybrid_qwen3",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
}
GKA_REQUIRED: dict[str, tuple[Any, ...]] = {
    "solver_type": ("chebyshev",),
    "use_v_conv": (True,),
    "kv_proj_rank": (None,),
}
MIXER_NAMES = {"*": "attention", "full_attention": "attention", "GKA": "gated-kalmanet"}
BLOCK_WEIGHTS: dict[str, tuple[str, ...]] = {
    "norm.weight": ("input_layernorm.weight",),
    "mlp_norm.weight": ("post_attention_layernorm.weight",),
    "mlp.in_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.out_proj.weight": ("mlp.down_proj.weight",),
}
MIXER_WEIGHTS: dict[str, dict[str, tuple[str, ...]]] = {
    "gated-kalmanet": {
        "qkv_proj.weight": ("gka.q_proj.weight", "gka.k_proj.weight", "gka.v_proj.weight"),
        "conv.weight": ("gka.q_conv1d.weight", "gka.k_conv1d.weight", "gka.v_conv1d.weight"),
        "gain_proj.weight": ("gka.b_proj.weight",),
        "gain_proj.bias": ("gka.b_proj.bias",),
        "mix_proj.weight": ("gka.alpha_proj.weight",),
        "mix_proj.bias": ("gka.alpha_proj.bias",),
        "decay.proj.weight": ("gka.a_proj.weight",),
        "decay.dynamics.log_rate": ("gka.A_log",),
        "decay.dynamics.step_bias": ("gka.dt_bias",),
        "gate_proj.weight": ("gka.g_proj.weight",),
        "norm.weight": ("gka.o_norm.weight",),
        "out_proj.weight": ("gka.o_proj.weight",),
    },
    "attention": {
        "in_proj.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "query_norm.weight": ("self_attn.q_norm.weight",),
        "key_norm.weight": ("self_attn.k_norm.weight",),
        "out_proj.weight": ("self_attn.o_proj.weight",),
    },
}
MODEL_WEIGHTS = {
    "model.embed_tokens.weight": ("model.embed_tokens.weight",),
    "model.norm.weight": ("model.norm.weight",),
    "lm_head.weight": ("lm_head.weight",),
}
_FORGETTING_GATE = re.compile(r"\.gka\.(a_proj\.weight|A_log|dt_bias)$")
_KEY_VALUE = re.compile(r"\.gka\.([kv])_(proj|conv1d)\.weight$")


class _HeadCounts(NamedTuple):
    """Numbers of query heads and of key and value heads of a released layer."""

    query: int
    key_value: int


def load_gated_kalmanet(folder: str | Path) -> KalmixForCausalLM:
    """Load a Gated KalmaNet language model as its authors released it (awslabs/hybrid-model-factory, "hybrid_qwen3").

    Such a model may also have attention layers. The code of the authors is not needed. Also exported by
    `kalmix.models.convert`.

    Args:
        folder: local folder with config.json, and `model.safetensors` or several safetensors files with their index.
            Nothing is downloaded.

    Returns:
        The model in evaluation mode, in float32 on the CPU, whatever the dtype of the file. Its logits are those of the
        original model in float32, up to rounding. Tokenizer files are not read.

    Raises:
        ArgumentError: a file is missing or damaged (also if `folder` is a name on the Hugging Face Hub), `model_type`
            is not "hybrid_qwen3", the configuration has layers other than Gated KalmaNet and full attention or another
            feature that kalmix does not support, or the weights do not match it. The message names the file, the key or
            the weight.
        TypeError: `folder` is not a path.

    Example:
        >>> from kalmix.models.convert import load_gated_kalmanet
        >>> model = load_gated_kalmanet("path/to/the/released/model")  # doctest: +SKIP
    """
    return convert_gated_kalmanet(*read_checkpoint(folder))


def convert_gated_kalmanet(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> KalmixForCausalLM:
    """Convert a released Gated KalmaNet language model.

    Args:
        config: contents of its config.json.
        weights: its state dict.

    Returns:
        The model in evaluation mode, in float32 on the CPU, with the same logits.

    Raises:
        ArgumentError: the configuration uses a feature that kalmix does not support, or a weight is missing, unknown,
            of another shape or not finite; names the key.
    """
    model = KalmixForCausalLM(gated_kalmanet_config(config))
    if not _gka_settings(config)["use_forgetting_gate"]:  # the released files contain its weights nevertheless
        weights = {name: weight for name, weight in weights.items() if not _FORGETTING_GATE.search(name)}
    mixers = [entry["mixer"] for entry in model.config.layers]
    tied = TIED_WEIGHTS if model.config.tie_word_embeddings else None
    load_converted_weights(
        model,
        weights,
        partial(_source_names, mixers),
        "Gated KalmaNet",
        partial(_repeat_key_values, _head_counts(config)),
        tied,
    )
    return model.eval()


def gated_kalmanet_config(config: Mapping[str, Any]) -> KalmixConfig:
    """Convert the configuration of a released Gated KalmaNet language model.

    Args:
        config: contents of its config.json.

    Returns:
        Configuration of the same architecture.

    Raises:
        ArgumentError: the configuration uses a feature that kalmix does not support; names the key.

    Example:
        >>> from kalmix.models.convert import gated_kalmanet_config
        >>> released = {"model_type": "hybrid_qwen3", "num_hidden_layers": 2, "layer_types": ["GKA", "full_attention"]}
        >>> [layer["mixer"] for layer in gated_kalmanet_config(released).layers]
        ['gated-kalmanet', 'attention']
    """
    check_allowed(config, REQUIRED)
    check_config(config, DEFAULTS)
    given = config.get("gka_config") or {}
    if not isinstance(given, Mapping):
        raise ArgumentError("config['gka_config']", got=repr(given), expected="a mapping")
    check_allowed(given, GKA_REQUIRED, "config['gka_config']")
    check_config(given, GKA_DEFAULTS, "config['gka_config']")
    settings, gka, heads = DEFAULTS | _select(config, DEFAULTS), _gka_settings(config), _head_counts(config)
    if gka["use_forgetting_gate"] and not given.get("use_forgetting_gate_kk", True):
        expected = "True (kalmix forgets keys with their values)"
        raise ArgumentError("config['gka_config']['use_forgetting_gate_kk']", got="False", expected=expected)
    kalmanet = {
        "mixer": "gated-kalmanet",
        "heads": heads.query,
        "head_dim": settings["head_dim"],
        "decay": gka["use_forgetting_gate"],
        "gain": "squared" if gka["use_beta_gate"] else None,
        "mix": gka["use_alpha_connection"],
        "ridge": gka["ridge_strength"],
        "solver": {"name": "chebyshev", "iterations": gka["num_iter"]},
        "conv": gka["conv_size"],
        "gate": "silu" if gka["use_gate"] else None,
        "norm_eps": gka["norm_eps"] * (settings["head_dim"] if gka["gla_rescale"] else 1),
        "mlp": settings["intermediate_size"],
    }
    attention = {
        "mixer": "attention",
        "heads": heads.query,
        "kv_heads": heads.key_value,
        "head_dim": settings["head_dim"],
        "rotary_base": _rotary_base(config),
        "norm_eps": settings["rms_norm_eps"],
        "mlp": settings["intermediate_size"],
    }
    entries = {"gated-kalmanet": kalmanet, "attention": attention}
    copied = ("vocab_size", "hidden_size", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
    layers = [dict(entries[kind]) for kind in _mixer_names(config, settings["num_hidden_layers"])]
    return KalmixConfig(layers=layers, norm_eps=settings["rms_norm_eps"], **{key: settings[key] for key in copied})


def _select(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key in defaults}


def _gka_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return GKA_DEFAULTS | _select(config.get("gka_config") or {}, GKA_DEFAULTS)


def _head_counts(config: Mapping[str, Any]) -> _HeadCounts:
    query = config.get("num_attention_heads", DEFAULTS["num_attention_heads"])
    key_value = config.get("num_key_value_heads", DEFAULTS["num_key_value_heads"]) or query
    if query % key_value:
        raise ArgumentError("config['num_key_value_heads']", got=key_value, expected=f"a divisor of {query}")
    return _HeadCounts(query, key_value)


def _mixer_names(config: Mapping[str, Any], blocks: int) -> list[str]:
    """Return the name of the mixer of each block."""
    pattern = config.get("hybrid_override_pattern")
    kinds = pattern.split("-") if pattern else config.get("layer_types") or ["*"] * blocks
    if len(kinds) != blocks:
        raise ArgumentError(
            "config['layer_types']", problem=f"has {len(kinds)} entries", expected=f"{blocks}, one per layer"
        )
    for kind in kinds:
        if kind not in MIXER_NAMES:
            raise ArgumentError(
                "config['layer_types']", got=f"with {kind!r}", expected=" and ".join(map(repr, MIXER_NAMES))
            )
    return [MIXER_NAMES[kind] for kind in kinds]


def _rotary_base(config: Mapping[str, Any]) -> float:
    rope = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope.setdefault("rope_type", rope.get("type", "default"))
    check_allowed(rope, {"rope_type": ("default",)}, "config['rope_parameters']")
    return float(rope["rope_theta"])


def _source_names(mixers: list[str], name: str) -> tuple[str, ...]:
    """Return the names in the released model of the weights that make up the weight `name` of kalmix."""
    if name in MODEL_WEIGHTS:
        return MODEL_WEIGHTS[name]
    index, part = name.removeprefix("model.layers.").split(".", 1)
    names = BLOCK_WEIGHTS.get(part) or MIXER_WEIGHTS[mixers[int(index)]][part.removeprefix("mixer.")]
    return tuple(f"model.layers.{index}.{source}" for source in names)


def _repeat_key_values(heads: _HeadCounts, name: str, weight: Tensor) -> Tensor:
    """Return a released weight in our shape: those of keys and values are repeated for each query head."""
    weight = squeeze_conv_weight(name, weight)
    if not _KEY_VALUE.search(name) or weight.shape[0] % heads.key_value:
        return weight
    return weight.unflatten(0, (heads.key_value, -1)).repeat_interleave(heads.query // heads.key_value, 0).flatten(0, 1)
