"""Programs that torchrun starts: comparison of several ranks with one process, and times."""

import json
import os
import subprocess
import sys

import pytest
import torch

from kalmix_bench.perf.scaling import check, speed
from kalmix_bench.perf.scaling.step import Cell

RUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(program, *options):
    command = [*RUN, f"kalmix_bench.perf.scaling.{program}", *map(str, options)]
    return subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=300)


def rows(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_ranks_equal_one_process_with_every_method(tmp_path):
    done = run("check", "--layers", "gated-deltanet,recurrent-afa", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    found = {(row["layer"], row["method"]): row for row in rows(tmp_path)}
    assert {method for _, method in found} == set(check.CHECKS)
    assert all(found["gated-deltanet", method]["status"] == "ok" for method in check.CHECKS)
    assert found["recurrent-afa", "context, contiguous"]["status"] == "refused"


@pytest.mark.slow
def test_speed_writes_a_row_per_method_and_repeats_none(tmp_path):
    options = ("--models", "gated-deltanet-toy", "--batch", 1, "--length", 32, "--long", 64, "--steps", 1)
    for _ in range(2):
        done = run("speed", *options, "--output", tmp_path)
        assert done.returncode == 0, done.stderr
    found = {row["method"]: row for row in rows(tmp_path)}
    assert len(rows(tmp_path)) == len(found) == len(speed.METHODS)
    assert all(row["status"] == "ok" for row in found.values())
    assert found["fsdp2"]["tokens"] == 64 and found["context"]["tokens"] == 64 and found["one"]["tokens"] == 32


@pytest.mark.slow
def test_speed_goes_on_after_a_failure_of_all_ranks(tmp_path):
    options = ("--models", "recurrent-afa-toy", "--methods", "context,ddp", "--batch", 1, "--length", 32, "--long", 64)
    done = run("speed", *options, "--steps", 1, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in rows(tmp_path)] == ["failed", "ok"]
    assert "cannot take part" in rows(tmp_path)[0]["error"]


@pytest.mark.slow
def test_programs_give_up_a_row_that_takes_too_long(tmp_path):
    done = run("speed", "--models", "kla-toy", "--methods", "ddp", "--limit", 0.1, "--output", tmp_path)
    assert done.returncode != 0
    assert "took longer than" in rows(tmp_path)[0]["error"]
    done = run("check", "--layers", "kla", "--methods", "ddp;fsdp2", "--limit", 0.1, "--output", tmp_path / "check")
    assert done.returncode != 0
    assert [(row["method"], row["status"]) for row in rows(tmp_path / "check")] == [("ddp", "failed")]


@pytest.mark.slow
def test_no_row_begins_after_the_deadline(tmp_path):
    for program in ("speed", "check"):
        done = run(program, "--deadline", 0, "--output", tmp_path / program)
        assert done.returncode == (program == "check") and not (tmp_path / program / "results.jsonl").exists()


def test_cells_of_one_gpu_run_before_others_of_their_size():
    methods = ("context", "fsdp2", "one", "context one")
    cells = speed.cells_of(["kla-1b", "kla-toy", "gla-1b"], methods, [4, 1], 8, 64, False)
    sizes = [cell.model.split("-")[1] for cell in cells]
    assert sizes == sorted(sizes) and len(cells) == 6 * 3
    of_1b = [(cell.method, cell.batch, cell.length) for cell in cells if cell.model == "kla-1b"]
    assert of_1b == [
        ("one", 4, 8),
        ("one", 1, 8),
        ("context one", 1, 64),
        ("context", 1, 64),
        ("fsdp2", 4, 8),
        ("fsdp2", 1, 8),
    ]


def test_cells_that_ran_out_of_memory_run_again_with_checkpointing():
    one, sharded, context = (Cell("kla-1b", method, 4, 8, False) for method in ("one", "fsdp2", "context"))
    again = one._replace(checkpointing=True)
    full, done = ({**x._asdict(), "status": status} for x, status in ((one, "out of memory"), (again, "ok")))
    assert speed.next_cell(one, [], []) == one
    assert speed.next_cell(one, [full], []) == again
    assert speed.next_cell(one, [full, done], []) is None
    assert speed.next_cell(one, [{**full, "checkpointing": True}], []) is None
    assert speed.next_cell(sharded, [full, done], []) == sharded._replace(checkpointing=True)
    assert speed.next_cell(context, [full, done], []) == context
    assert speed.next_cell(context, [], [context._asdict()]) is None  # it ended the program
    assert speed.next_cell(one, [{**one._asdict(), "status": "failed"}], []) is None


def test_wrong_gradients_are_found():
    model = torch.nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    expected = check.Expected(torch.tensor(1.0), gradients)
    assert check.error_of(model, torch.tensor(1.0), expected)[0] == 0.0
    model.weight.grad *= 1.01
    error, where = check.error_of(model, torch.tensor(1.0), expected)
    assert where == "weight" and error == pytest.approx(0.01, rel=1e-3)
    model.bias.grad.fill_(torch.nan)
    assert check.error_of(model, torch.tensor(1.0), expected) == (float("inf"), "bias")


@pytest.mark.parametrize(
    ("program", "options", "name"),
    [
        (check, ["--methods", "ddp;fsdp"], "fsdp"),
        (check, ["--layers", "kla,gated"], "gated"),
        (speed, ["--methods", "one,fsdp"], "fsdp"),
        (speed, ["--models", "kla-340m,kla-2b"], "kla-2b"),
    ],
)
def test_unknown_names_are_refused(program, options, name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", *options])
    with pytest.raises(SystemExit, match="2"):
        program.main()
    assert f"{options[0]} has '{name}'; expected some of [" in capsys.readouterr().err


def test_packed_labels_stay_inside_documents():
    ids = torch.arange(2 * 18).view(2, 18)
    segments, data = check.packing(check.Data(ids, torch.cat([ids[:, 1:], ids[:, :1]], 1), 36))
    for row, _, stop in segments.rows.tolist():
        assert data.labels[row, stop - 1] == check.IGNORED
    assert data.count == 36 - segments.count
