"""The model's own plans: FSDP2 by `from_pretrained` with `DistributedConfig(fsdp_size=2)`, and tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.processes import leave_group, run_ranks
from distributed.sharded import join
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from kalmix.models import KalmixConfig, KalmixForCausalLM

LAYERS = ["kla", "attention", "bayesian"]


def build(**options: Any) -> KalmixForCausalLM:
    torch.manual_seed(0)
    return KalmixForCausalLM(
        KalmixConfig(vocab_size=40, hidden_size=16, layers=LAYERS, initializer_range=0.5, **options)
    )


def test_plan_names_every_module_with_parameters():
    model = build()
    named = {name.replace(".*", "") for name in model.fsdp_plan}
    assert all(any(name.startswith(f"{module}.") for module in named) for name, _ in model.named_parameters())
    assert model.fsdp_plan["lm_head"] == "keep_full_weight"


def test_plan_of_tensor_parallelism_names_the_tied_head():
    plan = build(tie_word_embeddings=True).tp_plan
    assert plan["lm_head"] == plan["model.embed_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_two_processes_compute_the_gradients_of_one(tied: bool, tmp_path: Path):
    build(tie_word_embeddings=tied).save_pretrained(tmp_path)
    run_ranks(compare_with_whole_model, 2, tmp_path)


def compare_with_whole_model(rank: int, world: int, folder: str) -> None:
    """Compare gradients and generated tokens of a sharded model with those of a whole one."""
    join(rank, world, folder)
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    whole = KalmixForCausalLM.from_pretrained(folder)
    sharded = KalmixForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))
    assert all(isinstance(x, DTensor) for x in sharded.parameters())
    for options in ({}, {"skip_logits": True}):
        expected, found = (gradients(model, ids, **options) for model in (whole, sharded))
        torch.testing.assert_close(found, expected)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    assert torch.equal(*(model.eval().generate(ids, **options) for model in (whole, sharded)))
    leave_group()


def gradients(model: KalmixForCausalLM, ids: Tensor, **options: bool) -> dict[str, Tensor | None]:
    model.zero_grad()
    model(ids, labels=ids, **options).loss.backward()
    found = {name: x.grad for name, x in model.named_parameters()}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}
