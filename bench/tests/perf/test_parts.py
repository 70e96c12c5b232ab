"""`kalmix bench perf parts`: rows at toy size, and the forms that they run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kalmix.layers.fused import dispatch
from kalmix_bench.perf import parts, timing
from kalmix_bench.perf.models.protocol import PRESETS, ModelSize
from kalmix_bench.perf.ops import backward
from kalmix_bench.runner.cells import Results

TINY = ModelSize(layers=1, hidden_size=16, batch_size=2, seq_len=8, vocab_size=32, dtype="float32")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "laptop", TINY)
    monkeypatch.setitem(timing.BUDGET, "cpu", 0.01)


def test_all_parts_are_measured_and_missing_peers_have_a_reason(kalmix, tmp_path: Path, monkeypatch) -> None:
    for library in ("fla", "liger_kernel"):
        for module in [name for name in sys.modules if name.startswith(f"{library}.")]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, library, None)
    result = kalmix("bench", "perf", "parts", "--no-compiled", "--device", "cpu", "--output", tmp_path)
    assert result.status == 0, result.errors
    rows = list(Results(tmp_path / "results.jsonl").read())
    assert len({x["part"] for x in rows}) == 6
    for row in rows:
        ours = row["implementation"].startswith("kalmix")
        assert row["ms"] > 0 if ours else row["reason"].startswith("ModuleNotFoundError")
    text = (tmp_path / "report.md").read_text()
    assert "head and loss, 32 words" in text and "convolution and SiLU, 48 channels" in text


def test_every_part_has_gradients_of_all_inputs() -> None:
    for name, part in parts.make_parts(TINY, torch.device("cpu")).items():
        outputs = part.ours(part.inputs)
        gradients = backward(part.ours, part.inputs, [torch.ones_like(y) for y in outputs])
        assert all(x is not None and x.isfinite().all() for x in gradients), name


def test_an_eager_form_is_measured_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []
    part = next(iter(parts.make_parts(TINY, torch.device("cpu")).values()))
    watched = part._replace(ours=lambda x: seen.append(dispatch.DEVICES) or part.ours(x), peers={})
    before = dispatch.DEVICES
    rows = list(parts.measure_part(watched, torch.device("cpu"), compiled=False))
    assert [row["implementation"] for row in rows] == ["kalmix", "kalmix, eager form"]
    assert set(seen) == {before, ()} and before == dispatch.DEVICES


def test_a_failing_implementation_has_a_reason() -> None:
    part = next(iter(parts.make_parts(TINY, torch.device("cpu")).values()))

    def missing() -> parts.Run:
        raise ModuleNotFoundError("No module named 'fla'")

    *_, row = parts.measure_part(part._replace(peers={"fla": missing}), torch.device("cpu"), compiled=False)
    assert row == {"implementation": "fla", "reason": "ModuleNotFoundError: No module named 'fla'"}


def test_text_that_no_part_contains_is_an_error_of_one_line(kalmix, tmp_path: Path) -> None:
    result = kalmix("bench", "perf", "parts", "--only", "attention", "--device", "cpu", "--output", tmp_path)
    assert result.status == 2 and len(result.errors.strip().splitlines()) == 1
