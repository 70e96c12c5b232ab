"""Checks of pipeline parallelism that run on two ranks of one machine, with gloo on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed
from transformers import StaticCache
from transformers.distributed import DistributedConfig

from distributed.sharded import run_checks
from kalmix import ArgumentError
from kalmix.models import KalmixConfig, KalmixForCausalLM

LAYERS = ["kla", "gated-deltanet", "attention", "bayesian", "afa"]  # two on the first rank, three on the second
GREEDY = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}


def run(rank: int, world: int, folder: str) -> None:
    """Run all checks."""
    run_checks(rank, world, folder, CHECKS)


def load(folder: Any, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[KalmixForCausalLM, Any]:
    """Return a model in one process, and the same model in stages."""
    torch.manual_seed(0)
    sizes = {"layers": LAYERS, "vocab_size": 17, "hidden_size": 16, "num_attention_heads": 2, "initializer_range": 0.5}
    if distributed.get_rank() == 0:
        KalmixForCausalLM(KalmixConfig(**{**sizes, **options})).save_pretrained(folder)
    distributed.barrier()
    whole = KalmixForCausalLM.from_pretrained(folder, dtype=dtype)
    settings = DistributedConfig(pp_size=distributed.get_world_size())
    return whole, KalmixForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=settings)


def check_outputs(folder: Any) -> None:
    """Compare logits of padded rows, with a cache in two calls, and generated tokens."""
    ids = torch.randint(17, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[0, 0, 0] + [1] * 6, [1] * 9])
    for name, options in {"plain": {}, "tied": {"tie_word_embeddings": True, "embedding_norm": True}}.items():
        whole, model = load(folder / name, **options)
        kept = model.model.layers.mixers
        counts: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(counts, len(kept))
        assert sorted(counts) == [2, 3]  # transformers 5.24 gives the first stage one more, older ones the last
        with torch.no_grad():
            valid = mask.bool()
            expected, found = (each(ids, attention_mask=mask).logits[valid] for each in (whole, model))
            torch.testing.assert_close(found, expected)
            first = model(ids[:, :4], use_cache=True)
            second = model(ids[:, 4:], past_key_values=first.past_key_values)
            assert second.past_key_values.get_seq_length() == 9
            torch.testing.assert_close(second.logits, whole(ids).logits[:, 4:])
            recorded = model(ids[:, :4], use_cache=True).past_key_values
            for layer in recorded.layers:
                layer.activate_past_recording()
            model(ids[:, 4:], past_key_values=recorded)
            recorded.crop(-2)
            assert {layer.get_seq_length() for layer in recorded.layers} == {7}
            torch.testing.assert_close(model(ids[:, 7:], past_key_values=recorded).logits, whole(ids).logits[:, 7:])
        for more in ({"attention_mask": mask}, {"num_beams": 2}):
            assert torch.equal(*(each.generate(ids, **GREEDY, **more) for each in (whole, model)))


def check_bfloat16(folder: Any) -> None:
    """Hidden states travel in the dtype of the model, although dynamics are in float32."""
    whole, model = load(folder / "bfloat16", torch.bfloat16)
    ids = torch.randint(17, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, whole(ids).logits)


def check_static_cache(folder: Any) -> None:
    """A static cache counts tokens on every rank, and `generate` can use one."""
    whole, model = load(folder / "static")
    ids = torch.randint(17, (2, 9), generator=torch.Generator().manual_seed(1))
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        last = model(ids[:, 8:], past_key_values=cache)
        assert int(cache.get_seq_length()) == 9
        torch.testing.assert_close(last.logits, whole(ids).logits[:, 8:])
    options = {**GREEDY, "cache_implementation": "static", "disable_compile": True}
    assert torch.equal(whole.generate(ids, **GREEDY), model.generate(ids, **options))


def check_blocks(folder: Any) -> None:
    """Every rank needs a block."""
    with pytest.raises(ArgumentError, match="`pp_size` is 2; expected at most 1, the number of blocks"):
        load(folder / "blocks", layers=["kla"])


def check_saving(folder: Any) -> None:
    """A rank does not write its own blocks as if they were the model."""
    _, model = load(folder / "saving")
    with pytest.raises(RuntimeError, match="divided among ranks"):
        model.save_pretrained(folder / "saved")


CHECKS = {
    "outputs": check_outputs,
    "bfloat16": check_bfloat16,
    "static cache": check_static_cache,
    "saving": check_saving,
    "blocks": check_blocks,
}
