"""Components of a run: dataset, parameter groups, schedule, evaluation, recipes, text diagnostics."""

from __future__ import annotations

import gzip
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerControl, TrainerState

from kalmix import ArgumentError
from kalmix.analysis.text_diagnostics import diagnose_text
from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.training import Recipe, parse_layers
from kalmix.training.corpus import Corpus, train_tokenizer
from kalmix.training.data import SequenceDataset, encode_documents, wrap_tokenizer
from kalmix.training.evaluation import bits_per_byte, compressor_bits_per_byte, evaluate, surprisals
from kalmix.training.schedule import Curve, SaveRule, Schedule, interruptible


def model(layers: tuple = ("kla", "attention"), vocabulary: int = 257) -> KalmixForCausalLM:
    torch.manual_seed(0)
    return KalmixForCausalLM(KalmixConfig(vocab_size=vocabulary, hidden_size=8, layers=list(layers))).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return wrap_tokenizer(train_tokenizer([], "bytes"))


def test_dataset_contains_every_token_once_except_the_remainder() -> None:
    blocks = SequenceDataset(torch.arange(22), 5, end_id=-1)
    assert torch.equal(torch.cat([blocks[i]["input_ids"] for i in range(len(blocks))]), torch.arange(20))


def test_position_ids_start_anew_at_each_document() -> None:
    blocks = SequenceDataset(torch.tensor([0, 4, 4, 0, 4, 4, 4, 0]), 4, end_id=0, separate_documents=True)
    assert [blocks[i]["position_ids"].tolist() for i in range(2)] == [[0, 1, 2, 0], [0, 1, 2, 0]]
    assert [blocks[i]["labels"].tolist() for i in range(2)] == [[-100, 4, 4, -100], [-100, 4, 4, -100]]


def test_number_of_documents_in_a_batch() -> None:
    ids = torch.tensor([0, 4, 4, 0, 4, 4, 4, 4, 0, 0, 0, 4])
    blocks = SequenceDataset(ids, 4, end_id=0, separate_documents=True)
    assert [blocks.max_documents(size) for size in (1, 2, 3, 9)] == [3, 5, 6, 6]
    assert SequenceDataset(ids, 4, end_id=0).max_documents(2) is None


def test_text_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(ArgumentError, match="seq_len"):
        SequenceDataset(torch.arange(4), 5, end_id=0)


def test_learning_rate_is_a_trapezoid() -> None:
    schedule = Schedule(steps=10, minutes=None, curve=Curve("trapezoid", warmup=0.2, cooldown=0.4))
    factors = []
    for schedule.progress in (0.0, 0.1, 0.2, 0.6, 0.8, 1.0):
        factors.append(schedule.lr_factor())
    assert factors == pytest.approx([0, 0.5, 1, 1, 0.5, 0])


def test_a_signal_while_processes_agree_stops_all_of_them_after_the_next_step(monkeypatch) -> None:
    """It is not lost, and its process does not stop alone."""
    schedule = Schedule(steps=10, minutes=None, curve=Curve("wsd", 0.0, 0.5), saves=SaveRule(seconds=math.inf))
    control, state = TrainerControl(), TrainerState()
    arguments: Any = SimpleNamespace(device="cpu")
    with interruptible(schedule):
        exchanged = []

        def all_reduce(values: torch.Tensor, _: Any) -> None:
            exchanged.append(values[1].item())
            if len(exchanged) == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        stopped = []
        for _ in range(2):
            schedule.on_optimizer_step(arguments, state, control)
            schedule.on_step_end(arguments, state, control)
            stopped.append((control.should_training_stop, control.should_save))
        assert exchanged == [0, 1] and stopped == [(False, False), (True, True)]


def test_cosine_and_wsd_schedules_end_at_the_final_rate() -> None:
    cosine = Curve("cosine", warmup=0.2, cooldown=0.0, final=0.1)
    assert [cosine(x) for x in (0.0, 0.1, 0.2, 0.6, 1.0)] == pytest.approx([0, 0.5, 1, 0.55, 0.1])
    decay = Curve("wsd", warmup=0.0, cooldown=0.4, final=0.1)
    assert [decay(x) for x in (0.0, 0.6, 0.7, 1.0)] == pytest.approx([1, 1, 0.55, 0.1])


def test_uniform_model_needs_log2_of_the_vocabulary_per_token(tokenizer) -> None:
    network = model()
    nn.init.zeros_(network.get_output_embeddings().weight)
    documents = ("héllo", "two")
    tokens = len("héllo".encode()) + 1 + len("two")  # an end-of-text token between the documents
    found = bits_per_byte(network, tokenizer, documents, window=4)
    assert found == pytest.approx(tokens * math.log2(257) / len("héllo\n\ntwo".encode()), rel=1e-5)


def test_wrong_arguments_of_an_evaluation_are_named(tokenizer) -> None:
    good = {"model": model(), "tokenizer": tokenizer, "documents": ["two"], "window": 4, "batch_size": 1}
    wrong = {"model": [None, nn.Linear(1, 1)], "tokenizer": [None, "bytes"], "documents": ["two", [], ["", ""], [3], 3]}
    wrong |= {"window": [0, -1, 2.0, "4"], "batch_size": [0, None]}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ArgumentError, match=f"`{name}`"):
                bits_per_byte(**good | {name: value})
    with pytest.raises(ArgumentError, match="`tokenizer` has a token"):
        bits_per_byte(**good | {"model": model(vocabulary=50)})
    with pytest.raises(ArgumentError, match="`run`"):
        evaluate(good["model"])


