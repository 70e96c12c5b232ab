"""Language models of one size: ours, flash-linear-attention's and transformers'."""

from __future__ import annotations

import math

import torch
from torch import nn

from kalmix.layers import KDA, Attention, GatedDeltaNet
from kalmix.layers.memory_base import MemoryLayer
from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix_bench.perf.models.protocol import OURS, SPREAD, ModelSize


def build(name: str, size: ModelSize) -> nn.Module:
    """Build a model with random weights on the default device.

    Peers have the heads, MLP widths and untied embeddings of the layer of kalmix that they are compared with, and
    their own loss.

    Raises:
        ImportError: the library of a peer is not installed.
        ArgumentError: a layer refuses the size.
    """
    torch.manual_seed(0)
    if name in OURS:
        return _ours(name, size, number_of_layers(name, size))
    return {"fla gated-deltanet": _fla_gated_deltanet, "fla kda": _fla_kda, "llama": _llama}[name](size)


def number_of_layers(name: str, size: ModelSize) -> int:
    """Return the number of blocks of a model of kalmix: `size.layers`, or the nearest number with parameters within
    `SPREAD` of those of the attention model.
    """
    with torch.device("meta"):
        one, two, attention = (
            _parameters(_ours(mixer, size, layers))
            for mixer, layers in ((name, 1), (name, 2), ("attention", size.layers))
        )
    least, most = (part * attention for part in SPREAD)
    fewest, largest = math.ceil((least - one) / (two - one)) + 1, math.floor((most - one) / (two - one)) + 1
    return max(1, fewest, min(size.layers, largest))


def _ours(name: str, size: ModelSize, layers: int) -> KalmixForCausalLM:
    sizes = {"vocab_size": size.vocab_size, "hidden_size": size.hidden_size, "layers": [name] * layers}
    return KalmixForCausalLM(KalmixConfig(**sizes, skip_logits=True))


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _shared(size: ModelSize) -> dict[str, int | bool]:
    return {
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.layers,
        "intermediate_size": -(-8 * size.hidden_size // 24) * 8,  # as `KalmixConfig`
        "vocab_size": size.vocab_size,
        "max_position_embeddings": size.seq_len,
        "use_cache": False,
    }


def _heads(layer: type[MemoryLayer], size: ModelSize) -> dict[str, int | float]:
    """Return heads and head dimension of our layer, in the words of flash-linear-attention."""
    with torch.device("meta"):
        sizes = layer(size.hidden_size).sizes
    return {
        "num_heads": sizes.key_heads,
        "head_dim": sizes.key_width,
        "expand_v": sizes.value_width / sizes.key_width,
    }


def _fla_gated_deltanet(size: ModelSize) -> nn.Module:
    from fla.models.gated_deltanet import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    return GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**_heads(GatedDeltaNet, size), **_shared(size)))


def _fla_kda(size: ModelSize) -> nn.Module:
    from fla.models.kda import KDAConfig, KDAForCausalLM

    return KDAForCausalLM(KDAConfig(**_heads(KDA, size), **_shared(size)))


def _llama(size: ModelSize) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        heads = Attention(size.hidden_size).heads
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=heads, attn_implementation="sdpa", **_shared(size)))
