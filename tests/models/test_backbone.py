"""The base model, its outputs, and the options of gradient checkpointing."""

import copy
import json
import logging
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import find_labels

from kalmix import ArgumentError
from kalmix.models import (
    KalmixConfig,
    KalmixForCausalLM,
    KalmixForSequenceClassification,
    KalmixForTokenClassification,
    KalmixModel,
)
from kalmix.models.cache_name import cache_of

from .conftest import LAYERS, VOCABULARY, build, tokens

AUTO_CLASSES = {
    AutoModel: KalmixModel,
    AutoModelForCausalLM: KalmixForCausalLM,
    AutoModelForSequenceClassification: KalmixForSequenceClassification,
    AutoModelForTokenClassification: KalmixForTokenClassification,
}


def config(**options) -> KalmixConfig:
    return KalmixConfig(**{"vocab_size": VOCABULARY, "hidden_size": 16, "pad_token_id": 0, **options})


@torch.no_grad()
def test_head_of_the_last_hidden_state_gives_the_logits(model):
    ids = tokens(2, 6)
    output = model(ids, output_hidden_states=True)
    base = model.model(ids, output_hidden_states=True)
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    assert torch.equal(base.last_hidden_state, base.hidden_states[-1])
    assert torch.equal(base.last_hidden_state, output.hidden_states[-1])
    embedded = model.model(inputs_embeds=model.get_input_embeddings()(ids))
    assert torch.equal(embedded.last_hidden_state, base.last_hidden_state)


def test_gradients_reach_returned_hidden_states(model):
    """Masked tokens are filtered in another order than they are returned in."""
    mask = torch.tensor([[1, 0, 1, 1, 1]])
    output = model.train()(tokens(1, 5), attention_mask=mask, output_hidden_states=True)
    for hidden in output.hidden_states:
        hidden.retain_grad()
    output.logits[0, -1].sum().backward()
    assert all(hidden.grad[:, mask[0] == 1].any() for hidden in output.hidden_states)


def test_names_of_weights_are_those_of_llama():
    names = set(build("hybrid").state_dict())
    outside = {name for name in names if not name.startswith(("model.layers.0.", "model.layers.1."))}
    assert outside == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} and outside < names


