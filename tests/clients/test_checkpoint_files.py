"""Checkpoints in several files, offloaded weights, pipelines."""

import pytest
import torch
from transformers import AutoModelForCausalLM, pipeline

from kalmix.layers import MIXERS

from .conftest import build


def _ids(model) -> torch.Tensor:
    return torch.randint(6, model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))


def test_sharded_safetensors_are_loaded(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(_ids(model)).logits, model(_ids(model)).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_loaded(model, dtype, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.lm_head.weight.dtype == dtype
    expected = model(_ids(model)).logits
    assert (loaded(_ids(model)).logits.float() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("mixer", MIXERS)
def test_blocks_are_offloaded_to_disk(mixer, tokenizer, tmp_path):
    model = build([{"mixer": mixer, **({"design": "longhorn"} if mixer == "design" else {})}] * 2, tokenizer)
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    blocks = {f"model.layers.{i}": "disk" if i else "cpu" for i in range(model.config.num_hidden_layers)}
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map={**places, **blocks}, offload_folder=str(tmp_path / "disk")
    )
    torch.testing.assert_close(offloaded(_ids(model)).logits, model(_ids(model)).logits)
    generated = offloaded.generate(_ids(model), max_new_tokens=4, eos_token_id=None, do_sample=False)
    assert torch.equal(generated, model.generate(_ids(model), max_new_tokens=4, eos_token_id=None, do_sample=False))


def test_pipeline_generates_from_a_folder(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    generate = pipeline("text-generation", str(tmp_path), device="cpu")
    texts = ["the cat sat on the mat", "a bird"]
    together = generate(texts, max_new_tokens=5, do_sample=False, batch_size=2)
    alone = [generate(text, max_new_tokens=5, do_sample=False) for text in texts]
    assert together == alone
    chat = generate([{"role": "user", "content": "the cat"}], max_new_tokens=3)
    assert chat[0]["generated_text"][-1]["role"] == "assistant"
    states = pipeline("feature-extraction", str(tmp_path), device="cpu")("the cat sat")
    assert len(states[0]) == 3
