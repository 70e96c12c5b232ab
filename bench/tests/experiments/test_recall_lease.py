"""`bench/recall_lease.sh`: cells run in order, continue in a later call, and rows come back; order of its campaign."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

import kalmix_bench.cli
import kalmix_bench.experiments.recall.report
import kalmix_bench.experiments.recall.trainer  # noqa: F401 - each process would import these
from kalmix_bench.experiments.recall import campaign
from kalmix_bench.experiments.recall.campaign import MAD_FIRST, MAD_OTHERS, PACKAGES, absent_packages, campaign_cells
from kalmix_bench.experiments.recall.cell_line import parse_cell
from kalmix_bench.experiments.recall.experiment import Recall
from kalmix_bench.experiments.recall.presets import BENCHES, MAD, make_cells
from kalmix_bench.experiments.recall.protocol import RecallCell
from kalmix_bench.runner import cell_file, scheduler, workers
from kalmix_bench.runner.cells import Results, digest

from .clock import DEADLINE, set_clock
from .warm_python import WarmPython

SCRIPT = Path(__file__).parents[2] / "recall_lease.sh"
COPYING = ("mad", "--preset", "laptop", "--task", "selective-copying", "--epochs", "1")


def command(python: str | Path, *arguments: object) -> list[str]:
    return ["bash", str(SCRIPT), "--python", str(python), "--wheels", "none", *map(str, arguments)]


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmPython]:
    """Python whose workers are forks, too, and end at once; the preset `laptop` of MAD has few sequences."""
    few = [replace(study, parts=(replace(study.parts[0], train=64, test=16),)) for study in BENCHES["mad"]["laptop"]]
    monkeypatch.setitem(BENCHES["mad"], "laptop", tuple(few))
    monkeypatch.setattr(workers, "START_METHOD", "fork")
    monkeypatch.setattr(workers, "SHUTDOWN_SECONDS", 0.05)
    python = WarmPython(tmp_path)
    yield python
    python.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("-- mad", "--out is missing"),
        ("--lease 3 --out x -- mad", "--lease is not an option"),
        ("--out {}/out --work {}/work", "no cells; add --"),
        ("--out {}/out --work {}/work -- mad --preset none", "preset"),
        ("--out {}/out --work {}/work -- campaign --cells 3", "--cells 3"),
        ("--out {}/out --work {}/work -- {}/none.jsonl", "none.jsonl"),
    ],
)
def test_wrong_calls_are_refused(options: str, words: str, tmp_path: Path, python: WarmPython) -> None:
    ended = python.run(command(python.path, *options.replace("{}", str(tmp_path)).split()))
    assert ended.returncode == 2 and words in ended.stderr


@pytest.fixture
def call(tmp_path: Path, python: WarmPython) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the script on the CPU; rows come back to the folder `out`."""
    places = ("--out", tmp_path / "out", "--commit", "abc", "--devices", "cpu")

    def run(*arguments: object, work: str = "work") -> subprocess.CompletedProcess[str]:
        return python.run(command(python.path, *places, "--work", tmp_path / work, *arguments))

    return run


def rows(folder: Path) -> list[dict]:
    return [json.loads(row) for row in (folder / "results.jsonl").read_text().splitlines()]


def test_cells_run_in_order_and_finished_ones_do_not_run_again(
    tmp_path: Path, call: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    out, cells = tmp_path / "out", tmp_path / "cells.jsonl"
    written = (*COPYING, "--layer", "kla-noise-free")
    ended = call("--rows", "none", "--limit", "1", "--", *COPYING)
    assert ended.returncode == 3 and "too little time is left" in ended.stdout
    cell = replace(make_cells(BENCHES["mad"]["laptop"], ["selective-copying"], ["kla"], 1)[0], seed=7)
    cell_file.write([replace(cell, protocol=replace(cell.protocol, epochs=1))], cells)
    ended = call("--rows", "none", "--tf32", "--", cells, "--", *written, "--", *written)
    assert ended.returncode == 0 and "3 cells" in ended.stdout, ended.stderr
    assert not any("tf32" in row for row in rows(out))  # a CPU does not round
    assert [(row["layer"], row["seed"], row["commit"]) for row in rows(out)] == [
        ("kla", 7, "abc"),
        ("kla-noise-free", 0, "abc"),
    ]
    assert (out / "report.md").exists()
    before = rows(out)
    for number, row in enumerate(before):  # rows of two earlier machines, whose commits are kept
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "results.jsonl").write_text(json.dumps({**row, "commit": "earlier"}) + "\n")
    (out / "results.jsonl").unlink()
    earlier = ("--rows", tmp_path / "0", "--rows", tmp_path / "1")
    ended = call(*earlier, "--", cells, "--", *written, work="another")
    assert ended.returncode == 0 and rows(out) == [{**row, "commit": "earlier"} for row in before], ended.stderr


