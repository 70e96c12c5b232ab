"""The page of the papers' tables and figures: complete, drawn from committed rows, and never typed."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kalmix.errors import ArgumentError
from kalmix_bench.cli import EXPERIMENTS, app
from kalmix_bench.papers.entries import Entry, Paper, read_paper, read_papers
from kalmix_bench.papers.page import describe, draw
from kalmix_bench.papers.quantities import CommittedResults
from kalmix_bench.papers.status import (
    CONFIRMED,
    DIFFERS,
    NO_EXPERIMENT,
    NOT_RUN,
    PICTURE,
    REPRODUCED,
    Outcome,
    agree,
    outcome,
)

ROOT = Path(__file__).parents[3]
RESULTS = CommittedResults(ROOT / "bench" / "results", EXPERIMENTS)
PAPERS = read_papers()
ENTRIES = [(paper, entry) for paper in PAPERS for entry in paper.entries]
RUN = {"seconds": 1.0, "versions": {}, "device": "cpu"}


def ids(pair: Any) -> str:
    return f"{pair[0].title}, {pair[1].label}"


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.title)
def test_every_table_and_figure_has_an_entry(paper: Paper) -> None:
    names = [name for entry in paper.entries for name in entry.of]
    assert len(names) == len(set(names))
    for kind, count in (("Table", paper.tables), ("Figure", paper.figures)):
        numbers = {int(found[1]) for name in names if (found := re.fullmatch(rf"{kind} (\d+)[a-e]?", name))}
        assert numbers == set(range(1, count + 1)), kind
    assert all(re.match(r"(Table|Figure) \d+[a-e]?$|Section [A-Z]\.", name) for name in names)


@pytest.mark.parametrize("pair", ENTRIES, ids=ids)
def test_entries_name_files_and_tests_that_exist(pair: tuple[Paper, Entry]) -> None:
    entry = pair[1]
    docs = ROOT / "docs" / "results"
    files = [
        *(RESULTS.folder / file for file in entry.files),
        *(docs / path for path in entry.pictures),
    ]
    assert all(path.is_file() for path in [*files, *([docs / entry.page] if entry.page else [])])
    for test in entry.tests:
        path, name = test.split("::")
        assert f"def {name}(" in (ROOT / path).read_text()


@pytest.mark.parametrize("pair", ENTRIES, ids=ids)
def test_entries_explain_what_differs_or_is_missing(pair: tuple[Paper, Entry]) -> None:
    entry = pair[1]
    found = outcome(entry, RESULTS)
    assert found.status != DIFFERS or entry.explanation
    assert not found.has_gaps or entry.not_run
    assert bool(entry.no_experiment) == (found.status == NO_EXPERIMENT)


def test_the_page_is_what_the_command_writes(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(RESULTS.folder), "--papers", str(tmp_path / "papers.md")])
    assert done.exit_code == 0, done.output
    drawn = (tmp_path / "papers.md").read_text()
    assert drawn == draw(PAPERS, RESULTS)
    assert drawn == (ROOT / "docs" / "results" / "papers.md").read_text(), "run the command that the page names"


def mad_row(layer: str, seed: int, macro: float) -> dict[str, Any]:
    (first, *_) = (RESULTS.folder / "2026-11-22-nvidia-h200-mad" / "results.jsonl").read_text().splitlines()
    row = json.loads(first)
    cell = {"task": "mad/compression", "layer": layer, "seed": seed, "scores": {"macro": macro}}
    settings = {"vocab_size": 16, "seq_len": 32, "k_motif_size": 1, "v_motif_size": 1}
    part = {"train": 12800, "test": 1280, "settings": {**row["parts"][0]["settings"], **settings}}
    return {**row, **cell, "parts": [part]}


SCORES = """
title = "P"
link = ""
tables = 1
figures = 0
[[entry]]
of = ["Table 1"]
subject = "S"
explanation = "For a reason."
not_run = "for lack of time."
[[entry.scores]]
file = "rows.jsonl"
source = "Kalman Linear Attention, Figure 5a"
decimals = 2
layers = ["kla"]
[[entry.order]]
what = "accuracy"
at = { file = "rows.jsonl", task = "mad/compression", score = "macro" }
better = { layer = "kla" }
worse = [{ layer = "kla-noise-free" }]
"""


def status_of(folder: Path, *rows: dict[str, Any]) -> tuple[Entry, Outcome]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (entry,) = read_paper(SCORES).entries
    return entry, outcome(entry, CommittedResults(folder, EXPERIMENTS))


def test_rows_that_contradict_a_printed_number_differ(tmp_path: Path) -> None:
    entry, found = status_of(tmp_path, mad_row("kla", 0, 0.8871), mad_row("kla-noise-free", 0, 0.72))
    assert found.status == DIFFERS
    text = describe(entry, found)
    assert (
        "KLA, compression (%): 88.71, printed 85.03." in text and "One seed. 5 printed numbers have no result" in text
    )
    missing = "memorization, in context recall, noisy recall, fuzzy recall, selective copying"
    assert "For a reason." in text and text.endswith(f"Not run: KLA ({missing}), for lack of time.")


def test_rows_that_contradict_a_ranking_differ(tmp_path: Path) -> None:
    _, found = status_of(tmp_path, mad_row("kla", 0, 0.8503), mad_row("kla-noise-free", 0, 0.91))
    assert found.status == DIFFERS


def test_rows_within_one_standard_error_reproduce_a_number(tmp_path: Path) -> None:
    seeds = [mad_row("kla", seed, macro) for seed, macro in enumerate((0.83, 0.85, 0.88))]
    entry, found = status_of(tmp_path, *seeds, mad_row("kla-noise-free", 0, 0.72))
    assert (found.status, found.qualifier) == (REPRODUCED, "in part")
    assert "KLA, compression (%): 85.33 ± 1.5, printed 85.03." in describe(entry, found)


def test_entries_without_rows_are_not_run(tmp_path: Path) -> None:
    entry, found = status_of(tmp_path, mad_row("gla", 0, 0.5))
    assert found.status == NOT_RUN and describe(entry, found) == "For lack of time."


def test_orders_alone_confirm_and_pictures_alone_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"rows": [{"kernel": "x", "ms": 1.0}, {"kernel": "y", "ms": 2.0}]}')
    results = CommittedResults(tmp_path, EXPERIMENTS)
    places = [{"file": "a.json", "path": ["rows", {"kernel": name}, "ms"], "name": name} for name in "xy"]
    order = {"what": "time", "better": places[0], "worse": [places[1]], "lower_is_better": True}
    text = 'title="P"\nlink=""\ntables=0\nfigures=1\n[[entry]]\nof=["Figure 1"]\nsubject="S"\n'
    (entry,) = read_paper(text + 'pictures=["a.svg"]\n').entries
    assert outcome(entry, results).status == PICTURE
    both = [read_paper(text + f"[[entry.order]]\n{_toml(one)}").entries[0] for one in (order, _swapped(order))]
    assert [outcome(one, results).status for one in both] == [CONFIRMED, DIFFERS]
    assert describe(both[0], outcome(both[0], results)) == "Time: 1 (x) < 2 (y)."


def _swapped(order: dict[str, Any]) -> dict[str, Any]:
    return {**order, "better": order["worse"][0], "worse": [order["better"]]}


def _toml(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {_inline(value)}\n" for key, value in values.items())


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_inline(one)}" for key, one in value.items()) + " }"
    return "[" + ", ".join(map(_inline, value)) + "]" if isinstance(value, list) else json.dumps(value)


@pytest.mark.parametrize(
    ("value", "error", "printed", "agrees"),
    [
        (85.034, math.nan, "85.03", True),
        (85.04, math.nan, "85.03", False),
        (85.04, 0.02, "85.03", True),
        (1.2, math.nan, "1", True),
        (0.31, math.nan, "1e-3", False),
        (0.335, math.nan, "0.34", True),
    ],
)
def test_numbers_agree_within_their_error_or_as_printed(value: float, error: float, printed: str, agrees: bool) -> None:
    assert agree(value, error, printed) == agrees


@pytest.mark.parametrize(
    "place",
    [
        {"file": "a.md", "table": "times", "row": {"kernel": "z"}, "column": "ms"},
        {"file": "a.md", "table": "memory", "row": {"kernel": "x"}, "column": "ms"},
        {"file": "a.md", "table": "times", "row": {"kernel": "x"}, "column": "us"},
        {"file": "a.json", "path": ["rows", {"kernel": "z"}]},
    ],
)
def test_places_that_hold_no_number_are_refused(place: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# all\n\n## times of x\n\n| kernel | ms | seeds |\n|---|---|---|\n| x | 1.5 | 2 |\n"
    )
    (tmp_path / "a.json").write_text('{"rows": []}')
    results = CommittedResults(tmp_path, EXPERIMENTS)
    found = results.look_up({"file": "a.md", "table": "times", "row": {"kernel": "x"}, "column": "ms"})
    assert found is not None and (found.value, found.seeds) == (1.5, 2)
    with pytest.raises(ArgumentError, match="place"):
        results.look_up(place)


def test_papers_take_one_folder() -> None:
    done = CliRunner().invoke(app, ["report", "a", "b", "--papers", "c.md"])
    assert isinstance(done.exception, ArgumentError) and "2 folders" in str(done.exception)
