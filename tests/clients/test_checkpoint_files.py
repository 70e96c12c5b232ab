"""Checkpoints in several files, offloaded weights, pipelines."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from transformers import AutoModelForCausalLM, pipeline

from kalmix import ArgumentError
from kalmix.analysis.layer_diagnostics import diagnose_layers
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


def _of_mixer(mixer: str, tokenizer, **options):
    entry = {"mixer": mixer, **({"design": "longhorn"} if mixer == "design" else {})}
    return build([entry] * 2, tokenizer, **options)


def _offload_blocks(model, folder, **parts):
    """Return the model with its blocks on disk, or `parts` of the second one, loaded from a new checkpoint."""
    model.save_pretrained(folder / "model")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    blocks = {f"model.layers.{i}": "disk" if i else "cpu" for i in range(model.config.num_hidden_layers)}
    if parts:
        del blocks["model.layers.1"]
        blocks |= {f"model.layers.1.{name}": place for name, place in parts.items()}
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map={**places, **blocks}, offload_folder=str(folder / "disk")
    )


@pytest.mark.parametrize("mixer", MIXERS)
def test_blocks_are_offloaded_to_disk(mixer, tokenizer, tmp_path):
    """In calls, generation, speculative decoding, which filters tokens again after a crop, and attention maps."""
    model = _of_mixer(mixer, tokenizer)
    offloaded, ids = _offload_blocks(model, tmp_path), _ids(model)
    torch.testing.assert_close(offloaded(ids).logits, model(ids).logits)
    options = {"max_new_tokens": 4, "eos_token_id": None, "do_sample": False}
    assert torch.equal(offloaded.generate(ids, **options), model.generate(ids, **options))
    repeated, options["prompt_lookup_num_tokens"] = ids[:1, :3].repeat(1, 3), 2
    assert torch.equal(offloaded.generate(repeated, **options), model.generate(repeated, **options))
    if model.model.layers.mixers[0].attention_map(torch.randn(1, 3, 32)) is not None:
        maps = (x(ids, output_attentions=True).attentions for x in (offloaded, model))
        torch.testing.assert_close(*maps)


@pytest.mark.parametrize("parts", [{"norm": "disk", "mixer": "cpu"}, {"norm": "cpu", "mixer": "disk"}], ids=str)
def test_blocks_that_are_offloaded_in_part_are_refused(parts, tokenizer, tmp_path):
    model = _of_mixer("kla", tokenizer)
    with pytest.raises(ArgumentError, match="offloads a part of a block"):
        _offload_blocks(model, tmp_path, **parts)(_ids(model))


def test_layers_of_offloaded_models_are_diagnosed(tokenizer):
    model = build(["kla", "gated-deltanet"], tokenizer)
    offloaded = cpu_offload(copy.deepcopy(model))
    embedded = model.model.embed_tokens(_ids(model)[0])
    found, expected = (diagnose_layers(x.model.layers, embedded, weights=True)[1][0] for x in (offloaded, model))
    torch.testing.assert_close(found[1:], expected[1:])


def test_marginal_predictions_of_offloaded_blocks(tokenizer, tmp_path):
    model = build(["kla", "kla"], tokenizer, predict="marginal", loss="marginal")
    offloaded, ids, outputs = _offload_blocks(model, tmp_path), _ids(model), []
    for each in (offloaded, model):
        torch.manual_seed(0)
        outputs.append([each(ids).logits, each(ids, labels=ids).loss])
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("preload", [None, ["KalmixBlock"]], ids=["modules", "blocks"])
def test_weights_are_offloaded_by_accelerate_alone(preload, mixer, tokenizer):
    """Without `from_pretrained`, and with or without accelerate's own option for modules that are not called."""
    model = _of_mixer(mixer, tokenizer)
    offloaded = cpu_offload(copy.deepcopy(model), preload_module_classes=preload)
    assert all(weight.is_meta for weight in offloaded.parameters())
    ids, options = _ids(model), {"max_new_tokens": 4, "eos_token_id": None, "do_sample": False}
    torch.testing.assert_close(offloaded(ids).logits, model(ids).logits)
    assert torch.equal(offloaded.generate(ids, **options), model.generate(ids, **options))
    remove_hook_from_submodules(offloaded)
    assert not any(weight.is_meta for weight in offloaded.parameters())
    torch.testing.assert_close(offloaded(ids).logits, model(ids).logits)


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
