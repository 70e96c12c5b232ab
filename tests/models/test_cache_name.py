"""The cache has two names, `cache` and `past_key_values`: models accept both, and outputs answer to both."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import pickle
import warnings

import pytest
import torch
from accelerate.utils import convert_to_fp32
from transformers import DynamicCache, GenerationMixin, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from kalmix import ArgumentError
from kalmix.models import (
    KalmixForCausalLM,
    KalmixForSequenceClassification,
    KalmixForTokenClassification,
    KalmixModel,
    capture_decoding,
)
from kalmix.models.cache_name import CACHE_NAME, CACHE_NAMES, cache_of

from .conftest import LAYERS, build, tokens
from .test_captured_step import Tape

MODELS = [KalmixModel, KalmixForCausalLM, KalmixForSequenceClassification, KalmixForTokenClassification]
BOTH = r"^`cache` and `past_key_values` are both given; expected one of them, since both are names of one argument\.$"
both_names = pytest.mark.parametrize("name", CACHE_NAMES)


@pytest.fixture(autouse=True)
def no_warnings(monkeypatch):
    """Fail if a test warns, through `warnings` or once through the logger of transformers."""
    logged: list[str] = []
    monkeypatch.setattr(logging.Logger, "warning_once", lambda logger, text, *args, **kwargs: logged.append(text))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(past_key_values|cache)")
        yield
    assert not [text for text in logged if "deprecated" in text]


def test_cache_name_is_that_of_the_installed_transformers():
    assert CACHE_NAME in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    assert CACHE_NAME in CausalLMOutputWithPast(**{CACHE_NAME: 1})
    assert cache_of(CausalLMOutputWithPast(**{CACHE_NAME: 1})) == 1


@torch.no_grad()
@both_names
@pytest.mark.parametrize("model_class", MODELS)
def test_models_accept_both_names(model_class, name):
    torch.manual_seed(0)
    model, ids = model_class(build("hybrid").config).eval(), tokens(2, 6)
    expected = model(ids)[0]
    cache = DynamicCache(config=model.config)
    model(ids[:, :4], **{name: cache})
    found = model(ids[:, 4:], **{name: cache})[0]
    assert cache.get_seq_length() == 6
    torch.testing.assert_close(found, expected if found.ndim == 2 else expected[:, 4:])
    positional = DynamicCache(config=model.config)
    model(ids, None, None, positional)
    assert positional.get_seq_length() == 6


@pytest.mark.parametrize("model_class", MODELS)
def test_both_names_in_one_call_are_refused(model_class):
    model, ids = model_class(build("hybrid").config).eval(), tokens(1, 3)
    cache = DynamicCache(config=model.config)
    with pytest.raises(ArgumentError, match=BOTH):
        model(ids, cache=cache, past_key_values=cache)
    assert model(ids, cache=cache, past_key_values=None) is not None
    if model_class is KalmixForCausalLM:
        with pytest.raises(ArgumentError, match=BOTH):
            model.generate(ids, cache=cache, past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("model_class", MODELS[:2])
def test_outputs_answer_to_both_names(model_class):
    model, ids = model_class(build("hybrid").config).eval(), tokens(2, 6)
    output = model(ids)
    assert isinstance(output.cache, DynamicCache) and output.past_key_values is output.cache
    for name in CACHE_NAMES:
        assert name in output and output[name] is output.cache and output.get(name) is output.cache
    assert [name for name in output if name in CACHE_NAMES] == [CACHE_NAME]
    assert [x is output.cache for x in output.to_tuple()] == [False, True]
    assert output[1] is output.cache and model(ids, return_dict=False)[1] is not None

    without = model(ids, use_cache=False)
    assert without.cache is None and without.past_key_values is None
    for name in CACHE_NAMES:
        assert name not in without and without.get(name, 5) == 5
        with pytest.raises(KeyError):
            without[name]


@torch.no_grad()
def test_copies_of_outputs_keep_the_cache():
    """Pickle, accelerate's mixed precision, FSDP and the trees of PyTorch copy outputs."""
    model, ids = build("hybrid"), tokens(2, 6)
    output = model(ids, output_beliefs=True)
    leaves, structure = torch.utils._pytree.tree_flatten(output, is_leaf=lambda x: x is output.cache)
    copies = {
        "tree": torch.utils._pytree.tree_unflatten(leaves, structure),
        "accelerate": convert_to_fp32(output),
        "fsdp": dataclasses.replace(output),
        "pickle": pickle.loads(pickle.dumps(output)),
    }
    for kind, copy in copies.items():
        assert type(copy) is type(output) and list(copy) == list(output), kind
        assert copy.cache is copy.past_key_values, kind
        assert copy.cache.get_seq_length() == 6, kind
    changed = dataclasses.replace(output, **{CACHE_NAME: None})
    assert changed.cache is None and changed.past_key_values is None


