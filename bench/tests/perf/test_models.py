"""`kalmix bench perf models`: rows at toy size, failures, resumption, the report."""

from __future__ import annotations

import os
import re
import statistics
import tempfile
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from kalmix_bench.perf import model_rows
from kalmix_bench.perf.models import build, experiment, measure, report
from kalmix_bench.perf.models.protocol import FIRST, MODELS, OURS, PEERS, PRESETS, ModelCell, ModelSize
from kalmix_bench.runner import workers
from kalmix_bench.runner.cells import Results

TINY = ModelSize(layers=1, hidden_size=32, batch_size=2, seq_len=16, vocab_size=64, dtype="float32")
CPU = torch.device("cpu")
MEASURED = {
    "ms": 10.0,
    "tokens_per_s": 1000.0,
    "gpu_ms": 8.0,
    "kernels": 500,
    "peak_memory": 2**30,
    "step_memory": 2**29,
}


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fork processes, which see no GPU, and end them at once; train on a short text."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a lock that no other process of the machine has
    monkeypatch.setattr(workers, "START_METHOD", "fork")
    monkeypatch.setattr(workers, "SHUTDOWN_SECONDS", 0.05)
    monkeypatch.setattr(measure, "word_tokens", lambda vocab_size: torch.arange(200) % vocab_size)
    monkeypatch.setitem(PRESETS, "laptop", TINY)


def cell(model: str = "attention", mode: str = "eager", size: ModelSize = TINY, steps: int = 3) -> ModelCell:
    return ModelCell(model, mode, size, steps, "some cpu", "abc")


def row(model: str = "attention", mode: str = "eager", **changes: Any) -> dict[str, Any]:
    made = cell(model, mode, PRESETS["paper"]).to_dict() | {"seconds": 1.0, "versions": {"torch": "2"}, "status": "ok"}
    return made | {"layers": 24, "parameters": 10**8, "first_step_s": 1.0, "finite": True} | MEASURED | changes


@pytest.mark.parametrize("name", ["gated-deltanet", "llama"])
def test_a_row_holds_the_measurements_of_finite_steps(name: str) -> None:
    found = measure.measure_row(cell(name), CPU, lambda: None, limit=60)
    assert found["status"] == "ok", found
    assert found["ms"] == pytest.approx(statistics.median(found["times_ms"]), rel=1e-2)
    assert len(found["times_ms"]) == 3
    assert found["tokens_per_s"] == pytest.approx(2 * 16 * 1e3 / found["ms"])
    assert found["finite"] and found["layers"] >= 1
    assert found["parameters"] == sum(p.numel() for p in build.build(name, TINY).parameters())


def test_steps_reduce_the_loss_and_store_no_gradients() -> None:
    model = build.build("attention", TINY)
    trainer = measure.Trainer(model, torch.arange(200) % 64, TINY, "eager")
    trainer.milliseconds(60)
    assert trainer.losses[-1] < 0.95 * trainer.losses[0]
    assert all(p.grad is None for p in model.parameters())
    assert trainer.is_finite()
    with torch.no_grad():
        next(model.parameters())[0] = float("nan")
    assert not trainer.is_finite()


@pytest.mark.parametrize(("mode", "option"), [("compiled", None), ("captured", "reduce-overhead")])
def test_compiled_modes_compile_the_model_with_its_loss(
    mode: str, option: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[nn.Module, str | None]] = []
    monkeypatch.setattr(torch, "compile", lambda model, *, mode: compiled.append((model, mode)) or model)
    found = measure.measure_row(cell(mode=mode), CPU, lambda: None, limit=60)
    assert found["status"] == "ok" and len(compiled) == 1
    assert hasattr(compiled[0][0], "lm_head") and compiled[0][1] == option


def test_the_mode_blocks_compiles_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
    model = build.build("attention", TINY)
    measure.Trainer(model, torch.arange(200) % 64, TINY, "blocks")
    assert compiled == list(model.model.layers)


