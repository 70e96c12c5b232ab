"""`kalmix bench perf decode`: rows at toy size, and the report."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from kalmix_bench.perf.decode import measure
from kalmix_bench.perf.decode.experiment import Decode
from kalmix_bench.perf.decode.protocol import DecodeCell, make_cells
from kalmix_bench.perf.models.protocol import PRESETS, ModelSize
from kalmix_bench.runner import workers
from kalmix_bench.runner.cells import Results

TINY = ModelSize(layers=2, hidden_size=32, batch_size=2, seq_len=12, vocab_size=64, dtype="float32")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fork processes, which see no GPU; continue a short text."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a lock that no other process of the machine has
    monkeypatch.setattr(workers, "START_METHOD", "fork")
    monkeypatch.setattr(workers, "SHUTDOWN_SECONDS", 0.05)
    monkeypatch.setattr(measure, "word_tokens", lambda vocab_size: torch.arange(200) % vocab_size)
    monkeypatch.setitem(PRESETS, "laptop", TINY)


def cell(model: str = "gated-deltanet", mode: str = "dynamic", size: ModelSize = TINY) -> DecodeCell:
    return DecodeCell(model, mode, size, 8, "some cpu", "abc")


@pytest.mark.parametrize("mode", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gated-deltanet", "llama"])
def test_a_row_holds_the_measurements_of_tokens(name: str, mode: str) -> None:
    found = measure.measure_row(cell(name, mode), CPU, lambda: None, limit=60)
    assert found["status"] == "ok", found
    assert len(found["times_ms"]) == 7 and found["prefill_ms"] > 0
    assert found["tokens_per_s"] == pytest.approx(2e3 / found["ms"])


def test_steps_that_are_not_captured_are_no_row() -> None:
    found = measure.measure_row(cell("gated-deltanet", "captured"), CPU, lambda: None, limit=60)
    assert found["status"] == "failed" and "the model is on cpu" in found["reason"]


def test_replays_of_a_graph_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay lies between the two events."""
    told: list[str] = []

    class Graph:
        def replay(self) -> None:
            told.append("replay")

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            told.append("event")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    replays: list[Any] = []
    graph = measure.TimedGraph(replays)
    graph.replay()
    graph.replay()
    assert told == ["event", "replay", "event"] * 2 and len(replays) == 2


def test_state_bytes_are_those_of_the_cache() -> None:
    """Two layers of Llama hold keys and values of every token but the last; ours hold the same for any prompt."""
    tokens, width = TINY.seq_len + 8 - 1, TINY.hidden_size
    found = [measure.measure_row(cell("llama"), CPU, lambda: None, 60)["state_bytes"]]
    assert found == [2 * 2 * 4 * tokens * width]
    short, long = (
        measure.measure_row(cell(size=replace(TINY, seq_len=n)), CPU, lambda: None, 60)["state_bytes"] for n in (12, 24)
    )
    assert short == long > 0


def test_weights_have_the_dtype_of_the_row_but_for_dynamics() -> None:
    model = measure.inference_model(cell("gated-deltanet", size=replace(TINY, dtype="bfloat16")), CPU)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert {dtypes[name] for name in dtypes if "dynamics" in name} == {torch.float32}
    assert {dtypes[name] for name in dtypes if "dynamics" not in name} == {torch.bfloat16}


def test_held_bytes_count_each_storage_once() -> None:
    x = torch.zeros(4)

    class Holder:
        def __init__(self) -> None:
            self.views, self.other, self.circle = [x[:2], x[2:]], {"a": (torch.zeros(2, dtype=torch.int64),)}, self

    assert measure.held_bytes(Holder()) == 16 + 16


def test_peers_without_a_static_cache_have_no_such_rows() -> None:
    names = ["gated-deltanet", "fla kda", "llama"]
    cells = make_cells(names, ["dynamic", "static"], [TINY], (8, "gpu", None))
    assert len(make_cells(names, ["captured"], [TINY], (8, "gpu", None))) == 1
    assert len(cells) == 5 and not [x for x in cells if x.model == "fla kda" and x.mode == "static"]


@pytest.mark.slow
def test_the_command_measures_reports_and_continues(kalmix, tmp_path: Path) -> None:
    options = ("--rows", "gla", "--caches", "dynamic", "--batches", "1,2", "--prompts", 4, "--tokens", 8)
    command = ("bench", "perf", "decode", *options, "--devices", "cpu", "--output", tmp_path)
    for _ in range(2):
        result = kalmix(*command)
        assert result.status == 0, result.errors
    assert len(list(Results(tmp_path / "results.jsonl").read())) == 2
    assert "prompts of 2 x 4 tokens" in (tmp_path / "report.md").read_text()
    for bad in (("--tokens", 2), ("--batches", "x"), ("--caches", "paged"), ("--rows", "nothing")):
        result = kalmix(*command, *bad)
        assert result.status == 2 and len(result.errors.strip().splitlines()) == 1, result.errors


def row(model: str, size: ModelSize, **changes: Any) -> dict[str, Any]:
    made = DecodeCell(model, "static", size, 8, "gpu", "abc").to_dict() | {"versions": {"torch": "2"}, "status": "ok"}
    numbers = {"ms": 2.0, "tokens_per_s": 500.0, "gpu_ms": 1.5, "kernels": 900, "launches": 3, "memory_ms": 1.0}
    memory = {"extra_memory": 2**30, "state_bytes": 2**20, "prefill_ms": 30.0, "first_s": 9.0}
    return made | numbers | memory | changes


def test_the_report_judges_aims(tmp_path: Path) -> None:
    one, many = (replace(PRESETS["paper"], batch_size=n, seq_len=512) for n in (1, 64))
    long = replace(many, seq_len=8192)
    rows = [
        row("kda", one, ms=4.0),
        row("kla", many, ms=1.2),
        row("afa", many, ms=9.0),
        row("mamba2", long, ms=1.5, extra_memory=21 * 2**30),
        row("llama", one, mode="captured", replay_ms=1.25),
        row("gla", TINY),
    ]
    (path,) = Decode().report(rows, tmp_path, Console(file=StringIO()))
    lines = [re.sub(" +", " ", line) for line in path.read_text().splitlines()]
    assert "| kda | 1 x 512 | ms a token | 4.00 | at most 3.0 | no |" in lines
    assert any(line.startswith("| llama | captured | 2.00 | 1.25 | 500 |") for line in lines)
    assert "| kla | 64 x 512 | time / limit | 1.20 | at most 1.3 | yes |" in lines
    assert "| mamba2 | 64 x 8,192 | time / limit | 1.50 | at most 1.3 | no |" in lines
    assert "| mamba2 | 64 x 8,192 | memory, GiB, static | 21.00 | at most 20.0 | no |" in lines
    assert len([line for line in lines if line.endswith(("| no |", "| yes |"))]) == 4
