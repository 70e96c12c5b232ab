"""Tests of the script that compares tiles of the step of `Attention`; Triton's interpreter runs the kernels."""

import sys

import pytest
import torch

from kalmix.layers.fused.triton import attention_step
from kalmix_bench.perf import attention_tiles
from kalmix_bench.runner.json_lines import read_rows

SMALL = ("--batches", "3", "--tokens", "20", "--widths", "16", "--columns", "32", "--commit", "abc")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs the script on the CPU with two choices of constants, and returns its rows."""
    tiles = [attention_tiles.NOW, attention_tiles.Tiles(64, 32, 5, 1)]
    monkeypatch.setattr(attention_tiles, "TILES", tiles)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "rows.jsonl"

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["attention_tiles", *SMALL, *arguments, "--output", str(file)])
        attention_tiles.main()
        return read_rows(file)

    return call


@pytest.mark.slow
def test_tiles_agree_with_float64(run, capsys):
    """Histories are full, empty, partly filled, or have begun the ring again."""
    rows = run("--repeats", "1", "2")
    kinds = [(row["full"], row["dtype"], row["repeat"], row["parts"]) for row in rows]
    sorts = [(True, "bfloat16"), (False, "bfloat16"), (False, "float32")]
    assert kinds == [
        (*sort, repeat, parts) for sort in sorts for repeat in (1, 2) for parts in (attention_tiles.NOW.parts, 5)
    ]
    assert all(row["right"] and row["commit"] == "abc" for row in rows)
    assert all(row["error"] < 1e-6 and row["key_error"] < 1e-6 for row in rows if row["dtype"] == "float32")
    assert "5 parts of 1 tokens or more: 6 of 6 rows are right" in capsys.readouterr().out
    assert attention_tiles.NOW.parts == attention_step.PARTS  # the constants are restored


def test_wrong_results_are_found(run, monkeypatch, capsys):
    step = attention_step.step
    monkeypatch.setattr(attention_step, "step", lambda *given: step(*given) * 1.02)
    rows = run("--repeats", "1")
    assert not any(row["right"] for row in rows)
    assert min(row["error"] for row in rows) == pytest.approx(0.02, rel=0.2)
    assert "5 parts of 1 tokens or more: 0 of 3 rows are right" in capsys.readouterr().out


def test_no_size_begins_after_the_deadline(run, capsys):
    assert run("--deadline", "0") == []
    assert "not begun: {'batch': 3, 'tokens': 20, 'width': 16" in capsys.readouterr().out
