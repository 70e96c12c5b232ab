"""`torch.export` of a language model, with a dynamic batch size and length."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim, export

from kalmix.layers import MIXERS
from kalmix.models import KalmixConfig, KalmixForCausalLM

CASES = [(name, False) for name in MIXERS if name != "design"] + [("gated-deltanet", True), ("afa", True)]
FAST = {("gated-deltanet", False)}


@pytest.mark.parametrize(
    ("name", "strict"), [pytest.param(*case, marks=[] if case in FAST else [pytest.mark.slow]) for case in CASES]
)
def test_exported_model_serves_all_batch_sizes_and_lengths(name, strict):
    torch.manual_seed(0)
    model = KalmixForCausalLM(KalmixConfig(vocab_size=32, hidden_size=16, layers=[name] * 2)).eval()
    dynamic = {"input_ids": {0: Dim("batch"), 1: Dim("length")}, "use_cache": None}
    example = {"input_ids": torch.randint(2, 32, (2, 8)), "use_cache": False}
    exported = export(model, (), example, dynamic_shapes=dynamic, strict=strict).module()
    for shape in ((3, 21), (1, 70)):
        input_ids = torch.randint(2, 32, shape)
        with torch.no_grad():
            got, expected = (run(input_ids=input_ids, use_cache=False).logits for run in (exported, model))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
