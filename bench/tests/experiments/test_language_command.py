"""`kalmix bench language`: the plan, refused options, and the laptop preset from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import kalmix_bench.experiments.language.run  # noqa: F401 - each process would import it
from kalmix.training.shards import Manifest
from kalmix_bench.experiments.language import corpus
from kalmix_bench.experiments.language.architectures import LAYERS
from kalmix_bench.experiments.language.protocol import MAIN, PRESETS, TUNE, LanguageCell
from kalmix_bench.runner import scheduler, workers
from kalmix_bench.runner.cells import Results
from kalmix_bench.runner.limited import UNFINISHED

from .clock import DEADLINE, set_clock


def test_the_plan_lists_parameters_tokens_and_seconds(kalmix, tmp_path: Path) -> None:
    asked = ("bench", "language", "--preset", "paper", "--seeds", 3, "--layer", "kla", "--layer", "kla+attention")
    result = kalmix(*asked, "--dry-run", "--output", tmp_path / "out")
    assert result.status == 0, result.errors
    lines = [line.split() for line in result.output.splitlines()]
    plan = {(words[0], words[1]): words for words in lines if words and words[0] in ("tune", "main")}
    assert set(plan) == {(stage, layer) for stage in ("tune", "main") for layer in ("kla", "kla+attention")}
    for (stage, _), words in plan.items():
        assert {"300M", "3"} <= set(words) if stage == "main" else {"50M", "3"} <= set(words)
        assert float(words[-1].replace(",", "")) > 1
    assert "12 cells, " in result.output and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_paper_preset_compares_all_layers(kalmix, tmp_path: Path) -> None:
    asked = ("--preset", "paper", "--rates", "2e-3", "--tokens", "1e8", "--mfu", "0.3", "--gpu", "H100", "--dry-run")
    result = kalmix("bench", "language", *asked, "--output", tmp_path)
    assert all(f" {layer} " in result.output for layer in LAYERS) and "tune" not in result.output
    assert f"{len(LAYERS)} cells" in result.output and " 100M " in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--preset paper", "`shards` is missing"),
        ("--preset large", "`preset` is 'large'"),
        ("--layer klaa", "`layer` is 'klaa'"),
        ("--stage tuning", "`stage` is 'tuning'"),
        ("--rates fast", "`rates` is 'fast'"),
        ("--rates 1e-3,-1", "`rates` is -1"),
        ("--seeds 0", "`seeds` is 0"),
        ("--rates 1e-3 --tuned-on any", "`tuned_on` is given with a single rate"),
        ("--stage tune --tuned-on any", "`tuned_on` is given with `--stage tune`"),
        ("--tokens 0", "`tokens` is 0"),
        ("--warmup 1.5", "`warmup` is 1.5"),
        ("--dry-run --gpu Z80", "`gpu` is 'Z80'"),
        ("--shards nowhere", "holds no shards"),
    ],
)
def test_wrong_options_are_refused(kalmix, tmp_path: Path, options: str, words: str) -> None:
    result = kalmix("bench", "language", "--output", tmp_path / "out", *options.split())
    assert result.status != 0 and words in result.errors and "Traceback" not in result.errors


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train the models of the preset `laptop` on fewer tokens, in forked processes, which see no GPU."""
    few = {"tokens": 10_000, "batch_tokens": 1024, "eval_tokens": 1024, "probe_rows": 4}
    laptop = PRESETS["laptop"]
    tune, main = replace(laptop.tune, **few), replace(laptop.main, **{**few, "tokens": 30_000})
    monkeypatch.setitem(PRESETS, "laptop", laptop._replace(tune=tune, main=main))
    monkeypatch.setattr(workers, "START_METHOD", "fork")
    monkeypatch.setattr(workers, "SHUTDOWN_SECONDS", 0.05)


