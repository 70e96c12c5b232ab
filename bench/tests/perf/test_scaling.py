"""Programs that torchrun starts: comparison of several ranks with one process, and times."""

import json
import os
import subprocess
import sys

import pytest
import torch

from kalmix_bench.perf.scaling import check, speed

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
    assert found["fsdp2"]["tokens"] == 64 and found["context"]["tokens"] == 64 and found["one"]["tokens"] == 32


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
