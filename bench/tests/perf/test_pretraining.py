"""`kalmix_bench.perf.pretraining`: rows of our models and of peers, trained from shards."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from kalmix_bench.perf import pretraining
from kalmix_bench.perf.models.build import build
from kalmix_bench.perf.models.protocol import PRESETS

LAPTOP = PRESETS["laptop"]


def test_rates_leave_out_the_first_steps() -> None:
    rows = [
        {"tokens": 10.0},
        {"tokens": 100.0, "tokens_per_second": 1.0, "mfu": 0.1},
        {"tokens": 200.0, "tokens_per_second": 50.0, "mfu": 0.5},
        {"tokens": 300.0, "tokens_per_second": 25.0, "mfu": 0.25},
        {"tokens": 400.0, "tokens_per_second": 50.0, "mfu": 0.5},
    ]
    found = pretraining.rates(rows)
    assert found == {"tokens_per_s": 50.0, "tokens_per_s_mean": 300 / 8, "mfu": 0.5}


def test_work_of_a_peer_has_the_attention_of_our_layer() -> None:
    with torch.device("meta"):
        ours, llama = build("attention", LAPTOP), build("llama", LAPTOP)
    found = [pretraining.work_per_token(name, model, LAPTOP) for name, model in (("attention", ours), ("llama", llama))]
    assert found[1] == pytest.approx(found[0], rel=0.02)
    linear = 6 * sum(x.weight.numel() for x in llama.modules() if isinstance(x, torch.nn.Linear))
    assert found[1] == linear + 6 * LAPTOP.layers * LAPTOP.seq_len * LAPTOP.hidden_size


@pytest.mark.slow
def test_models_and_peers_train_from_the_same_shards(tmp_path: Path, word_shards: Path, monkeypatch, capsys) -> None:
    output = tmp_path / "rows.jsonl"
    for name in ("gated-deltanet", "llama"):
        asked = ("--model", name, "--shards", word_shards, "--preset", "laptop", "--steps", "12", "--output", output)
        monkeypatch.setattr(sys, "argv", ["pretraining", *map(str, asked)])
        pretraining.main()
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["model"] for row in rows] == ["gated-deltanet", "llama"]
    for row in rows:
        assert row["tokens_per_s"] > 0 and row["gpus"] == 1 and row["commit"]
        assert row["last_loss"] < row["first_loss"]
    monkeypatch.setattr(sys, "argv", ["pretraining", "--report", "--output", str(output)])
    pretraining.main()
    assert "to Llama" in capsys.readouterr().out
