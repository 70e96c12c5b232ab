"""Wrong arguments of models, and of their configuration, are named."""

import pytest
import torch
from transformers import PreTrainedConfig

from kalmix import ArgumentError
from kalmix.models import KalmixConfig, KalmixModel, LanguageModel

from .conftest import build, tokens

IDS = tokens(2, 6)


@pytest.fixture(scope="module")
def gpt():
    return build("gpt")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("input_ids", {"input_ids": IDS[0]}),
        ("input_ids", {"input_ids": IDS.tolist()}),
        ("input_ids", {"input_ids": IDS.float()}),
        ("inputs_embeds", {"input_ids": None, "inputs_embeds": torch.randn(2, 6, 8)}),
        ("inputs_embeds", {"input_ids": None, "inputs_embeds": torch.ones(2, 6, 16, dtype=torch.int64)}),
        ("x", {"input_ids": None, "inputs_embeds": torch.randn(2, 6, 16, dtype=torch.float64)}),
        ("past_key_values", {"past_key_values": ((IDS, IDS),)}),
        ("cache", {"cache": ((IDS, IDS),)}),
        ("position_ids", {"position_ids": [0, 1]}),
        ("labels", {"labels": IDS[:, :3]}),
        ("labels", {"labels": IDS.float()}),
        ("shift_labels", {"shift_labels": IDS[0]}),
        ("logits_to_keep", {"logits_to_keep": -1}),
        ("logits_to_keep", {"logits_to_keep": 1.5}),
    ],
)
def test_wrong_arguments_of_a_call_are_named(gpt, name, arguments):
    with pytest.raises(ArgumentError, match=f"`{name}`"):
        gpt(**{"input_ids": IDS, **arguments})


def test_configurations_of_other_models_are_refused():
    with pytest.raises(ArgumentError, match="`config` is a PreTrainedConfig; expected a KalmixConfig"):
        KalmixModel(PreTrainedConfig())


def test_labels_of_any_integer_type_give_the_same_loss(gpt):
    expected = gpt(IDS, labels=IDS).loss
    for dtype in (torch.int32, torch.uint8):
        assert torch.equal(gpt(IDS, labels=IDS.to(dtype)).loss, expected)


@pytest.mark.parametrize(("name", "value"), [("num_labels", 0), ("num_labels", "2"), ("eos_token_id", ["end"])])
def test_wrong_settings_are_refused(name, value):
    with pytest.raises(ArgumentError, match=f"`{name}`"):
        KalmixConfig(layers=["kla"], **{name: value})


X = torch.randn(2, 6, 16)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("x", {"x": IDS}),
        ("x", {"x": X[0]}),
        ("states", {"states": (None,)}),
        ("states", {"states": 3}),
        ("states", {"states": (None, None, None)}),
        ("segments", {"segments": torch.tensor([0, 6])}),
    ],
)
def test_wrong_arguments_of_a_language_model_are_named(name, arguments):
    model = LanguageModel(40, 16, ["kla", "attention"])
    with pytest.raises(ArgumentError, match=f"`{name}`"):
        model(**{"x": X, **arguments})


@pytest.mark.parametrize("hidden", [X[..., :3], "text"])
def test_wrong_hidden_states_of_logits_and_loss_are_named(hidden):
    model = LanguageModel(40, 16, ["kla"])
    with pytest.raises(ArgumentError, match="`hidden`"):
        model.logits(hidden)
    with pytest.raises(ArgumentError, match="`hidden`"):
        model.loss(hidden, IDS)


def test_missing_targets_are_named():
    with pytest.raises(ArgumentError, match="`targets` is None"):
        LanguageModel(40, 16, ["kla"]).loss(X, None)


def test_tied_embeddings_are_requested_by_a_bool():
    with pytest.raises(ArgumentError, match="`tie_word_embeddings`"):
        LanguageModel(40, 16, ["kla"], tie_word_embeddings="no")
