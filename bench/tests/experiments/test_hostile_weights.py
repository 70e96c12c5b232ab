"""Weights beside results: damaged ones are named, and pickles run no code."""

from __future__ import annotations

import pickle
from typing import Any, cast

import pytest
import torch
from attack import Attack
from safetensors.torch import save_file

from kalmix import ArgumentError
from kalmix_bench.experiments.sde import checkpoints
from kalmix_bench.experiments.vision.run import load as load_vision


@pytest.mark.parametrize("content", ["pickle", "empty", "text", "another"])
def test_weights_of_sde_models(tmp_path, monkeypatch, content):
    class Found:
        model = torch.nn.Linear(2, 2)

    class SdeCell:
        model, protocol, seed = "afa", None, 0

    file = tmp_path / "weights.pt"
    monkeypatch.setattr(checkpoints, "init_predictor", lambda *given: Found)
    monkeypatch.setattr(checkpoints, "weights", lambda *given: file)
    if content == "another":
        torch.save({0: {"x": torch.ones(3)}}, file)
    else:
        attack = pickle.dumps(Attack(tmp_path / "ATTACKED"))
        file.write_bytes({"pickle": attack, "empty": b"", "text": b"weights"}[content])
    with pytest.raises(ArgumentError, match="weights"):
        checkpoints.load_predictor(*cast("Any", (SdeCell(), None, None)), torch.device("cpu"))
    assert not (tmp_path / "ATTACKED").exists()


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
