"""Evaluation in two processes gives the results of one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from distributed.processes import leave_group, run_ranks
from distributed.sharded import join
from lm_eval.api.instance import Instance

from kalmix.cli.load_run import load_model
from kalmix.evaluation.judge import Judge
from kalmix.evaluation.perplexity import perplexity, read_text
from kalmix.evaluation.ranks import ALONE, Ranks, start_ranks
from kalmix.training.data import read_tokenizer
from kalmix.training.model_folder import find_model

from .conftest import WORDS

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_each_item_is_computed_once_and_results_keep_their_order(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for processes."""
    items, keys = [f"item {n}" for n in range(7)], [0, 0, 1, 2, 2, 3, 4]
    parts: dict[int, list[str]] = {}
    barrier = threading.Barrier(size)

    def exchange(found: list[Any], own: list[str]) -> None:
        parts[int(threading.current_thread().name)] = own
        barrier.wait(30)
        found[:] = [parts[rank] for rank in range(size)]

    monkeypatch.setattr(dist, "all_gather_object", exchange)
    shares, results = [], []

    def work(rank: int) -> None:
        def compute(own: list[str]) -> list[str]:
            shares.append(own)
            return [x.upper() for x in own]

        results.append(Ranks(rank, size).divide(items, compute, keys))

    threads = [threading.Thread(target=work, args=(rank,), name=str(rank)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[x.upper() for x in items]] * size
    assert sorted(x for share in shares for x in share) == items and all(shares)
    assert all(items[1] in share for share in shares if items[0] in share)


def answers(run: Path, text: Path, ranks: Ranks) -> dict[str, Any]:
    """Return the answers of a model to requests of both kinds, and perplexities."""
    model, tokenizer = load_model(run), read_tokenizer(run / "model")
    judge, draw = Judge(model, tokenizer, batch_size=2, ranks=ranks), random.Random(3)
    found: dict[str, Any] = {}
    for rows in (7, 1):
        prompts = [" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(rows)]
        settings = {"until": ["."], "max_gen_toks": 8, "do_sample": False}
        generated = [Instance("generate_until", {}, (x, settings), 0, ("t", n, 1)) for n, x in enumerate(prompts)]
        found[f"generated {rows}"] = judge.generate_until(generated)
        scored = [
            Instance("loglikelihood", {}, (x, f" {choice}"), i, ("t", n, 1))
            for n, x in enumerate(prompts)
            for i, choice in enumerate(WORDS[:3])
        ]
        found[f"scored {rows}"] = judge.loglikelihood(scored)
    passages = read_text(text, tokenizer, find_model(run), [16, 48])
    for length in passages.lengths:
        found[f"perplexity {length}"] = perplexity(model, passages, length, batch_size=2, ranks=ranks)["scores"]
    return found


def check_answers(rank: int, world: int, folder: str, run: str) -> None:
    join(rank, world, folder)
    ranks = start_ranks("cpu")
    assert ranks == (rank, world)
    found = answers(Path(run), Path(folder, "text.txt"), ranks)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    leave_group()


@pytest.mark.slow
def test_answers_of_two_processes_are_those_of_one(run_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "text.txt").write_text(" ".join(random.Random(4).choices(WORDS, k=150)))
    run_ranks(check_answers, 2, folder, str(run_folder))
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    alone = json.loads(json.dumps(answers(run_folder, folder / "text.txt", ALONE)))
    assert len({*alone["generated 7"]}) == 7
    for name, expected in alone.items():
        if "scored" in name:
            pairs = zip(first[name], expected, strict=True)
            assert all(x[1] == y[1] and x[0] == pytest.approx(y[0], rel=1e-4) for x, y in pairs)
        else:
            assert first[name] == expected, name


@pytest.mark.slow
def test_command_under_torchrun_gives_the_results_of_one_process(run_folder: Path, data: Path, tmp_path: Path) -> None:
    """Other tests give lm-eval other words, so the one process is a new one, too."""
    (tmp_path / "text.txt").write_text(" ".join(random.Random(5).choices(WORDS, k=400)))
    suites = {
        "gka": ("--tasks", "arc_easy,hellaswag,fda"),
        "long": ("--tasks", "niah_single_1", "--lengths", "1000", "--limit", "3", "--text", tmp_path / "text.txt"),
    }
    for suite, options in suites.items():
        line = ["eval", run_folder, "--suite", suite, *options, "--data", data, "--device", "cpu", "--output"]
        alone = run([sys.executable], [*line, "alone"], tmp_path)
        assert alone.returncode == 0, alone.stderr
        both = run(TORCHRUN, [*line, "both"], tmp_path)
        assert both.returncode == 0, both.stderr
        table = (tmp_path / "alone" / f"{suite}.md").read_text()
        assert (tmp_path / "both" / f"{suite}.md").read_text() == table
        assert both.stdout.count("results.json") == 1
        if suite == "gka":
            (tmp_path / "alone" / "results.json").rename(tmp_path / "gka.json")
            (tmp_path / "both" / "results.json").rename(tmp_path / "both.json")
            compare(tmp_path / "gka.json", tmp_path / "both.json")
    compare(tmp_path / "alone" / "results.json", tmp_path / "both" / "results.json")
    failed = run(TORCHRUN, ["eval", tmp_path / "nothing", "--device", "cpu"], tmp_path)
    assert failed.returncode != 0
    errors = [x for x in failed.stderr.splitlines() if x.startswith("error: ")]
    assert len(errors) == 1 and "does not exist" in errors[0]


def run(launch: list[str], line: list[Any], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of kalmix in a new process, or in those of torchrun."""
    command = [*launch, "-m", "kalmix.cli", *map(str, line)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def compare(alone: Path, both: Path) -> None:
    """Check that two files of results have the same records, but for times."""
    first, second = (json.loads(path.read_text()) for path in (alone, both))
    assert first["settings"] == second["settings"] and list(first["tasks"]) == list(second["tasks"])
    for key, record in first["tasks"].items():
        other = second["tasks"][key]
        assert other["provenance"]["processes"] == 2
        for name in record.keys() - {"seconds", "provenance"}:
            assert other[name] == (pytest.approx(record[name]) if name in ("scores", "stderr") else record[name]), key
