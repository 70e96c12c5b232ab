"""Size, work, memory and time of a run, computed before it starts; peak rates of GPUs."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import nn

from kalmix._extras import optional_imports

with optional_imports():
    from kalmix.models import KalmixForCausalLM
    from kalmix.models.blocks import Block

from kalmix.layers import Mixer
from kalmix.layers.fused.cross_entropy import CHUNK_BYTES
from kalmix.training.batching import Batching
from kalmix.training.initial_model import build
from kalmix.training.recipe import Recipe

STATE_BYTES = 16  # per parameter: weight, gradient and two averages of AdamW, in float32


class Peak(NamedTuple):
    """Peak dense matrix products of a GPU, in FLOP/s, from its data sheet.

    Attributes:
        name: whole words in the name that the driver gives it. Variants for laptops and "D" do not match.
        half: in bfloat16, with sums in float32.
        single: in float32, without TF32.
    """

    name: str
    half: float
    single: float


# The first name that matches counts.
PEAKS = (
    Peak("GB200", 2500e12, 80e12),
    Peak("B200", 2250e12, 75e12),
    Peak("GH200", 989e12, 67e12),
    Peak("H200 NVL", 835e12, 60e12),
    Peak("H200", 989e12, 67e12),
    Peak("H100 NVL", 835e12, 60e12),
    Peak("H100 PCIe", 756e12, 51e12),
    Peak("H100", 989e12, 67e12),
    Peak("A100", 312e12, 19.5e12),
    Peak("A6000", 154.8e12, 38.7e12),
    Peak("L40S", 362e12, 91.6e12),
    Peak("L40", 181e12, 90.5e12),
    Peak("L4", 121e12, 30.3e12),
    Peak("A10", 125e12, 31.2e12),
    Peak("RTX 5090", 209.5e12, 104.8e12),
    Peak("RTX 4090", 165e12, 82.6e12),
    Peak("MI300X", 1307.4e12, 163.4e12),
)


def peak_flops(device_name: str, bf16: bool) -> float | None:
    """Return the peak FLOP/s of a GPU by its name; `None` if it is not known.

    Example:
        >>> from kalmix.training.estimates import peak_flops
        >>> peak_flops("NVIDIA H200", bf16=True)
        989000000000000.0
    """
    pattern = r"\b{}\b(?! (?:Laptop|D)\b)"
    found = next((x for x in PEAKS if re.search(pattern.format(x.name), device_name, re.IGNORECASE)), None)
    return None if found is None else found.half if bf16 else found.single


def flops_per_token(model: nn.Module, length: int) -> float:
    """Return the FLOPs of a training step per token: forward, and twice as many backward.

    Each weight of a linear map counts two in the forward pass, and each mixer its `flops_per_token`. Embeddings, norms,
    convolutions, the optimizer, and activations that are computed again are not counted.

    Args:
        model: model; it may be on the device "meta".
        length: tokens per sequence.
    """
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    mixers = sum(module.flops_per_token(length) for module in model.modules() if isinstance(module, Mixer))
    return 6.0 * linear + 3.0 * mixers


class Estimate(NamedTuple):
    """Size, work and memory of a run.

    Attributes:
        parameters: number of parameters.
        vocabulary_parameters: those of embedding and head.
        step_flops: FLOPs of an optimizer step on all devices.
        flops: FLOPs of the run; `None` if time alone limits it.
        state_bytes: weights, gradients and optimizer on each device.
        activation_bytes: rough size of the activations that a batch keeps for the backward pass on each device: inputs
            and outputs of the linear maps, and the logits of a chunk.
    """

    parameters: int
    vocabulary_parameters: int
    step_flops: float
    flops: float | None
    state_bytes: int
    activation_bytes: int

    def hours(self, peak: float, devices: int, mfu: float) -> float | None:
        """Return the hours of the run on `devices` GPUs of `peak` FLOP/s, of which it uses the fraction `mfu`."""
        return None if self.flops is None else self.flops / (peak * devices * mfu) / 3600


def estimate(recipe: Recipe, batching: Batching) -> Estimate:
    """Estimate the size, work and memory of a run. The model is built on the device "meta".

    Args:
        recipe: settings of the run; `vocab_size` is that of the model.
        batching: sizes of batches.

    Raises:
        ArgumentError: a layer, an option or a size is not accepted.
    """
    with torch.device("meta"):
        model = build(recipe, recipe.vocab_size, 0)
    vocabulary = {id(x): x for part in (model.lm_head, model.model.embed_tokens) for x in part.parameters()}  # or tied
    parameters = sum(value.numel() for value in model.parameters())
    step_flops = flops_per_token(model, recipe.seq_len) * batching.step_tokens
    devices = batching.groups * recipe.context_parallel
    return Estimate(
        parameters=parameters,
        vocabulary_parameters=sum(value.numel() for value in vocabulary.values()),
        step_flops=step_flops,
        flops=None if batching.steps is None else step_flops * batching.steps,
        state_bytes=STATE_BYTES * parameters // (devices if recipe.fsdp else 1),
        activation_bytes=_activation_bytes(model, recipe, batching),
    )


def _activation_bytes(model: KalmixForCausalLM, recipe: Recipe, batching: Batching) -> int:
    width = 2 if recipe.bf16 else 4
    blocks = [
        width * sum(x.in_features + x.out_features for x in block.modules() if isinstance(x, nn.Linear))
        for block in (module for module in model.modules() if isinstance(module, Block))
    ]
    residual = 4 * recipe.hidden_size
    per_token = len(blocks) * residual + max(blocks) if recipe.checkpointing else sum(blocks) + len(blocks) * residual
    tokens = batching.rows * recipe.seq_len // recipe.context_parallel
    return tokens * per_token + min(CHUNK_BYTES, tokens * recipe.vocab_size * width)