@pytest.mark.slow
def test_a_cell_that_the_time_ends_continues_in_the_next_call(
    tmp_path: Path, call: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "work" / "run"
    cells = tmp_path / "cells.jsonl"
    (cell,) = make_cells(BENCHES["mad"]["laptop"], ["selective-copying"], ["linear-attention"], 1)
    few = replace(cell, parts=(replace(cell.parts[0], train=32, test=8),))
    long = replace(few, seed=1, protocol=replace(few.protocol, epochs=10**6))
    cell_file.write([replace(few, protocol=replace(few.protocol, epochs=1)), long], cells)
    with monkeypatch.context() as patch:
        set_clock(patch, run / "results.jsonl", 1)
        ended = call("--rows", "none", "--limit", int(DEADLINE) + 20, "--jobs-per-device", 2, "--", cells)
    assert ended.returncode == 3 and "1 of 2 cells are finished" in ended.stdout, ended.stderr
    assert [row["seed"] for row in rows(tmp_path / "out")] == [0]
    (checkpoints,) = (run / "checkpoints").iterdir()
    newest = max(int(path.name.rpartition("-")[2]) for path in checkpoints.glob("checkpoint-*"))
    assert newest > 0
    (partial,) = map(json.loads, (tmp_path / "out" / "unfinished.jsonl").read_text().splitlines())
    epochs = partial["epochs_so_far"]
    assert (partial["seed"], partial["commit"], epochs) == (1, "abc", newest) and len(
        partial["curves"]["macro"]
    ) == epochs
    enough = replace(long, protocol=replace(long.protocol, epochs=newest + 1))  # one step an epoch
    checkpoints.rename(checkpoints.with_name(digest(enough)))
    cell_file.write([enough], cells)
    ended = call("--rows", "none", "--", cells)
    assert ended.returncode == 0, ended.stderr
    assert [(row["seed"], row.get("epochs")) for row in rows(tmp_path / "out")] == [(0, 1), (1, newest + 1)]


def test_the_campaign_has_all_cells_of_a_seed_before_those_of_the_next() -> None:
    every = campaign_cells(seeds=2)
    once = [cell for cell in every if cell.layer in (*PACKAGES, "kla-plus") or _is_deep_mad(cell)]
    counts = {"mamba-1": 6, "mlstm": 6, "kla-plus": 6, "kla": 2, "kla-zoh": 2}
    assert Counter((cell.layer, cell.seed) for cell in once) == {(layer, 0): n for layer, n in counts.items()}
    assert [cell for cell in every if not cell.seed][-22:] == once  # after all others of their seed
    cells = [cell for cell in every if cell not in once]
    first = [cell for cell in cells if not cell.seed and (cell.shape.decoder or not cell.shape.encoder)]
    second = [cell for cell in cells if cell.seed]  # without the encoder's MLP alone, which has one seed
    assert [cell.seed for cell in cells] == [0] * (len(cells) - len(second)) + [1] * len(second)
    assert [replace(cell, seed=1) for cell in first] == second
    assert len(set(cells)) == len(cells)
    assert {cell.protocol.validation for cell in cells if cell.task.startswith("mad/")} == {1280}
    words = [cell for cell in cells if cell.task == "words/a5"]
    lengths = [part.settings for part in words[-1].parts if part.test]
    assert [dict(settings)["k"] for settings in lengths] == [20, 4, 6, 10, 15, 25, 30, 40]


def _is_deep_mad(cell: RecallCell) -> bool:
    return cell.task == "mad/selective-copying" and cell.shape.depth > 1


def test_the_campaign_has_each_task_and_begins_with_some_of_each_benchmark() -> None:
    cells = campaign_cells(1, validation=0)
    kinds = [cell.task.partition("/")[0] for cell in cells]
    assert Counter(kinds[:16]) == {"mad": 8, "mqar": 4, "words": 4}
    readings = set(make_cells(BENCHES["mad"]["encoder"], ("fuzzy-recall", "selective-copying"), (), 1))
    assert len(readings) == 4 and readings <= set(cells)
    deep = [cell for cell in cells if _is_deep_mad(cell)]
    assert {(cell.layer, cell.shape.depth) for cell in deep} == set(product(("kla", "kla-zoh"), (2, 4)))
    mad = [cell for cell in cells if cell.task.startswith("mad/") and cell not in readings and cell not in deep]
    layers = [*MAD_FIRST, *MAD_OTHERS, "kla-plus", *PACKAGES]
    assert set(mad) == set(make_cells(BENCHES["mad"]["paper"], MAD, layers, 1)) and len(mad) == 6 * len(layers)
    assert {cell.task for cell in cells if cell.task.startswith("mqar")} == {
        "mqar",
        *(f"mqar/{name}" for name in ("update", "rewrite", "shared", "block")),
    }
    for task, sizes in (("mqar", {32, 64}), ("recall/long", {64, 128})):
        assert {cell.shape.hidden_size for cell in cells if cell.task == task} == sizes
    words = {(cell.layer, cell.shape.depth) for cell in cells if cell.task == "words/a5"}
    assert len(words) == 4 * 4 and {depth for _, depth in words} == {1, 2, 3, 4}


@pytest.mark.slow
def test_the_last_call_begins_no_long_task_and_keeps_finished_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = campaign_cells(2)
    long = [cell for cell in cells if cell.task in ("mad/compression", "mad/selective-copying")]
    (tmp_path / "checkpoints" / digest(long[3])).mkdir(parents=True)
    finished = {**long[5].to_dict(), "seconds": 1.0, "versions": {}}  # the checkpoint of a finished cell is deleted
    Results(tmp_path / "results.jsonl").add([finished])
    monkeypatch.setattr(campaign, "absent_packages", lambda: {})
    monkeypatch.setattr(sys, "argv", ["campaign", str(tmp_path / "cells"), "--seeds", "2", "--last", str(tmp_path)])
    campaign.main()
    expected = [cell for cell in cells if cell not in long or cell in (long[3], long[5])]
    written = cell_file.read(tmp_path / "cells", parse_cell)
    assert list(map(digest, written)) == list(map(digest, expected)) and len(expected) > 150


@pytest.mark.parametrize("absent", [(), ("xlstm",), ("mambapy", "xlstm")])
def test_cells_whose_package_is_not_installed_are_skipped_with_a_sentence(
    absent: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "find_spec", lambda name: None if name in absent else name)
    monkeypatch.setattr(sys, "argv", ["campaign", str(tmp_path / "cells.jsonl"), "--seeds", "1"])
    campaign.main()
    layers = Counter(json.loads(line)["layer"] for line in (tmp_path / "cells.jsonl").read_text().splitlines())
    assert [layers[layer] for layer in PACKAGES] == [0 if PACKAGES[layer] in absent else 6 for layer in PACKAGES]
    said = capsys.readouterr().out.splitlines()
    skipped = [layer for layer in PACKAGES if PACKAGES[layer] in absent]
    assert [line.split(",")[0] for line in said] == [f"skipped: cells of {layer}" for layer in skipped]


def test_the_script_says_which_cells_are_skipped(
    call: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "xlstm" else find(name, *rest))
    ended = call("--rows", "none", "--limit", "1", "--", "campaign", "--seeds", "1")
    assert ended.returncode == 3, ended.stderr
    skipped, count, *_ = ended.stdout.splitlines()
    assert skipped.startswith("skipped: cells of mlstm, because xlstm is not installed")
    assert count.startswith("142 cells")


@pytest.mark.slow
def test_each_task_and_each_layer_of_the_campaign_runs(tmp_path: Path) -> None:
    kinds: dict[tuple[str, str], RecallCell] = {}
    absent = absent_packages()
    for cell in (cell for cell in campaign_cells(1) if cell.layer not in absent):
        bench = cell.task.partition("/")[0]
        if ("task", cell.task) not in kinds or (bench, cell.layer) not in kinds:
            few = tuple(replace(part, train=min(part.train, 4), test=min(part.test, 2)) for part in cell.parts[:3])
            shape = replace(cell.shape, hidden_size=32, depth=1, state_size=512)
            protocol = replace(cell.protocol, epochs=1, batch_size=4, validation=min(cell.protocol.validation, 2))
            kinds["task", cell.task] = kinds[bench, cell.layer] = replace(
                cell, parts=few, shape=shape, protocol=protocol
            )
    cells = list(dict.fromkeys(kinds.values()))
    found = scheduler.run(Recall("abc"), cells, Results(tmp_path / "results.jsonl"), torch.device("cpu"))
    assert len(found) == len(cells) > 20
    for cell, row in found.items():
        assert row["commit"] == "abc" and row["epochs"] == 1 and "diverged" not in row
        assert ("test_chosen_scores" in row) == cell.task.startswith("mad/")
        assert len(row["slices"]["score"]) == sum(part.test > 0 for part in cell.parts)
