"""Weights beside results, and checkpoints of other libraries: damaged ones are named, and pickles run no code."""

import json
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from kalmix import ArgumentError
from kalmix.models.convert import load_gated_deltanet
from kalmix.models.convert_kalmanet import load_gated_kalmanet
from kalmix_bench.experiments.sde.results import Results, learned
from kalmix_bench.experiments.vision.run import load as load_vision


class Attack:
    """An object that leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


class Fixed(Results):
    """Results whose weights lie in one file."""

    def weights(self, cell):
        return self.path.parent / "weights.pt"


@pytest.mark.parametrize("content", ["pickle", "empty", "text", "another"])
def test_weights_of_sde_models(tmp_path, monkeypatch, content):
    class Found:
        model = torch.nn.Linear(2, 2)

    class Cell:
        model, protocol, seed = "afa", None, 0

    monkeypatch.setattr("kalmix_bench.experiments.sde.results.begin", lambda *given: Found)
    file = tmp_path / "weights.pt"
    if content == "another":
        torch.save({0: {"x": torch.ones(3)}}, file)
    else:
        attack = pickle.dumps(Attack(tmp_path / "ATTACKED"))
        file.write_bytes({"pickle": attack, "empty": b"", "text": b"weights"}[content])
    with pytest.raises(ArgumentError, match="weights"):
        learned(cast("Any", Cell()), cast("Any", None), Fixed(tmp_path / "results.jsonl"), torch.device("cpu"))
    assert not (tmp_path / "ATTACKED").exists()


OTHERS = {"gated_deltanet": load_gated_deltanet, "hybrid_qwen3": load_gated_kalmanet}
SIZES = {
    "gated_deltanet": {"hidden_size": 8, "num_hidden_layers": 1, "num_heads": 1, "head_dim": 4, "vocab_size": 9},
    "hybrid_qwen3": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    | {"head_dim": 4, "vocab_size": 9, "intermediate_size": 8},
}
WRONG = ("8", 8.5, [8], {}, True, -8, 0, None, float("nan"))


@pytest.mark.parametrize("kind", OTHERS)
def test_configurations_of_other_libraries(tmp_path, kind):
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    for key in SIZES[kind]:
        for value in WRONG:
            config = {"model_type": kind} | SIZES[kind] | {key: value}
            (tmp_path / "config.json").write_text(json.dumps(config))
            with pytest.raises(ArgumentError):
                OTHERS[kind](tmp_path)
    for content in ("", "[]", "[" * 100_000, "{", '{"model_type": []}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ArgumentError):
            OTHERS[kind](tmp_path)


@pytest.mark.parametrize("damage", [b"", b"x" * 64, None])
def test_weights_of_image_models(tmp_path, damage):
    (tmp_path / "recipe.json").write_text('{"size": 64}')
    if damage is None:
        save_file({"head.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    else:
        (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(ArgumentError, match="folder"):
        load_vision(tmp_path)
    (tmp_path / "recipe.json").write_text("[" * 100_000)
    with pytest.raises(ArgumentError, match="nested"):
        load_vision(tmp_path)
