"""Converters of checkpoints of other libraries to `KalmixForCausalLM` models with the same logits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from kalmix.models.convert_kalmanet import convert_gated_kalmanet, gated_kalmanet_config, load_gated_kalmanet
from kalmix.models.huggingface import KalmixConfig, KalmixForCausalLM

__all__ = [
    "convert_gated_deltanet",
    "convert_gated_kalmanet",
    "gated_deltanet_config",
    "gated_kalmanet_config",
    "load_gated_deltanet",
    "load_gated_kalmanet",
]

# Defaults of flash-linear-attention's `GatedDeltaNetConfig`, for keys that a config.json lacks.
DEFAULTS: dict[str, Any] = {
    **{"vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 21, "norm_eps": 1e-6},
    **{"num_heads": 6, "num_v_heads": None, "head_dim": 256, "expand_v": 2.0},
    **{"use_gate": True, "output_gate_activation": "swish", "use_short_conv": True, "conv_size": 4},
    **{"hidden_ratio": 4, "intermediate_size": None, "allow_neg_eigval": False, "tie_word_embeddings": False},
    **{"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2},
}
# Values that kalmix supports; an absent key counts as the first, except the model type.
REQUIRED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gated_deltanet",),
    "attn": (None,),
    "attnres_block_size": (None,),
    "hidden_act": ("swish", "silu"),
    "conv_bias": (False,),
    "norm_first": (False,),
}
GATES = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
# Weight of a block of kalmix: weights of flash-linear-attention that are concatenated along dim 0.
BLOCK_WEIGHTS: dict[str, tuple[str, ...]] = {
    "norm.weight": ("attn_norm.weight",),
    "mixer.qkv_proj.weight": ("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight"),
    "mixer.conv.weight": ("attn.q_conv1d.weight", "attn.k_conv1d.weight", "attn.v_conv1d.weight"),
    "mixer.gain_proj.weight": ("attn.b_proj.weight",),
    "mixer.decay.proj.weight": ("attn.a_proj.weight",),
    "mixer.decay.dynamics.log_rate": ("attn.A_log",),
    "mixer.decay.dynamics.step_bias": ("attn.dt_bias",),
    "mixer.gate_proj.weight": ("attn.g_proj.weight",),
    "mixer.norm.weight": ("attn.o_norm.weight",),
    "mixer.out_proj.weight": ("attn.o_proj.weight",),
    "mlp_norm.weight": ("mlp_norm.weight",),
    "mlp.in_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.out_proj.weight": ("mlp.down_proj.weight",),
}
MODEL_WEIGHTS = {
    "model.embed_tokens.weight": ("model.embeddings.weight",),
    "model.norm.weight": ("model.norm.weight",),
    "lm_head.weight": ("lm_head.weight",),
}


def load_gated_deltanet(folder: str | Path) -> KalmixForCausalLM:
    """Load a Gated DeltaNet language model of the library flash-linear-attention, which need not be installed.

    Args:
        folder: local folder that `save_pretrained` of flash-linear-attention wrote: config.json, and
            `model.safetensors` or several safetensors files with their index. Nothing is downloaded.

    Returns:
        The model in evaluation mode, in float32 on the CPU, whatever the dtype of the file. Its logits are those of the
        original model in float32, up to rounding. Tokenizer files are not read.

    Raises:
        ArgumentError: a file is missing or damaged (also if `folder` is a name on the Hugging Face Hub), `model_type`
            is not "gated_deltanet", the configuration has attention layers (`attn`) or another feature that kalmix does
            not support, or the weights do not match it. The message names the file, the key or the weight.
        TypeError: `folder` is not a path.

    Example:
        >>> from kalmix.models.convert import load_gated_deltanet
        >>> model = load_gated_deltanet("path/to/gated-deltanet")  # doctest: +SKIP
    """
    return convert_gated_deltanet(*read_checkpoint(folder))


def convert_gated_deltanet(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> KalmixForCausalLM:
    """Convert a Gated DeltaNet language model of flash-linear-attention.

    Checkpoints from before March 2025 are accepted, too: they hold both halves of the MLP's input projection in one
    matrix, and a parameter `D` that is not used.

    Args:
        config: contents of its config.json.
        weights: its state dict.

    Returns:
        The model in evaluation mode, in float32 on the CPU, with the same logits.

    Raises:
        ArgumentError: the configuration uses a feature that kalmix does not support, or a weight is missing, unknown,
            of another shape or not finite; names the key.
    """
    model = KalmixForCausalLM(gated_deltanet_config(config))
    used = {name: weight for name, weight in weights.items() if not name.endswith(".attn.D")}
    tied = TIED_WEIGHTS if model.config.tie_word_embeddings else None
    load_converted_weights(
        model, used, lambda name: _source_names(name, used), "Gated DeltaNet", squeeze_conv_weight, tied
    )
    return model.eval()


def gated_deltanet_config(config: Mapping[str, Any]) -> KalmixConfig:
    """Convert the configuration of a Gated DeltaNet of flash-linear-attention.

    Args:
        config: contents of its config.json.

    Returns:
        Configuration of the same architecture.

    Raises:
        ArgumentError: the configuration uses a feature that kalmix does not support; names the key.

    Example:
        >>> from kalmix.models.convert import gated_deltanet_config
        >>> config = gated_deltanet_config({"model_type": "gated_deltanet", "num_hidden_layers": 2, "num_heads": 4})
        >>> config.hidden_size, config.layers[0]["mixer"], config.layers[0]["heads"]
        (2048, 'gated-deltanet', 4)
    """
    check_allowed(config, REQUIRED)
    check_config(config, DEFAULTS)
    settings = DEFAULTS | {key: value for key, value in config.items() if key in DEFAULTS}
    if settings["output_gate_activation"] not in GATES:
        got = repr(settings["output_gate_activation"])
        raise ArgumentError("config['output_gate_activation']", got=got, expected=" or ".join(map(repr, GATES)))
    width = int(settings["hidden_size"] * (settings["hidden_ratio"] or 4) * 2 / 3)
    layer = {
        "mixer": "gated-deltanet",
        "heads": settings["num_v_heads"] or settings["num_heads"],
        "key_heads": settings["num_heads"],
        "head_dim": settings["head_dim"],
        "expand_v": settings["expand_v"],
        "conv": settings["conv_size"] if settings["use_short_conv"] else 0,
        "gate": GATES[settings["output_gate_activation"]] if settings["use_gate"] else None,
        "negative_eigenvalues": settings["allow_neg_eigval"],
        "norm_eps": settings["norm_eps"],
        "mlp": settings["intermediate_size"] or -(-width // 256) * 256,
    }
    copied = ("vocab_size", "hidden_size", "norm_eps", "tie_word_embeddings")
    tokens = ("pad_token_id", "bos_token_id", "eos_token_id")
    return KalmixConfig(
        layers=[layer] * settings["num_hidden_layers"], **{key: settings[key] for key in (*copied, *tokens)}
    )


def _source_names(name: str, weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names in flash-linear-attention of the weights that make up the weight `name` of kalmix."""
    if name in MODEL_WEIGHTS:
        return MODEL_WEIGHTS[name]
    index, part = name.removeprefix("model.layers.").split(".", 1)
    sources = tuple(f"model.layers.{index}.{source}" for source in BLOCK_WEIGHTS[part])
    merged = part == "mlp.in_proj.weight" and sources[1] not in weights
    return sources[:1] if merged else sources
