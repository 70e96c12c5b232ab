"""Test of the script that times packed rows."""

import json
import sys

import pytest

from kalmix_bench.perf import packing, timing


def test_packing_times_each_op_and_length(tmp_path, monkeypatch, capsys):
    given = ["packing", "--ops", "delta", "attend", "--tokens", "32", "--lengths", "32", "8", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", given)
    monkeypatch.setattr(packing, "WIDTH", 8)
    monkeypatch.setitem(timing.BUDGET, "cpu", 0.05)
    packing.main()
    rows = json.loads(next(tmp_path.iterdir()).read_text())["rows"]
    assert [(row["op"], row["sequences"]) for row in rows] == [("delta", 1), ("delta", 4), ("attend", 1), ("attend", 4)]
    assert all(min(row["forward_ms"], row["both_ms"]) > 0 for row in rows)
    assert "attend" in capsys.readouterr().out


def test_lengths_that_do_not_divide_the_tokens_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["packing", "--tokens", "32", "--lengths", "5"])
    with pytest.raises(SystemExit):
        packing.main()
    assert "--lengths has 5, which does not divide 32 tokens" in capsys.readouterr().err