def test_compressors_get_the_whole_held_out_text() -> None:
    documents = ("a" * 1000, "b")
    data = "\n\n".join(documents).encode()
    assert Corpus((), documents).held_out_text.encode() == data
    found = compressor_bits_per_byte(documents)
    assert found["gzip -9"] == 8 * len(gzip.compress(data, 9)) / len(data)
    assert set(found) == {"gzip -9", "xz -9"}


def test_encoded_documents_begin_with_end_of_text(tokenizer) -> None:
    ids = encode_documents(tokenizer, ["ab", "c"])
    assert (ids == 0).tolist() == [True, False, False, True, False]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("kla", ("kla",)),
        ("kla, kla,attention", ("kla", "kla", "attention")),
        ("3*kla,attention", ("kla", "kla", "kla", "attention")),
        ('["kla", {"mixer": "kla", "slots": 8}]', ("kla", {"mixer": "kla", "slots": 8})),
    ],
)
def test_typed_layers_are_parsed(typed: str, meant: tuple) -> None:
    assert parse_layers(typed) == meant


@pytest.mark.parametrize(
    "typed", ["", "kla,,kla", "x*kla", "0*kla", "99999*kla", "²*kla", "2*", "[1]", "[kla", "[]", "{}", 3]
)
def test_mistyped_layers_are_refused(typed: str) -> None:
    with pytest.raises(ArgumentError, match="layers"):
        parse_layers(typed)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 0},
        {"batch_size": -1},
        {"learning_rate": 0.0},
        {"learning_rate": math.nan},
        {"minutes": -1.0},
        {"cooldown": 2.0},
        {"loss": "l2"},
        {"steps": None},
        {"layers": ()},
        {"seq_len": 1},
        {"seed": -1},
        {"seed": 2**32},
        {"weight_decay": -0.1},
        {"warmup": 0.6, "cooldown": 0.5},
        {"text": ""},
        {"text": " "},
    ],
    ids=str,
)
def test_wrong_recipes_are_refused(changes: dict) -> None:
    with pytest.raises(ArgumentError, match=next(iter(changes)) if changes != {"steps": None} else "minutes"):
        Recipe(**{"steps": 1, **changes})


def test_recipe_is_loaded_as_saved(tmp_path: Path) -> None:
    recipe = Recipe(steps=3, layers=("kla", {"mixer": "kla", "slots": 2}))
    recipe.save(tmp_path)
    assert Recipe.load(tmp_path) == recipe


class TestTextDiagnostics:
    def test_values_match_the_model(self, tokenizer) -> None:
        network, text = model(("kla", "attention", "kla")), "naïve text"
        found = diagnose_text(network, tokenizer, text, weights=True)
        count = len(text.encode())
        assert "".join(found.tokens) == text
        assert len(found.tokens) == count
        assert found.names == ["layer 1", "layer 3"]
        assert found.variance.shape == found.gain.shape == (2, count)
        assert bool((found.variance > 0).all())
        assert bool(((found.gain > 0) & (found.gain < 1)).all())
        ids = tokenizer("<|endoftext|>" + text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        nats = surprisals(network, ids[0], window=64)
        torch.testing.assert_close(found.surprisal * math.log(2), nats)

    def test_attention_weights_are_causal(self, tokenizer) -> None:
        weights = diagnose_text(model(("kla",)), tokenizer, "twelve bytes", weights=True).weights
        assert weights is not None
        assert weights.shape == (1, 12, 12)
        assert torch.equal(weights, weights.tril())
        assert bool((weights.diagonal(dim1=1, dim2=2) > 0).all())

    @pytest.mark.parametrize(
        "mixer",
        [
            "bayesian",  # without an adaptive ridge, which the token would change
            {"mixer": "gated-kalmanet", "ridge": {"name": "fixed", "value": 0.25}, "solver": "exact"},
        ],
        ids=["bayesian", "gated-kalmanet"],
    )
    def test_write_gain_is_the_relative_drop_of_variance(self, tokenizer, mixer) -> None:
        """Compare with the variance of the layer's op at the token's key, with and without the token."""
        network, text = model((mixer,)), "twelve bytes"
        found = diagnose_text(network, tokenizer, text)
        assert bool(((found.gain > 0) & (found.gain < 1)).all()) and bool((found.variance > 0).all())
        layer = network.model.layers[0].mixer
        ids = torch.tensor(tokenizer("<|endoftext|>" + text, add_special_tokens=False)["input_ids"])
        inner = network.model
        x = inner.layers(inner.embed_tokens(ids[None]), output_states=True).mixer_inputs[0]
        _, k, v, _ = layer.project(x, None, None, None)
        signals, silent = layer.signals(x), k.clone()
        silent[:, 5] = 0
        after, before = (layer.op(k, keys, v, **signals, variance=True).variance for keys in (k, silent))
        want = (1 - after / before)[0, 5].mean()
        torch.testing.assert_close(found.gain[0, 4], want.float().detach(), rtol=1e-4, atol=1e-5)

    def test_model_without_beliefs_is_refused(self, tokenizer) -> None:
        with pytest.raises(ArgumentError, match="no layer with a write gain"):
            diagnose_text(model(("attention",)), tokenizer, "text")


def test_decoding_keeps_spaces(tokenizer) -> None:
    text = "a , b . I 'm n't ?"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
