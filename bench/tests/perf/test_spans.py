"""Tests of the script that times spans of long sequences."""

import sys
from functools import partial

import pytest
import torch

from kalmix_bench.perf import spans, timing
from kalmix_bench.perf.workloads import SIGNALS
from kalmix_bench.runner.json_lines import read_rows

SMALL = ("--length", "64", "--heads", "2", "--width", "16", "--dtype", "float32")
GRADIENTS = {
    "dense": {"q", "k", "v", "log_decay", "obs_noise", "process_noise"},
    "delta": {"q", "k", "v", "log_decay", "gain"},
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs the script with arguments and returns its rows."""
    monkeypatch.setitem(timing.BUDGET, "cpu", 0.05)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "rows.jsonl"

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["spans", *SMALL, *arguments, "--output", str(file)])
        spans.main()
        return read_rows(file)

    return call


@pytest.mark.slow
def test_each_op_and_number_of_spans_has_a_row(run, capsys):
    rows = run("--op", "dense", "delta", "--spans", "1", "2", "--commit", "abc")
    assert [(row["op"], row["spans"]) for row in rows] == [("dense", 1), ("dense", 2), ("delta", 1), ("delta", 2)]
    for row in rows:
        assert (row["status"], row["reference"], row["commit"], row["length"]) == ("ok", "float64", "abc", 64)
        assert min(row["forward_ms"], row["both_ms"]) > 0 and {"forward_peak", "both_peak"} <= row.keys()
        assert 0 < row["error"] < 1e-5
        assert row["gradient_errors"].keys() == GRADIENTS[row["op"]]
        assert all(0 < error < 1e-5 for error in row["gradient_errors"].values())
    printed = capsys.readouterr().out
    assert "delta, forward: " in printed and "dense, forward + backward: " in printed


def test_errors_compare_spans_with_the_op(run, monkeypatch):
    def wrong(op, q, k, v, spans, **given):
        return spans_of(op, q, k, 1.01 * v, spans=spans, **given)

    spans_of = spans.filter_in_spans
    monkeypatch.setattr(spans, "filter_in_spans", wrong)
    whole, cut = run("--op", "delta", "--spans", "1", "2")
    assert whole["error"] < 1e-5 and cut["error"] == pytest.approx(0.01, rel=1e-3)
    assert cut["gradient_errors"]["v"] == pytest.approx(0.01, rel=1e-3)


def test_a_failure_is_a_row_and_others_follow(run, monkeypatch, capsys):
    def fail(error, *_, **__):
        raise error

    monkeypatch.setattr(spans, "filter_in_spans", partial(fail, torch.OutOfMemoryError("full")))
    monkeypatch.setitem(SIGNALS, "ridge", partial(fail, RuntimeError("no such signals")))
    rows = run("--op", "ridge", "delta", "--spans", "2", "1")
    assert [row["status"] for row in rows] == ["failed", "failed", "out of memory", "ok"]
    assert "no such signals" in rows[0]["reason"]
    assert "delta, forward: not compared" in capsys.readouterr().out


def test_float32_is_the_reference_if_float64_fails(run, monkeypatch):
    def reference(op, x, dtype, **options):
        if dtype == torch.float64:
            raise torch.OutOfMemoryError("full")
        return original(op, x, dtype, **options)

    original = spans.Reference
    monkeypatch.setattr(spans, "Reference", reference)
    (row,) = run("--op", "dense", "--spans", "4")
    assert row["reference"] == "float32" and 0 < row["error"] < 1e-5


def test_no_row_begins_after_the_deadline(run, capsys):
    assert run("--op", "delta", "--deadline", "0") == []
    assert "delta, spans 1: not begun" in capsys.readouterr().out


def test_spans_that_do_not_divide_the_length_are_refused(run, capsys):
    with pytest.raises(SystemExit):
        run("--spans", "5")
    assert "--spans has 5, which does not divide 64 tokens" in capsys.readouterr().err


def test_summary_names_the_faster_spans():
    times = {1: 4.0, 4: 5.0, 8: 2.0, 16: 3.0}
    rows = [{"op": "delta", "spans": count, "forward_ms": ms} for count, ms in times.items()]
    assert spans.summary("delta", rows, "forward").endswith("faster with 8, 16 spans; with 8, 2.00 times as fast")
    assert spans.summary("delta", rows[:2], "forward").endswith("no number of spans is faster than the op")
