"""Steps of stacked layers are timed and stored with their origin."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kalmix_bench.perf import layer_steps


def test_rows_name_layer_and_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--tokens", "4", "--hidden-size", "8", "--batch", "1", "--repeats", "1", "--device", "cpu"]
    options = ["--layer", "rt-afa", "--layer", "recurrent-afa", "--heads", "1", "--heads", "2", *sizes]
    monkeypatch.setattr(sys, "argv", ["layer_steps", *options, "--output", str(tmp_path)])
    layer_steps.main()
    (file,) = tmp_path.iterdir()
    result = json.loads(file.read_text())
    expected = [("rt-afa", 1), ("rt-afa", 2), ("recurrent-afa", 1), ("recurrent-afa", 2)]
    assert [(row["layer"], row["heads"]) for row in result["rows"]] == expected
    assert result["command"]["tokens"] == 4 and result["versions"]["kalmix"] and result["rows"][0]["ms"] > 0
