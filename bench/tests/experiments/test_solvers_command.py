"""`kalmix bench solvers` end to end at tiny sizes; nothing runs twice; errors are one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kalmix.analysis.plots.style import COLOURS
from kalmix_bench.experiments.solvers import PRESETS, STUDIES, SolverCell
from kalmix_bench.experiments.solvers.conditions import Conditions
from kalmix_bench.experiments.solvers.convergence import Convergence
from kalmix_bench.experiments.solvers.experiment import Solvers
from kalmix_bench.experiments.solvers.figures import _colours
from kalmix_bench.experiments.solvers.gradients import Gradients
from kalmix_bench.experiments.solvers.reversal import Reversal
from kalmix_bench.runner.cells import Results
from kalmix_bench.runner.scheduler import run

PNG = b"\x89PNG\r\n"
TINY = {
    "residual": Convergence(1, 8, 8, 12),
    "gradient": Gradients(vocab_size=9, length=8, heads=1, width=8, layers=(1, 2), iterations=3, scales=(1.0, 10.0)),
    "condition": Conditions(1, 8, 8),
    "reversal": Reversal(1, 8, 8, 12),
    "precision": Convergence(1, 8, 8, 12),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "laptop", TINY)


@pytest.mark.slow
def test_studies_are_run_once_and_reported(kalmix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = kalmix("bench", "solvers", "--device", "cpu", "--output", tmp_path)
    assert result.status == 0, result.errors
    for name in STUDIES:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
        assert f"{name}  seed 0" in result.output
    for words in ("largest residual norm", "relative error of gradients", "tokens above the bound", "run backwards"):
        assert words in result.output
    lines = (tmp_path / "results.jsonl").read_text()
    rows = [json.loads(line) for line in lines.splitlines()]
    assert [row["study"] for row in rows] == list(STUDIES)
    assert rows[0]["setting"]["length"] == 8 and rows[0]["versions"]["torch"] and rows[0]["device"]
    assert "commit" in rows[0]

    def failing(*given: object) -> None:
        raise AssertionError("run again")

    for name in STUDIES:
        monkeypatch.setitem(STUDIES, name, failing)
    again = kalmix("bench", "solvers", "--study", "condition", "--device", "cpu", "--output", tmp_path)
    assert again.status == 0, again.errors
    assert "tokens above the bound" in again.output
    assert (tmp_path / "results.jsonl").read_text() == lines


def test_another_seed_is_added_and_a_cut_line_is_no_result(tmp_path: Path) -> None:
    results = Results(tmp_path / "new" / "results.jsonl")
    cells = [SolverCell("condition", TINY["condition"], seed) for seed in (0, 1)]
    run(Solvers(), cells[:1], results, torch.device("cpu"))
    rows = run(Solvers(), cells, results, torch.device("cpu"))
    assert [json.loads(line)["seed"] for line in results.path.read_text().splitlines()] == [0, 1]
    results.path.write_text(results.path.read_text()[:-99])
    assert run(Solvers(), cells, results, torch.device("cpu"))[cells[1]]["found"] == rows[cells[1]]["found"]
    assert json.loads(results.path.read_text().splitlines()[-1])["seed"] == 1
    other = SolverCell("condition", Conditions(1, 4, 8), 0)
    assert run(Solvers(), [other], results, torch.device("cpu"))[other]["setting"]["length"] == 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--study residuals", "'residual', 'gradient', 'condition', 'reversal' or 'precision'"),
        ("--preset desktop", "'laptop' or 'paper'"),
        ("--seeds 0", "`seeds` is 0"),
        ("--device tpu", "'cpu' or 'cuda'"),
    ],
)
def test_an_invalid_option_gives_one_line(kalmix, tmp_path: Path, options: str, says: str) -> None:
    result = kalmix("bench", "solvers", "--output", tmp_path / "out", *options.split())
    assert result.status == 2
    assert says in result.errors
    assert "Traceback" not in result.output + result.errors
    assert not (tmp_path / "out").exists()


def test_a_name_has_one_colour_in_all_panels_and_no_panel_runs_out_of_colours() -> None:
    found = _colours([["cg", "exact"], ["chebyshev", "exact"], [str(n) for n in range(len(COLOURS) + 3)]])
    assert found["cg"] != found["exact"] != found["chebyshev"]
    assert {found[str(n)] for n in range(len(COLOURS))} == set(COLOURS) and len(found) == len(COLOURS) + 6
