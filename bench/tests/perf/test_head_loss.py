"""`kalmix_bench.perf.head_loss`: every way of computing the loss has the gradients of all logits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kalmix_bench.perf import head_loss


def test_every_way_has_the_same_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--batch 2 --tokens 16 --hidden-size 8 --vocab-size 50 --repeats 1 --device cpu --commit abc --output"
    monkeypatch.setattr(sys, "argv", ["head_loss", *options.split(), str(tmp_path)])
    head_loss.main()
    (file,) = tmp_path.iterdir()
    results = json.loads(file.read_text())
    assert results["commit"] == "abc" and "commit" not in results["command"]
    rows = results["rows"]
    assert [row["way"] for row in rows] == list(head_loss.WAYS)
    assert all(row["error"] < 1e-5 and row["ms"] > 0 for row in rows)
