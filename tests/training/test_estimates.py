"""Estimates of a run before it starts: FLOPs, memory, and peak rates of GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_map_only

from kalmix.layers import MIXERS
from kalmix.models.blocks import Posterior
from kalmix.training import Recipe
from kalmix.training.batching import plan_batches
from kalmix.training.estimates import estimate, flops_per_token, peak_flops
from kalmix.training.initial_model import build
from kalmix.training.recipe_files import read_recipe


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA L20", "NVIDIA RTX A1000", "NVIDIA A10G", "NVIDIA GB300", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        *("NVIDIA GeForce RTX 5090 D", "NVIDIA RTX 6000 Ada Generation", "AMD Instinct MI325X"),
    ],
)
def test_peak_of_a_gpu_with_a_similar_name_is_not_used(name: str) -> None:
    assert peak_flops(name, bf16=True) is None
    assert peak_flops("NVIDIA L4", bf16=True) == 121e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", bf16=True) == 312e12
    assert peak_flops("NVIDIA H100 80GB HBM3", bf16=True) == peak_flops("h100", bf16=True) == 989e12


def test_flops_count_weights_and_recurrences() -> None:
    """A GPT of width D with MLPs of 4 D has 12 D^2 weights per block, and reads T / 2 tokens on average."""
    width, length, vocabulary = 64, 512, 300
    gpt = ({"mixer": "attention", "heads": 2, "mlp": 8 * width // 3},)
    recipe = Recipe(steps=3, layers=gpt, hidden_size=width, seq_len=length, vocab_size=vocabulary, batch_size=2)
    mlp = 3 * width * (8 * width // 3)
    weights = 4 * width**2 + mlp + vocabulary * width
    model = build(recipe, vocabulary, 0)
    assert flops_per_token(model, length) == 6 * weights + 6 * length * width
    found = estimate(recipe, plan_batches(recipe, 1))
    assert found.parameters == sum(value.numel() for value in model.parameters())
    assert found.vocabulary_parameters == 2 * vocabulary * width
    assert found.flops == 3 * 2 * length * flops_per_token(model, length)
    assert found.state_bytes == 16 * found.parameters


@pytest.mark.parametrize("mixer", ["kla", "mamba2", "gated-kalmanet", "gated-deltanet"])
def test_flops_of_recurrences_do_not_depend_on_the_length(mixer: str) -> None:
    layer = build(Recipe(steps=1, layers=(mixer,), hidden_size=64), 300, 0).model.layers[0].mixer
    assert layer.flops_per_token(64) == layer.flops_per_token(4096) >= 4 * layer.state_size(64)


def test_marginal_loss_counts_what_follows_the_last_read_out_once_per_sample() -> None:
    """Ten samples of `kla-plus-45m` run the head and the last output projection nine times more than `kla-45m`."""
    plus, plain = (read_recipe(name, ["shards=x"]) for name in ("kla-plus-45m", "kla-45m"))
    found, usual = (estimate(x, plan_batches(x, 1)) for x in (plus, plain))
    repeated = plain.vocab_size * plain.hidden_size + plain.hidden_size**2
    assert found.step_flops - usual.step_flops == 9 * 6 * repeated * plain.batch_tokens
    assert found.parameters == usual.parameters
    per_token = (found.activation_bytes - usual.activation_bytes) / (plus.batch_size * plus.seq_len)
    assert per_token == 8 * 496 + 4 * (2 * 496 + 496) + 4 * 10  # posterior, one sample, losses; no logits of all tokens
    other = replace(plus, model={**plus.model, "loss_samples": 1})
    assert estimate(other, plan_batches(other, 1)).step_flops == usual.step_flops


POSTERIORS = [name for name, mixer in MIXERS.items() if getattr(mixer, "has_posterior", False) is True]


@pytest.mark.parametrize("mixer", POSTERIORS)
def test_parts_that_the_estimate_repeats_are_those_that_samples_run(mixer: str) -> None:
    """Weights of linear maps that get gradients from `finish` alone are those that count once per sample."""
    model = build(Recipe(steps=1, layers=({"mixer": mixer, "mlp": 24},), hidden_size=16, loss="marginal"), 40, 0)
    posterior = model.model(torch.arange(6)[None], output_posterior=True).posterior
    fixed = tree_map_only(torch.Tensor, torch.Tensor.detach, tuple(posterior))
    model.zero_grad()
    model.head_logits(model.model.norm(model.model.layers.finish(Posterior(*fixed), fixed[1][None]))).sum().backward()
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    ran = sum(module.weight.numel() for module in linear if module.weight.grad is not None)
    once = flops_per_token(build(Recipe(steps=1, layers=({"mixer": mixer, "mlp": 24},), hidden_size=16), 40, 0), 6)
    assert flops_per_token(model, 6) - once == 6 * (model.config.loss_samples - 1) * ran


def test_checkpointing_and_sharding_lower_the_estimated_memory() -> None:
    sizes = {"hidden_size": 64, "seq_len": 512, "vocab_size": 300, "steps": 1}
    plain, checkpointed, sharded = (
        estimate(recipe, plan_batches(recipe, 4))
        for recipe in (Recipe(**sizes), Recipe(**sizes, checkpointing=True), Recipe(**sizes, fsdp=True))
    )
    assert checkpointed.activation_bytes < plain.activation_bytes
    assert sharded.state_bytes == plain.state_bytes // 4


def test_peaks_are_found_by_the_name_of_the_gpu() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", bf16=True) == 989e12
    assert peak_flops("NVIDIA H100 PCIe", bf16=True) == 756e12
    assert peak_flops("NVIDIA A100-SXM4-40GB", bf16=False) == 19.5e12
    assert peak_flops("NVIDIA GeForce RTX 5090", bf16=True) == 209.5e12
    assert peak_flops("AMD Instinct MI300X", bf16=True) == 1307.4e12
    assert peak_flops("NVIDIA RTX A6000", bf16=True) == 154.8e12
    assert [peak_flops(f"NVIDIA {x}", bf16=True) for x in ("L4", "L40", "L40S")] == [121e12, 181e12, 362e12]
    assert [peak_flops(f"NVIDIA {x}", bf16=True) for x in ("B200", "GB200")] == [2250e12, 2500e12]
    assert peak_flops("Unknown", bf16=True) is None