def failing(error: Exception) -> Any:
    def build_model(name: str, size: ModelSize) -> nn.Module:
        raise error

    return build_model


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("tried to allocate 9 GiB"), "out of memory"),
        (RuntimeError("an illegal memory access"), "failed"),
        (ModuleNotFoundError("No module named 'fla'"), "not installed"),
    ],
)
def test_failures_become_rows_with_a_reason(error: Exception, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "build", failing(error))
    found = measure.measure_row(cell(), CPU, lambda: None, limit=60)
    assert found == {"status": status, "reason": f"{type(error).__name__}: {error}"}


def test_a_refused_size_and_a_slow_row_become_rows_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = measure.measure_row(cell("rt-afa", size=replace(TINY, hidden_size=3)), CPU, lambda: None, limit=60)
    assert refused["status"] == "refused", refused
    slow = measure.measure_row(cell(), CPU, lambda: None, limit=0.01)
    assert slow["status"] == "too slow" and "0.01 s" in slow["reason"]
    monkeypatch.setattr(measure, "SLOWEST", 0.0)
    assert "a step takes" in measure.measure_row(cell(), CPU, lambda: None, limit=60)["reason"]


def test_numbers_of_layers_keep_parameters_near_those_of_attention() -> None:
    size = PRESETS["paper"]
    layers = {name: build.number_of_layers(name, size) for name in ("kla", "mamba2", "retnet", "gated-deltanet")}
    assert layers == {"kla": 52, "mamba2": 42, "retnet": 21, "gated-deltanet": 24}


def test_the_rows_are_all_layers_but_design_and_three_peers() -> None:
    assert len(OURS) == 16 and len(MODELS) == 19 and set(MODELS) == {*OURS, *PEERS} and "design" not in MODELS
    assert set(FIRST) < set(OURS)


def run(kalmix: Any, output: Path, *options: object) -> Any:
    return kalmix(
        "bench", "perf", "models", "--modes", "eager", "--steps", 2, "--output", output, "--devices", "cpu", *options
    )


@pytest.mark.slow
def test_a_process_that_dies_loses_its_own_row_only(kalmix, tmp_path: Path, monkeypatch) -> None:
    def build_or_die(name: str, size: ModelSize) -> nn.Module:
        return os._exit(3) if name == "kla" else build.build(name, size)  # type: ignore[return-value]

    monkeypatch.setattr(measure, "build", build_or_die)
    result = run(kalmix, tmp_path, "--rows", "kla,attention,retnet", "--no-peers")
    assert result.status == 0, result.errors
    rows = {x["model"]: x for x in Results(tmp_path / "results.jsonl").read()}
    assert rows["kla"]["status"] == "failed" and "died (3)" in rows["kla"]["reason"]
    assert rows["attention"]["status"] == rows["retnet"]["status"] == "ok"
    assert "died (3)" in result.output and "died (3)" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_finished_rows_are_not_run_again_and_each_has_a_process(kalmix, tmp_path: Path, monkeypatch) -> None:
    def here(cell: ModelCell, *others: object) -> dict[str, Any]:
        known = cell.model != "llama"
        status = {"status": "ok", **MEASURED} if known else {"status": "not installed", "reason": "no"}
        return {"layers": 1, "parameters": 1, "first_step_s": 1.0, "finite": True, "process": os.getpid(), **status}

    monkeypatch.setattr(measure, "measure_row", here)
    assert run(kalmix, tmp_path, "--rows", "attention,retnet,llama").status == 0
    assert run(kalmix, tmp_path, "--rows", "attention,retnet,llama").status == 0
    rows = list(Results(tmp_path / "results.jsonl").read())
    assert [x["model"] for x in rows] == ["attention", "llama", "retnet", "llama"]  # peers are tried again
    assert len({x["process"] for x in rows}) == 4
    assert run(kalmix, tmp_path, "--rows", "attention", "--seq-len", 17).status == 0
    assert run(kalmix, tmp_path, "--report").status == 0
    assert len(list(Results(tmp_path / "results.jsonl").read())) == 5