def test_evaluation_of_the_trainer_keeps_logits_alone():
    model, ids = build("hybrid"), tokens(2, 6)
    kept = set(model(ids, output_beliefs=True)) - set(model.config.keys_to_ignore_at_inference)
    assert kept == {"logits"}
    assert {CACHE_NAME} <= set(model._skip_keys_device_placement)


@both_names
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}])
def test_generation_continues_a_cache_of_either_name(name, options):
    model, ids = build("hybrid"), tokens(1, 8)
    generation = {**options, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, **generation)
    cache = DynamicCache(config=model.config)
    if not options:  # beams and drafts begin with an empty cache
        with torch.no_grad():
            model(ids[:, :5], **{name: cache})
    found = model.generate(ids, **{name: cache}, **generation, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)
    assert cache_of(found) is cache and cache.get_seq_length() == 13


@both_names
def test_automatic_capture_leaves_a_given_cache_alone(name):
    model, ids = build("hybrid"), tokens(1, 6)
    expected = model.generate(ids, max_new_tokens=9, do_sample=False)
    model.graph = Tape
    cache = DynamicCache(config=model.config)
    assert torch.equal(model.generate(ids, max_new_tokens=9, do_sample=False, **{name: cache}), expected)
    assert cache.get_seq_length() == 14


@torch.no_grad()
@both_names
def test_steps_with_either_name_are_captured(name):
    model, ids = build("hybrid"), tokens(2, 10)
    expected = model(ids).logits
    with capture_decoding(model, Tape) as step:
        cache, found = StaticCache(config=model.config, max_cache_len=12), []
        model(ids[:, :5], **{name: cache})
        for token in ids[:, 5:].split(1, 1):
            output = model(token, **{name: cache})
            assert output.cache is output.past_key_values is cache
            found.append(output.logits.clone())
    assert (step.captures, step.replays) == (1, 4)
    torch.testing.assert_close(torch.cat(found, 1), expected[:, 5:], rtol=0, atol=1e-5)


@torch.no_grad()
@both_names
@pytest.mark.slow
def test_either_name_is_compiled_into_one_graph(name):
    model, ids = build(["kla"]), tokens(1, 6)
    expected = model(ids).logits

    def step(token, cache):
        output = model(token, **{name: cache})
        assert output[name] is getattr(output, name)
        return output.logits, output.cache, output.past_key_values

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=8)
    model(ids[:, :4], **{name: cache})
    for index in (4, 5):
        logits, one, other = compiled(ids[:, index : index + 1], cache)
        assert one is other and one.get_seq_length() == index + 1
        torch.testing.assert_close(logits, expected[:, index : index + 1])


@both_names
def test_a_wrong_cache_is_refused_by_the_name_in_the_call(name):
    with pytest.raises(ArgumentError, match=f"`{name}` is a tuple; expected a cache, as in the output"):
        build(LAYERS["kla"])(tokens(1, 3), **{name: ()})
