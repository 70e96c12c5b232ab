"""Wrong configurations of other libraries raise errors that name the key."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from kalmix import ArgumentError
from kalmix.models.convert import load_gated_deltanet
from kalmix.models.convert_kalmanet import load_gated_kalmanet

OTHERS = {"gated_deltanet": load_gated_deltanet, "hybrid_qwen3": load_gated_kalmanet}
SIZES = {
    "gated_deltanet": {"hidden_size": 8, "num_hidden_layers": 1, "num_heads": 1, "head_dim": 4, "vocab_size": 9},
    "hybrid_qwen3": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    | {"head_dim": 4, "vocab_size": 9, "intermediate_size": 8},
}
WRONG = ("8", 8.5, [8], {}, True, -8, 0, None, float("nan"))


@pytest.mark.parametrize("kind", OTHERS)
def test_wrong_configurations_of_other_libraries_are_refused(tmp_path, kind):
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    for key in SIZES[kind]:
        for value in WRONG:
            config = {"model_type": kind} | SIZES[kind] | {key: value}
            (tmp_path / "config.json").write_text(json.dumps(config))
            with pytest.raises(ArgumentError):
                OTHERS[kind](tmp_path)
    for content in ("", "{}", "[]", "[" * 100_000, "{", '{"model_type": []}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ArgumentError):
            OTHERS[kind](tmp_path)