@torch.no_grad()
def test_base_model_loads_checkpoints_of_the_language_model(tmp_path):
    model = build("hybrid")
    model.save_pretrained(tmp_path / "lm")
    base = AutoModel.from_pretrained(tmp_path / "lm")
    assert type(base) is KalmixModel
    assert torch.equal(base(tokens(1, 5)).last_hidden_state, model.model(tokens(1, 5)).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert type(again) is KalmixForCausalLM and info["missing_keys"] == {"lm_head.weight"}
    assert torch.equal(again.model.norm.weight, model.model.norm.weight)


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": False, "determinism_check": "none"}])
def test_options_of_gradient_checkpointing_reach_torch(monkeypatch, options):
    model, seen = build(["kla", "attention", "kla"]).train(), []

    def checkpoint(function, *args, **given):
        seen.append(given)
        return function(*args)

    monkeypatch.setattr("transformers.modeling_utils.checkpoint", checkpoint)
    assert all(isinstance(block, GradientCheckpointingLayer) for block in model.model.layers)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model(tokens(1, 4))
    assert seen == [options] * 3
    model.eval()(tokens(1, 4))
    assert len(seen) == 3


def test_incomplete_checkpoint_is_loaded_and_listed(tmp_path, caplog, monkeypatch):
    """With `strict=False`, transformers names the missing weights in a warning; without it they are an error."""
    model = build("kla")
    weights = {name: weight for name, weight in model.state_dict().items() if "layers.1.mixer.in_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=dict(weights))
    missing = set(model.state_dict()) - set(weights)
    with pytest.raises(ArgumentError, match="lacks 1 weights"):
        KalmixForCausalLM.from_pretrained(tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level("WARNING", logger="transformers"):
        again, info = KalmixForCausalLM.from_pretrained(tmp_path, strict=False, output_loading_info=True)
    assert len(missing) == 1 and info["missing_keys"] == missing
    assert all(name in caplog.text for name in missing)
    for name, weight in weights.items():
        assert torch.equal(again.state_dict()[name], weight), name


def test_other_keys_of_a_configuration_are_kept(tmp_path):
    """Programs store settings of their own; a key that is spelled almost like ours is refused."""
    model = build("kla")
    model.config.their_setting = 3
    model.save_pretrained(tmp_path)
    assert KalmixForCausalLM.from_pretrained(tmp_path).config.their_setting == 3
    model.config.hidden_sise = 16
    model.save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="unknown key 'hidden_sise'; did you mean 'hidden_size'"):
        KalmixForCausalLM.from_pretrained(tmp_path)


def test_checkpoint_with_another_head_is_loaded_without_it(tmp_path):
    """A classifier takes the backbone of a language model; its head is new. Weights of the backbone must be there."""
    model = build("kla")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert loaded.score.weight.shape == (3, 16) and loaded.score.weight.abs().max() < 0.2
    assert all(
        torch.equal(old, new) for old, new in zip(model.model.parameters(), loaded.model.parameters(), strict=True)
    )
    loaded.save_pretrained(tmp_path / "classifier")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    assert torch.equal(again.score.weight, loaded.score.weight) and again.config.num_labels == 3
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier", num_labels=5)
    resized = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "classifier", num_labels=5, ignore_mismatched_sizes=True
    )
    assert resized.score.weight.shape == (5, 16)


@pytest.mark.parametrize("auto_class", AUTO_CLASSES)
def test_auto_classes(tmp_path, auto_class):
    model = auto_class.from_config(config(layers="kla", num_hidden_layers=1))
    assert type(model) is AUTO_CLASSES[auto_class]
    model.save_pretrained(tmp_path)
    assert type(auto_class.from_pretrained(tmp_path)) is AUTO_CLASSES[auto_class]
    assert model.config.auto_map[auto_class.__name__] == f"modeling_kalmix.{AUTO_CLASSES[auto_class].__name__}"
    assert AUTO_CLASSES[auto_class].__name__ in (tmp_path / "modeling_kalmix.py").read_text()


def test_classifiers():
    """Each row is classified at its last token, whichever side is padded; each token at its own hidden state."""
    torch.manual_seed(0)
    model = KalmixForSequenceClassification(config(layers=["kla", "attention"], num_labels=3)).eval()
    ids = tokens(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]])
    ids[mask == 0] = 0
    output = model(ids, attention_mask=mask, labels=torch.tensor([0, 2]))
    alone = torch.cat([model(ids[i : i + 1, mask[i] == 1]).logits for i in range(2)])
    torch.testing.assert_close(output.logits, alone)
    torch.testing.assert_close(output.loss, F.cross_entropy(alone, torch.tensor([0, 2])))
    tagger = KalmixForTokenClassification(config(layers=["kla", "attention"], num_labels=3)).eval()
    output = tagger(ids, attention_mask=mask, labels=ids % 3)
    torch.testing.assert_close(output.logits, tagger.score(tagger.model(ids, attention_mask=mask).last_hidden_state))
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in tagger.parameters())


def test_classifiers_read_no_masked_token():
    """Embedded tokens have no pad id: the mask alone says which tokens are padding, on either side or inside."""
    torch.manual_seed(0)
    model = KalmixForSequenceClassification(config(layers=["kla", "attention"], num_labels=3)).eval()
    ids = tokens(4, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    alone = torch.cat([model(ids[i : i + 1, mask[i] == 1]).logits for i in range(4)])
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, alone)
    embedded = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=embedded, attention_mask=mask).logits, alone)
    block = (mask[:, None, :, None] * mask[:, None, None, :] * torch.ones(6, 6).tril()).bool()
    torch.testing.assert_close(model(inputs_embeds=embedded, attention_mask=block).logits, alone)
    cache = cache_of(model(inputs_embeds=embedded[2:3, :4], attention_mask=mask[2:3, :4]))
    found = model(inputs_embeds=embedded[2:3, 4:], attention_mask=mask[2:3], cache=cache)
    torch.testing.assert_close(found.logits, alone[2:3])
    model.config.pad_token_id = None
    torch.testing.assert_close(model(ids[:1], attention_mask=mask[:1]).logits, alone[:1])
    with pytest.raises(ArgumentError, match="pad_token_id"):
        model(ids, attention_mask=mask)


PACKED = {
    "cu_seq_lens_q": [0, 3, 8],
    "seq_idx": [[0, 0, 0, 1, 1, 1, 1, 1]],
    "position_ids": [[0, 1, 2, 0, 1, 2, 3, 4]],
    "attention_mask": torch.block_diag(torch.ones(3, 3), torch.ones(5, 5)).tril().bool()[None, None].tolist(),
}
WHOLE = {"cu_seq_lens_q": [0, 8], "seq_idx": [[5] * 8], "position_ids": [[*range(8)]], "attention_mask": [[1] * 8]}