@pytest.mark.slow
def test_the_laptop_preset_runs_is_cut_continues_and_is_reported(
    kalmix, short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    asked = ("bench", "language", "--devices", "cpu", "--jobs-per-device", 2, "--output", output)
    with monkeypatch.context() as patch:
        set_clock(patch, output / "results.jsonl", 1)
        cut = kalmix(*asked, "--deadline", DEADLINE)
    assert cut.status == UNFINISHED, cut.errors
    assert "the same command continues" in cut.output
    assert len((output / "results.jsonl").read_text().splitlines()) < 6
    result = kalmix(*asked, "--commit", "abc")
    assert result.status == 0, result.errors
    rows = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    assert [row["stage"] for row in rows] == ["tune"] * 6 + ["main"] * 2
    assert rows[-1]["commit"] == "abc" and {row["jobs_per_device"] for row in rows} == {2}
    for row in (row for row in rows if row["stage"] == "main"):
        same = [x for x in rows if (x["stage"], x["language"]) == ("tune", row["language"])]
        assert row["learning_rate"] == min(same, key=lambda x: x["loss"])["learning_rate"]
        assert row["loss"] < 5.5 and row["positions"]["documents"] and row["copying"] and row["recall"]
    assert not list((output / "checkpoints").iterdir())
    for words in ("learning rates", "losses and probes", "cost", "decoding ms"):
        assert words in result.output
    again = kalmix("bench", "report", output, "--output", tmp_path / "report")
    assert again.status == 0, again.errors
    assert (tmp_path / "report" / "report.csv").read_text() == (output / "report.csv").read_text()
    assert (tmp_path / "report" / "language.svg").stat().st_size > 10_000


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[LanguageCell]:
    """Write rows of "tune" on three corpora, which choose different rates for kla and the same for gla.

    The list has the cells that a command runs, on the corpus "own".
    """
    asked: list[LanguageCell] = []
    monkeypatch.setattr(Manifest, "load", lambda folder: None)
    monkeypatch.setattr(corpus, "digest", lambda manifest: "own")
    monkeypatch.setattr(scheduler, "run", lambda experiment, cells, *others, **more: asked.extend(cells) or {})
    laptop = PRESETS["laptop"]
    losses = {
        "kla": {"own": {1e-2: 3.0, 2e-2: 3.1}, "other": {1e-2: 2.9, 2e-2: 2.8}, "third": {4e-2: 2.7}},
        "gla": {"other": {1e-2: 4.5, 2e-2: 4.6}, "third": {1e-2: 4.1, 4e-2: 4.2}},  # the lowest mean is that of 4e-2
    }
    cells = {
        LanguageCell(TUNE, layer, laptop.tune, rate, 0, name): loss
        for layer, corpora in losses.items()
        for name, by_rate in corpora.items()
        for rate, loss in by_rate.items()
    }
    larger = replace(laptop.tune, tokens=2 * laptop.tune.tokens)
    for name in ("other", "fourth"):  # rows of the stage main, and of models of another size, do not count
        cells[LanguageCell(TUNE, "kla", larger, 8e-2, 0, name)] = 0.1
        cells[LanguageCell(MAIN, "kla", laptop.main, 8e-2, 0, name)] = 0.1
    Results(tmp_path / "results.jsonl").add(
        [{**cell.to_dict(), "loss": loss, "seconds": 1.0, "versions": {}} for cell, loss in cells.items()]
    )
    return asked


@pytest.mark.parametrize(
    ("layer", "options", "rate"),
    [
        ("kla", "--stage main", 1e-2),
        ("kla", "--tuned-on other", 2e-2),
        ("kla", "--tuned-on th", 4e-2),
        ("gla", "--tuned-on any", 1e-2),
    ],
)
def test_main_takes_its_rate_from_the_rows_of_a_corpus(
    kalmix, tmp_path: Path, tuned: list[LanguageCell], layer: str, options: str, rate: float
) -> None:
    places = ("--shards", tmp_path, "--output", tmp_path)
    result = kalmix("bench", "language", "--layer", layer, *options.split(), *places)
    assert not result.errors
    assert [(cell.stage, cell.learning_rate, cell.corpus) for cell in tuned] == [(MAIN, rate, "own")]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "any",
            "is 'any', but corpora choose different rates for 'kla'; expected one of the corpora 'own' (kla 0.01) ",
        ),
        ("any", " (kla 0.01) or 'other' (kla 0.02) or 'third' (kla 0.04)."),
        ("fourth", "is 'fourth'; expected a corpus with rows of tune at this size ('own', 'other' or 'third')."),
        ("o", "is 'o', which begins several names; expected a corpus"),
        ("", "is ''; expected a corpus"),
    ],
)
def test_a_corpus_whose_rates_are_not_known_is_refused(
    kalmix, tmp_path: Path, tuned: list[LanguageCell], name: str, words: str
) -> None:
    layers, places = ("--layer", "kla", "--layer", "gla"), ("--shards", tmp_path, "--output", tmp_path)
    result = kalmix("bench", "language", *layers, "--tuned-on", name, *places)
    assert result.status != 0 and "`tuned_on` is " in result.errors and words in result.errors and not tuned
