"""`kalmix bench report`: one report of all kinds of results, and checks of the papers' claims."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from kalmix_bench.datasets import TASKS
from kalmix_bench.experiments.recall import LAYERS
from kalmix_bench.experiments.recall.presets import BENCHES
from kalmix_bench.experiments.recall.published import published_score
from kalmix_bench.experiments.solvers import PRESETS
from kalmix_bench.experiments.solvers.convergence import Convergence
from kalmix_bench.runner.paper_claims import CLAIMS, Claim, ClaimCheck, Finding, check_claims
from kalmix_bench.runner.scores import Score

RUN = {"seconds": 1.0, "versions": {}, "device": "cpu"}
TESTS = [{"flood": flood, "overlap": 0.8} for flood in (1, 256)] + [{"flood": 64, "overlap": o} for o in (0.8, 0.95)]


def found(layer: str, value: float, task: str = "mad/compression", score: str = "macro", **metadata: Any) -> Finding:
    return Finding(task, "seq_len 16", layer, score, Score.of([value]), 1, metadata, published_score(task, layer))


def test_claims_are_checked_on_findings() -> None:
    (one,) = check_claims([found("kla", 0.85), found("kla-noise-free", 0.729), found("gla", 0.99)])
    assert one.is_confirmed and str(one) == "85.0% > 72.9%"
    assert one.paper == "85.0% > 72.9%, Kalman Linear Attention, Table 6"
    (other,) = check_claims([found("kla-noise-free", 0.54), found("kla", 0.51)])
    assert not other.is_confirmed and str(other) == "51.0% < 54.0%"
    (same,) = check_claims([found("kla-noise-free", 1.0), found("kla", 1.0)])
    assert not same.is_confirmed and str(same) == "100.0% = 100.0%"


def test_only_findings_under_equal_conditions_are_compared() -> None:
    assert not list(check_claims([found("kla", 0.85, hidden_size=64), found("kla-noise-free", 0.7, hidden_size=128)]))
    assert not list(check_claims([found("kla", 0.85, score="micro"), found("kla-noise-free", 0.7, score="micro")]))
    both = [found(layer, 0.5, depth=depth) for depth in (1, 2) for layer in ("kla", "kla-noise-free")]
    assert len(list(check_claims(both))) == 2


def test_a_lower_error_confirms_a_claim() -> None:
    less = Claim("sde/figure-1b", "error", "afa", "softmax", "here", number_format=".2f", lower_is_better=True)
    errors = {"afa": Score(1.04, 0.01), "softmax": Score(1.5, 0.2)}
    first, second = (Finding("sde/figure-1b", "", name, "error", value, 2) for name, value in errors.items())
    one = ClaimCheck(less, first, second)
    assert one.is_confirmed and str(one) == "1.04 ± 0.01 < 1.50 ± 0.20"
    assert not ClaimCheck(less, second, first).is_confirmed


def test_every_claim_names_known_layers_and_scores() -> None:
    for one in CLAIMS:
        if one.task in TASKS:
            assert {one.better, one.worse} <= LAYERS.keys() and one.score == next(iter(TASKS[one.task].scores))


def test_laptop_presets_run_both_layers_of_every_claim() -> None:
    asked = {(s.task, layer) for presets in BENCHES.values() for s in presets["laptop"] for layer in s.layers}
    compared = [one for one in CLAIMS if {(one.task, one.better), (one.task, one.worse)} <= asked]
    tasks = {"mad/selective-copying", "mad/compression", "words/a5", "mqar/update", "mqar"}
    assert {one.task for one in compared} == tasks


def test_the_laptop_preset_updates_only_some_keys() -> None:
    (study,) = (one for one in BENCHES["mqar"]["laptop"] if one.task == "mqar/update")
    for part in study.parts:
        asked = dict(part.settings)
        assert 0 < asked["num_updates"] <= asked["num_kv_pairs"] // 2


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def collided(model: str, margin: float, **protocol: Any) -> dict[str, Any]:
    scores = [{**test, "accuracy": 0.5, "cross_entropy": 1.0, "margin": margin} for test in TESTS]
    return {"study": "recall", "model": model, "seed": 0, "protocol": protocol, **RUN, "scores": scores}


def predicted(model: str, seed: int, errors: dict[str, Any]) -> dict[str, Any]:
    return {"setting": "figure-1b", "model": model, "seed": seed, "protocol": {}, "drawn": {}, **RUN, "errors": errors}


@pytest.mark.slow
def test_all_kinds_of_results_are_in_one_report(kalmix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "laptop", {"residual": Convergence(1, 8, 8, 12)})
    solvers = tmp_path / "solvers"
    asked = ("bench", "solvers", "--study", "residual", "--device", "cpu", "--output", solvers)
    assert kalmix(*asked).status == 0
    before = collided("bayesian", -1.0, steps=1)  # under another protocol, before
    now = [collided(*of, steps=2) for of in (("bayesian", 0.91), ("reset", -0.86), ("linear-attention", -0.9))]
    collision = write(tmp_path / "collision", before, *now)
    kalman = [predicted("references", seed, {"kalman": {"measurement": 0.5}}) for seed in (0, 1)]
    learned = [predicted("afa", seed, {"afa": {"measurement": 0.52}}) for seed in (0, 1)]
    alone = predicted("softmax", 1, {"softmax": {"measurement": 0.75}})  # of a sweep that was interrupted
    sde = write(tmp_path / "sde", *kalman, *learned, alone)

    result = kalmix("bench", "report", collision, solvers, sde, sde, "--output", tmp_path / "all")
    assert result.status == 0, result.errors
    report = (tmp_path / "all" / "report.md").read_text()
    parts = ["# paper claims", "# collision", "# solvers", "# sde"]
    assert [line for line in report.splitlines() if line.startswith("# ")] == parts
    for words in ("+0.91 > -0.86", "1.040 ± 0.000 < 1.500", "Memory by Design, Figure 3d", "covariance reset (E.4.3)"):
        assert words in report, words
    with (tmp_path / "all" / "report.csv").open() as file:
        table = {(row["task"], row["condition"], row["layer"], row["score"]): row for row in csv.DictReader(file)}
    margin = table["collision/recall", "flood 64, overlap 0.95", "bayesian", "margin"]
    assert (margin["mean"], margin["seeds"], margin["hidden_size"]) == ("0.91", "1", "")
    assert table["sde/figure-1b", "", "afa", "error over kalman"]["seeds"] == "2"
    assert ("solvers/residual", "float32, a = 0.02", "CG", "residual") in table
    for name in ("mechanism", "recall", "residual", "errors"):
        assert (tmp_path / "all" / f"{name}.png").exists()