@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in PACKED), ("position_ids", True)])
def test_sequence_classifiers_refuse_packed_rows(name, compiled):
    """A row gets one class. Compiled code, which reads no values, checks it when it runs."""
    torch.manual_seed(0)
    model = KalmixForSequenceClassification(config(layers=["kla"], num_labels=3)).eval()
    call = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    ids = tokens(1, 8)
    whole = call(ids, use_cache=False, **{name: torch.tensor(WHOLE[name])}).logits
    torch.testing.assert_close(whole, model(ids).logits)
    with pytest.raises(RuntimeError if compiled else ArgumentError, match=f"`{name}` describes several sequences"):
        call(ids, use_cache=False, **{name: torch.tensor(PACKED[name])})


def test_token_classifier_accepts_labels_that_are_a_slice():
    tagger = KalmixForTokenClassification(config(layers=["kla"], num_labels=3)).eval()
    ids, labels = tokens(2, 6), torch.randint(3, (2, 7))
    assert torch.equal(tagger(ids, labels=labels[:, 1:]).loss, tagger(ids, labels=labels[:, 1:].contiguous()).loss)
    with pytest.raises(ValueError, match="batch_size"):
        tagger(ids, labels=labels[:, :5])


def test_beliefs_of_layers_without_posterior_have_no_variance():
    model = KalmixModel(config(layers=["kla", "attention"])).eval()
    assert [belief.variance is None for belief in model(tokens(2, 6), output_beliefs=True).beliefs] == [False, True]


def test_usual_names_of_sizes():
    one = config(layers={"mixer": "attention", "kv_heads": 2}, num_hidden_layers=3, num_attention_heads=4)
    model = KalmixForCausalLM(one)
    assert [mixer.heads for mixer in model.model.layers.mixers] == [4, 4, 4]
    mixed = config(layers=["kla", "attention", {"mixer": "gla", "heads": 1, "mlp": 8}], num_attention_heads=2)
    mixed.intermediate_size, mixed.initializer_range = 40, 0.5
    blocks = KalmixForCausalLM(mixed).model.layers
    assert mixed.num_hidden_layers == 3 and blocks[1].mixer.heads == 2 and blocks[2].mixer.sizes.heads == 1
    assert [block.mlp and block.mlp.out_proj.in_features for block in blocks] == [None, 40, 8]
    assert KalmixConfig(**json.loads(mixed.to_json_string())).to_dict() == mixed.to_dict()
    wide = KalmixForCausalLM(config(initializer_range=0.5, num_hidden_layers=1, vocab_size=500))
    for module in (wide.lm_head, wide.get_input_embeddings()):
        assert float(module.weight.detach().std()) == pytest.approx(0.5, rel=0.05)
    mixed.num_hidden_layers = 2
    with pytest.raises(ArgumentError, match="`num_hidden_layers` is 2; expected 3"):
        KalmixForCausalLM(mixed)


def test_shifted_labels_are_not_shifted_again():
    model, ids = build("hybrid"), tokens(2, 6)
    labels = torch.where(torch.rand(2, 6, generator=torch.Generator().manual_seed(0)) < 0.3, -100, ids)
    expected = model(ids, labels=labels).loss
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, expected)
    torch.testing.assert_close(model(ids, labels=labels, shift_labels=shifted).loss, expected)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1]])
    shifted = torch.where(mask == 1, shifted, -100)
    logits = model(ids, attention_mask=mask).logits
    loss = model(ids, attention_mask=mask, shift_labels=shifted).loss
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), shifted.flatten()))


def test_only_requested_logits_are_computed():
    """`generate` computes the logits of the last prompt token only; with labels, the loss counts all tokens."""
    model, ids, widths = build("hybrid"), tokens(2, 7), []
    model.lm_head.register_forward_hook(lambda module, args, output: widths.append(output.shape[1]))
    model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert widths == [1, 1, 1]
    full = model(ids, labels=ids)
    some = model(ids, labels=ids, logits_to_keep=2)
    assert torch.equal(some.loss, full.loss) and torch.equal(some.logits, full.logits[:, -2:])


def test_parameters_that_stay_in_float32_exist():
    for layers, expected in (("gpt", set()), ("kla", {"dynamics"}), ("filters", {"dynamics", "value_dynamics"})):
        assert build(layers)._keep_in_fp32_modules_strict == expected


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dynamics_of_new_models_have_at_least_float32(dtype):
    """Dynamics of loaded models have it too. All other parameters have the dtype that `from_config` receives."""
    model = AutoModelForCausalLM.from_config(build("filters").config, dtype=dtype)
    kept = {name: x.dtype for name, x in model.named_parameters() if "dynamics" in name}
    assert len(kept) > 4 and set(kept.values()) == {torch.promote_types(dtype, torch.float32)}
    assert {x.dtype for name, x in model.named_parameters() if name not in kept} == {dtype}
    assert model(tokens(2, 6)).logits.dtype == dtype


