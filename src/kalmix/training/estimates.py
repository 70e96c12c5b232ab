"""Size, work, memory and time of a run, computed before it starts; peak rates of GPUs."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

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

    Each weight of a linear map counts two in the forward pass, and each mixer its `flops_per_token`. With the loss
    "marginal", weights that follow the last read-out (output projection, MLP, head) count once per sample.

    These are FLOPs of the model, as MFU usually counts them. Not counted are embeddings, norms, convolutions, the
    optimizer, the output of the last block for the mean, which the loss "marginal" does not use, and what is computed
    again: activations with `checkpointing`, and samples with this loss. So the MFU of such runs is at most 3/4 there.

    Args:
        model: model; it may be on the device "meta".
        length: tokens per sequence.
    """
    weights = _linear_weights(model)
    if (samples := _loss_samples(model)) > 1:
        weights += (samples - 1) * sum(_linear_weights(part) for part in _parts_of_samples(model))
    mixers = sum(module.flops_per_token(length) for module in model.modules() if isinstance(module, Mixer))
    return 6.0 * weights + 3.0 * mixers


def _linear_weights(module: nn.Module) -> int:
    return sum(x.weight.numel() for x in module.modules() if isinstance(x, nn.Linear))


def _loss_samples(model: nn.Module) -> int:
    """Return how often a training step runs the parts after the last read-out on other inputs."""
    config: Any = model.config if isinstance(model, KalmixForCausalLM) else None
    return config.loss_samples if config is not None and config.loss == "marginal" else 1


def _parts_of_samples(model: Any) -> list[nn.Module]:
    """Return the parts of a `KalmixForCausalLM` with weights of linear maps that follow the last read-out."""
    block = model.model.layers.last_block
    # Layers of kalmix with a posterior have one linear map after the read-out.
    parts = getattr(block.mixer, "out_proj", None), block.mlp, model.lm_head
    return [part for part in parts if part is not None]


class Estimate(NamedTuple):
    """Size, work and memory of a run.

    Attributes:
        parameters: number of parameters.
        vocabulary_parameters: those of embedding and head.
        step_flops: FLOPs of an optimizer step on all devices.
        flops: FLOPs of the run; `None` if time alone limits it.
        state_bytes: weights, gradients and optimizer on each device.
        activation_bytes: rough size of the activations that a batch keeps for the backward pass on each device: inputs
            and outputs of the linear maps, and the logits of a chunk. With the loss "marginal" also the posterior of
            the last read-out, the activations after one sample of it, and the losses of all samples.
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
    blocks = [width * _linear_columns(module) for module in model.modules() if isinstance(module, Block)]
    residual = 4 * recipe.hidden_size
    per_token = len(blocks) * residual + max(blocks) if recipe.checkpointing else sum(blocks) + len(blocks) * residual
    if recipe.loss == "marginal":
        *parts, _ = _parts_of_samples(model)
        readout = getattr(parts[0], "in_features", recipe.hidden_size) if parts else recipe.hidden_size
        a_sample = width * sum(map(_linear_columns, parts)) + residual
        together = min(model.config.loss_chunk_size, model.config.loss_samples)
        per_token += (width + 4) * readout + together * a_sample + 4 * model.config.loss_samples
    tokens = batching.rows * recipe.seq_len // recipe.context_parallel
    copies = 1 if model.config.logit_cap is None else 2  # logits and their slopes
    return tokens * per_token + copies * min(CHUNK_BYTES, tokens * recipe.vocab_size * width)


def _linear_columns(module: nn.Module) -> int:
    """Return the number of inputs and outputs of the linear maps for a token."""
    return sum(x.in_features + x.out_features for x in module.modules() if isinstance(x, nn.Linear))
