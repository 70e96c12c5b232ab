"""`torch.export` of a language model: with a dynamic batch size and length, and of the cache of padded prompts."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim, export

from kalmix.layers import MIXERS
from kalmix.models import KalmixConfig, KalmixForCausalLM

SLOW = pytest.mark.slow
# Layers and `strict`. The tests of layers export each of them; here is one for each kind of block.
CASES = [
    (["gated-deltanet"], False),
    pytest.param(["afa"], True, marks=SLOW),
    pytest.param(["afa-transformer"], False, marks=SLOW),
]
NAMES = [name for name in MIXERS if name not in ("afa", "design")]
PREFILLED = [["afa"], *(pytest.param(NAMES[i : i + 3], marks=SLOW) for i in range(0, len(NAMES), 3))]


def build(layers: list[str]) -> KalmixForCausalLM:
    torch.manual_seed(0)
    return KalmixForCausalLM(KalmixConfig(vocab_size=32, hidden_size=16, layers=layers, initializer_range=0.5)).eval()


@pytest.mark.parametrize(("layers", "strict"), CASES)
@pytest.mark.slow
def test_exported_model_serves_all_batch_sizes_and_lengths(layers, strict):
    model = build(layers)
    dynamic = {"input_ids": {0: Dim("batch"), 1: Dim("length")}, "use_cache": None}
    example = {"input_ids": torch.randint(2, 32, (2, 8)), "use_cache": False}
    exported = export(model, (), example, dynamic_shapes=dynamic, strict=strict).module()
    for shape in ((3, 21), (1, 70)):
        input_ids = torch.randint(2, 32, shape)
        with torch.no_grad():
            got, expected = (run(input_ids=input_ids, use_cache=False).logits for run in (exported, model))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


class Prefill(torch.nn.Module):
    """A model as a function from padded prompts to logits and the tensors of its cache."""

    def __init__(self, model: KalmixForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        output = self.model(input_ids, attention_mask=attention_mask, use_cache=True)
        return output.logits, [layer.tensors for layer in output.cache.layers]


@torch.no_grad()
@pytest.mark.parametrize("layers", PREFILLED, ids="+".join)
@pytest.mark.slow
def test_exported_prefill_of_padded_prompts_returns_the_cache_of_the_model(layers):
    """The longest prompt is shorter than a row, which exported code cannot know."""
    model = Prefill(build(layers))
    mask = torch.tensor([[1, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0]])
    given = (torch.randint(2, 32, (2, 7)), mask)
    exported = export(model, given, dynamic_shapes=({1: Dim("length")},) * 2).module()
    longer = (torch.randint(2, 32, (2, 35)), torch.cat([mask, torch.ones(2, 28, dtype=torch.int64)], 1))
    for prompts in (given, longer):
        torch.testing.assert_close(exported(*prompts), model(*prompts), rtol=1e-4, atol=1e-5)
