"""Checkpoints of other libraries, as models of ours with the same logits."""

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

# What flash-linear-attention's `GatedDeltaNetConfig` says where a config.json says nothing.
DEFAULTS: dict[str, Any] = {
    **{"vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 21, "norm_eps": 1e-6},
    **{"num_heads": 6, "num_v_heads": None, "head_dim": 256, "expand_v": 2.0},
    **{"use_gate": True, "output_gate_activation": "swish", "use_short_conv": True, "conv_size": 4},
    **{"hidden_ratio": 4, "intermediate_size": None, "allow_neg_eigval": False, "tie_word_embeddings": False},
    **{"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2},
}
# What must be so, as our model is; a key that a config lacks is so.
REQUIRED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gated_deltanet",),
    "attn": (None,),
    "attnres_block_size": (None,),
    "hidden_act": ("swish", "silu"),
    "conv_bias": (False,),
    "norm_first": (False,),
}
GATES = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
# Our weight of a block: theirs, one below the other.
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
    "model.lm_head.weight": ("lm_head.weight",),
}


def load_gated_deltanet(folder: str | Path) -> KalmixForCausalLM:
    """A Gated DeltaNet language model of flash-linear-attention, from a folder with its config.json and safetensors.

    Args:
        folder: what its `save_pretrained` left: one file `model.safetensors`, or several and their index.

    Returns:
        The model in evaluation mode, float32, with the same logits.

    Raises:
        ArgumentError: a file is missing or damaged; else as `convert_gated_deltanet`.
    """
    return convert_gated_deltanet(*read_checkpoint(folder))


def convert_gated_deltanet(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> KalmixForCausalLM:
    """The same from what the files hold: flash-linear-attention's config and state dict, in its names.

    Checkpoints from before March 2025 are understood too: they keep the two halves of the MLP's input in one matrix
    and a parameter `D` that nothing reads.

    Raises:
        ArgumentError: the config asks for what our model does not do, or a weight is missing, unknown or of another
            shape; names the key.
    """
    model = KalmixForCausalLM(gated_deltanet_config(config))
    used = {name: weight for name, weight in weights.items() if not name.endswith(".attn.D")}
    tied = TIED_WEIGHTS if model.config.tie_word_embeddings else None
    load_converted_weights(
        model, used, lambda name: _source_names(name, used), "Gated DeltaNet", squeeze_conv_weight, tied
    )
    return model.eval()


def gated_deltanet_config(config: Mapping[str, Any]) -> KalmixConfig:
    """Our configuration of the same model.

    Raises:
        ArgumentError: a key asks for what our model does not do.
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
    """What they call our weight `name`, in pieces."""
    if name in MODEL_WEIGHTS:
        return MODEL_WEIGHTS[name]
    index, part = name.removeprefix("model.blocks.").split(".", 1)
    sources = tuple(f"model.layers.{index}.{source}" for source in BLOCK_WEIGHTS[part])
    merged = part == "mlp.in_proj.weight" and sources[1] not in weights
    return sources[:1] if merged else sources
