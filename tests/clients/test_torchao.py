"""Quantization of weights with torchao."""

import pytest
import torch

pytest.importorskip("torchao")
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import TorchAoConfig


def _ids(model) -> torch.Tensor:
    return torch.randint(6, model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def test_int8_weights_change_logits_little(model):
    expected = model(_ids(model)).logits
    quantize_(model, Int8WeightOnlyConfig())
    assert 0 < _difference(model(_ids(model)).logits, expected) < 0.03
    assert model.generate(_ids(model), max_new_tokens=4, eos_token_id=None).shape == (2, 13)


def test_int8_weights_change_variances_little(model):
    before = model(_ids(model), output_beliefs=True).beliefs
    quantize_(model, Int8WeightOnlyConfig())
    for old, new in zip(before, model(_ids(model), output_beliefs=True).beliefs, strict=True):
        if old.variance is not None:
            assert 0 < _difference(new.variance, old.variance) < 0.03


def test_quantized_checkpoint_is_loaded(model, tmp_path):
    model.save_pretrained(tmp_path / "full")
    expected = model(_ids(model)).logits
    config = TorchAoConfig(Int8WeightOnlyConfig())
    quantized = type(model).from_pretrained(tmp_path / "full", quantization_config=config)
    logits = quantized(_ids(model)).logits
    assert 0 < _difference(logits, expected) < 0.03
    quantized.save_pretrained(tmp_path / "int8")
    again = type(model).from_pretrained(tmp_path / "int8")
    assert torch.equal(again(_ids(model)).logits, logits)
