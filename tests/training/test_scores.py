"""Numbers in results and logs: context of scored tokens, bits per byte, tokens seen."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from kalmix import ArgumentError
from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.training.batching import plan_batches
from kalmix.training.corpus import load_corpus
from kalmix.training.data import encode_documents
from kalmix.training.evaluation import bits_per_byte, evaluate, surprisals
from kalmix.training.run import Run, train
from kalmix.training.trainer import KalmixTrainer


@pytest.fixture(scope="module")
def network() -> KalmixForCausalLM:
    """Return a model whose predictions depend on every token of their context."""
    torch.manual_seed(1)
    model = KalmixForCausalLM(KalmixConfig(vocab_size=17, hidden_size=8, layers=["kla", "attention"]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def with_context(model: KalmixForCausalLM, ids: torch.Tensor, start: int, token: int) -> float:
    """Return the surprisal of a token, predicted from all tokens since `start`."""
    return float(nn.functional.cross_entropy(model(ids[None, start:token]).logits[0, -1], ids[token]))


@pytest.mark.parametrize("length", [2, 7, 8, 9, 30])
@pytest.mark.parametrize("window", [2, 3, 4, 7, 64])
def test_each_token_is_scored_in_the_earliest_window_that_contains_it(network, window: int, length: int) -> None:
    """Windows start every half window, so each token has at least half a window of context, or all there is."""
    ids = torch.randint(17, (length,), generator=torch.Generator().manual_seed(0))
    scores, stride = surprisals(network, ids, window=window, batch_size=3), window // 2
    assert scores.shape == (length - 1,)
    for token in range(1, length):
        start = max(0, -(-(token - window) // stride)) * stride
        assert min(token, window - stride) <= token - start <= window
        assert float(scores[token - 1]) == pytest.approx(with_context(network, ids, start, token), abs=1e-5)
        for other in {start - stride, start + stride} & set(range(token)):
            assert float(scores[token - 1]) != pytest.approx(with_context(network, ids, other, token), abs=1e-4)


@pytest.mark.slow
def test_run_is_scored_with_windows_of_seq_len(recipe, tmp_path: Path) -> None:
    run = train(recipe(steps=4, learning_rate=1e-2), tmp_path)
    documents = run.corpus.held_out
    found = evaluate(run).bits_per_byte
    assert found == bits_per_byte(run.model, run.tokenizer, documents, window=16, batch_size=2)
    ids = encode_documents(run.tokenizer, documents)
    nats = sum(with_context(run.model, ids, max(0, -(-(t - 16) // 8)) * 8, t) for t in range(1, len(ids)))
    assert found == pytest.approx(nats / math.log(2) / len(run.corpus.held_out_text.encode()), rel=1e-5)


def test_logged_bits_per_byte_use_the_tokens_per_byte_of_their_text(recipe, tmp_path: Path) -> None:
    """Training text has fewer tokens per byte than held-out text, whose words the tokenizer has never seen."""
    text = tmp_path / "text.txt"
    draw, known, unknown = random.Random(0), ["the", "filter", "of", "a", "belief"], ["zyxwvuts", "qponm", "lkjihg"]
    text.write_text("\n\n".join(" ".join(draw.choices(words, k=30)) for words in [known] * 80 + [unknown] * 6))
    run = train(recipe(text=str(text), steps=3), tmp_path / "run")
    corpus = load_corpus(text)
    density = {
        "": len(encode_documents(run.tokenizer, corpus.training)) / len("\n\n".join(corpus.training).encode()),
        "eval_": len(encode_documents(run.tokenizer, corpus.held_out)) / len("\n\n".join(corpus.held_out).encode()),
    }
    assert density["eval_"] > 1.5 * density[""]
    for kind, tokens in density.items():
        rows = [row for row in run.history if f"{kind}loss" in row]
        assert rows
        for row in rows:
            assert row[f"{kind}bits_per_byte"] == pytest.approx(row[f"{kind}loss"] * tokens / math.log(2), rel=1e-9)


def test_logged_tokens_include_accumulated_batches(recipe, tmp_path: Path) -> None:
    train(recipe(steps=2, grad_accum=3), tmp_path)
    history = json.loads((tmp_path / "history.json").read_text())
    assert history[-1]["tokens"] == 2 * 3 * 2 * 16  # steps, batches a step, sequences, tokens


@pytest.mark.parametrize(("batch", "processes"), [(2, 3), (5, 1)])
def test_logged_tokens_include_all_processes(
    recipe, monkeypatch: pytest.MonkeyPatch, batch: int, processes: int
) -> None:
    logged: dict[str, Any] = {}
    monkeypatch.setattr(Trainer, "log", lambda trainer, logs: logged.update(logs))
    trainer: Any = object.__new__(KalmixTrainer)
    sizes = plan_batches(recipe(grad_accum=2, batch_size=batch), processes)
    trainer.data = SimpleNamespace(batching=sizes, tokens_per_byte={})
    trainer.schedule, trainer.state = SimpleNamespace(progress=0.5), SimpleNamespace(global_step=7)
    trainer.log({})
    assert logged["tokens"] == 7 * 2 * batch * processes * 16


def test_progress_that_cannot_be_called_is_refused():
    with pytest.raises(ArgumentError, match="`progress` is a int"):
        evaluate(object.__new__(Run), progress=3)
