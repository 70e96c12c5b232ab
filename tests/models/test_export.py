"""`torch.export` of a language model: with a dynamic batch size and length, and of the cache of padded prompts."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim, export

from kalmix.layers import MIXERS
from kalmix.models import KalmixConfig, KalmixForCausalLM

CASES = [(name, False) for name in MIXERS if name != "design"] + [("gated-deltanet", True), ("afa", True)]
FAST = {("gated-deltanet", False)}
FAST_PREFILL = {"afa"}


@pytest.mark.parametrize(
    ("name", "strict"), [pytest.param(*case, marks=[] if case in FAST else [pytest.mark.slow]) for case in CASES]
)
def test_exported_model_serves_all_batch_sizes_and_lengths(name, strict):
    torch.manual_seed(0)
    model = KalmixForCausalLM(
        KalmixConfig(vocab_size=32, hidden_size=16, layers=[name] * 2, initializer_range=0.5)
    ).eval()
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
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in FAST_PREFILL else [pytest.mark.slow]) for x in MIXERS if x != "design"]
)
def test_exported_prefill_of_padded_prompts_returns_the_cache_of_the_model(name):
    """The longest prompt is shorter than a row, which exported code cannot know."""
    torch.manual_seed(0)
    model = Prefill(
        KalmixForCausalLM(KalmixConfig(vocab_size=32, hidden_size=16, layers=[name], initializer_range=0.5)).eval()
    )
    mask = torch.tensor([[1, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0]])
    given = (torch.randint(2, 32, (2, 7)), mask)
    exported = export(model, given, dynamic_shapes=({1: Dim("length")},) * 2).module()
    torch.testing.assert_close(exported(*given), model(*given), rtol=1e-4, atol=1e-5)