def test_the_deadline_ends_the_command_and_another_call_continues(kalmix, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(model_rows, "MEASURING", 0.0)
    monkeypatch.setattr(model_rows, "ENDING", 0.0)
    monkeypatch.setattr(measure, "measure_row", lambda *others: __import__("time").sleep(60))
    result = run(kalmix, tmp_path, "--rows", "attention,retnet", "--deadline", 0.5)
    assert result.status == model_rows.UNFINISHED, result.errors
    assert "2 of 2 rows are missing" in result.output


@pytest.mark.slow
def test_prepared_rows_are_neither_timed_nor_written(kalmix, tmp_path: Path, monkeypatch) -> None:
    def here(cell: ModelCell, device: torch.device, on_prepared: Any, limit: float) -> dict[str, Any]:
        (tmp_path / cell.model).touch()
        if cell.model == "attention":
            on_prepared()
            (tmp_path / "timed").touch()
        return {"status": "refused", "reason": "no"}

    monkeypatch.setattr(measure, "measure_row", here)
    result = run(kalmix, tmp_path / "output", "--rows", "attention,retnet", "--prepare")
    assert result.status == 0, result.errors
    assert {x.name for x in tmp_path.iterdir() if x.is_file()} == {"attention", "retnet"}
    assert not list(Results(tmp_path / "output" / "results.jsonl").read())
    assert run(kalmix, tmp_path / "output", "--rows", "attention,retnet").status == 0
    assert (tmp_path / "timed").exists()
    assert len(list(Results(tmp_path / "output" / "results.jsonl").read())) == 2


def test_values_that_are_not_finite_are_an_exit_status(kalmix, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(measure.Trainer, "is_finite", lambda self: False)
    result = run(kalmix, tmp_path, "--rows", "attention")
    assert result.status == 1 and "no" in (tmp_path / "report.md").read_text().splitlines()[6]


def test_unknown_names_are_errors_of_one_line(kalmix, tmp_path: Path) -> None:
    for options in (("--rows", "klaa"), ("--preset", "huge"), ("--steps", 0), ("--hidden-size", 0), ("--report",)):
        result = run(kalmix, tmp_path, *options)
        assert result.status == 2 and len(result.errors.strip().splitlines()) == 1, result.errors


def report_text(rows: list[dict[str, Any]], folder: Path) -> str:
    (path,) = experiment.Models().report(rows, folder, Console(file=StringIO()))
    return path.read_text()


def test_the_report_has_ratios_to_peers_and_judges_aims(tmp_path: Path) -> None:
    rows = [
        row("gated-deltanet", tokens_per_s=1300.0, peak_memory=3 * 2**30),
        row("kla", "compiled", tokens_per_s=800.0),
        row("fla gated-deltanet"),
        row("llama", "compiled"),
        row("afa", "compiled") | {"status": "failed", "reason": "RuntimeError: crashed"},
    ]
    lines = [re.sub(" +", " ", line) for line in report_text(rows, tmp_path).splitlines()]
    assert "| gated-deltanet | fla gated-deltanet | eager | tokens/s | 1.30 | at least 1.2 | yes |" in lines
    assert "| gated-deltanet | fla gated-deltanet | eager | peak memory | 3.00 | at most 1.1 | no |" in lines
    assert "| kla | llama | compiled | tokens/s | 0.80 | at least 0.85 | no |" in lines
    assert "| gated-deltanet | eager | | 1.30 | 1.00 | 3.00 |" in lines
    assert "| afa | compiled | failed | RuntimeError: crashed |" in lines
    assert any("3.0 (0.5)" in line and "1,300" in line and "500" in line for line in lines)


def test_the_report_is_of_the_last_size_and_judges_no_other(tmp_path: Path) -> None:
    small = asdict(TINY)
    rows = [row("kla"), row("kla", size=small), row("llama", size=small), row("kla", size=small, tokens_per_s=5.0)]
    found = report.latest(rows)
    assert [(x["model"], x["tokens_per_s"]) for x in found] == [("kla", 5.0), ("llama", 1000.0)]
    assert "aims" not in report_text(found, tmp_path)
    assert report_text([], tmp_path) == ""