def test_attentions_are_the_maps_of_the_layers():
    model, ids = build(["kla", "attention", {"mixer": "gla", "heads": 2}]), tokens(2, 5)
    output = model(ids, output_attentions=True, attention_mask=torch.ones(2, 5))
    x = model.get_input_embeddings()(ids)
    for block, found in zip(model.model.layers, output.attentions, strict=True):
        expected = block.mixer.attention_map(block.norm(x))
        assert found.shape[0] == 2 and found.shape[2:] == (5, 5)
        torch.testing.assert_close(found, expected)
        x = block(x).hidden_state
    torch.testing.assert_close(output.attentions[1].sum(-1), torch.ones(2, output.attentions[1].shape[1], 5))
    assert model(ids).attentions is None
    with pytest.raises(ArgumentError, match="padding"):
        model(ids, output_attentions=True, attention_mask=torch.tensor([[0, 1, 1, 1, 1]] * 2))
    with pytest.raises(ArgumentError, match="earlier tokens"):
        model(ids[:, :1], past_key_values=model(ids).past_key_values, output_attentions=True)
    with pytest.raises(ArgumentError, match="RadialTangentialAttention has no attention map"):
        build(["rt-afa"])(ids, output_attentions=True)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_of_requested_fields(dtype):
    model = build(["gla", "bayesian", "kla"]).to(dtype)
    output = model.model(tokens(2, 5), output_attentions=True, output_beliefs=True, output_posterior=True)
    assert {x.dtype for x in (*output.attentions, *(belief.mean for belief in output.beliefs))} == {dtype}
    belief_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert {belief.variance.dtype for belief in output.beliefs[1:]} == {belief_dtype}
    assert output.posterior.variance.dtype == belief_dtype


@torch.no_grad()
@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_attention_uses_the_chosen_implementation(monkeypatch, tmp_path, name):
    """Both give the same logits, for plain, padded, packed and continued inputs."""
    ids, calls = tokens(2, 6), []
    layers = [{"mixer": "attention", "heads": 4, "kv_heads": 2}, "kla"]
    reference = build(layers)
    inputs = [
        {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0]])},
        {"seq_idx": torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])},
        {"past_key_values": reference(ids).past_key_values},
        {},
    ]
    expected = [reference(ids, **copy.deepcopy(x)).logits for x in inputs]
    reference.save_pretrained(tmp_path)
    loaded = KalmixForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    switched = build(layers)
    switched.set_attn_implementation(name)
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, **given: calls.append(1) or sdpa(*args, **given)
    )
    for model in (loaded, switched):
        assert model.model.layers.mixers[0].implementation == model.config._attn_implementation == name
        for x, logits in zip(inputs, expected, strict=True):
            shown = torch.ones(2, 6, dtype=torch.bool) if "attention_mask" not in x else x["attention_mask"] == 1
            torch.testing.assert_close(model(ids, **copy.deepcopy(x)).logits[shown], logits[shown])
    assert bool(calls) == (name == "sdpa")


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_other_attention_implementations_are_refused(name):
    with pytest.raises((ValueError, ImportError), match=r"(?i)flash|flex"):
        build("gpt").set_attn_implementation(name)
    with pytest.raises((ValueError, ImportError), match=r"(?i)flash|flex"):
        AutoModelForCausalLM.from_config(config(layers="attention"), attn_implementation=name)


def test_configuration_names_default_targets_to_peft(monkeypatch):
    """PEFT calls `to_dict` before it looks for the targets of a model type."""
    peft = types.ModuleType("peft.utils.constants")
    peft.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING = {}
    monkeypatch.setitem(sys.modules, "peft.utils.constants", peft)
    model = build("hybrid")
    model.config.to_dict()
    targets = peft.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING["kalmix"]
    for layers in LAYERS:
        for block in build(layers).model.layers:
            names = [name for name, x in block.named_modules() if isinstance(x, torch.nn.Linear)]
            assert any(name.split(".")[-1] in targets for name in names if name.startswith("mixer."))


def test_the_trainer_finds_labels_in_evaluation():
    """It computes no loss if a batch lacks a parameter of `forward` whose name contains "label"."""
    assert find_labels(KalmixForCausalLM) == ["labels"]


@pytest.mark.parametrize("dropout", [-1.0, 2.0])
def test_impossible_dropout_is_refused(dropout):
    with pytest.raises(ArgumentError, match="classifier_dropout"):
        KalmixConfig(layers=["kla"], classifier_dropout=dropout)
