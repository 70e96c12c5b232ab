"""Programs that torchrun starts: comparison of several ranks with one process, and times."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed

from kalmix import KernelError
from kalmix.ops._shared.dispatch import select_kernel
from kalmix.ops._shared.kernel import Kernel, KernelRequest
from kalmix_bench.perf.scaling import check, group, methods, speed
from kalmix_bench.perf.scaling.budget import budgets_of
from kalmix_bench.perf.scaling.group import Ranks, end_process
from kalmix_bench.perf.scaling.step import Cell, idle
from kalmix_bench.runner.json_lines import append_rows, read_rows

RUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def fork_ranks(program, *options):
    """Run a program in two forks of this process, with the variables of torchrun; return their exit statuses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = ENVIRONMENT | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [_fork_rank(program, options, variables | {"RANK": f"{n}", "LOCAL_RANK": f"{n}"}) for n in range(2)]
    return [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]


def _fork_rank(program, options, variables):
    child = os.fork()
    if child:
        return child
    try:
        signal.alarm(300)  # ends a rank that waits for ever
        os.environ.update(variables)
        sys.argv = ["program", *map(str, options)]
        end_process(program.main() or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)


def rows(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_ranks_equal_one_process_with_every_method(tmp_path):
    command = [*RUN, "kalmix_bench.perf.scaling.check", "--layers", "gated-deltanet,recurrent-afa"]
    done = subprocess.run(
        [*command, "--output", tmp_path], env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = {(row["layer"], row["method"]): row for row in rows(tmp_path)}
    assert {method for _, method in found} == set(check.CHECKS)
    assert all(found["gated-deltanet", method]["status"] == "ok" for method in check.CHECKS)
    assert all(found["gated-deltanet", method]["error_float64"] < 1e-9 for method in check.CHECKS)
    assert all(found["gated-deltanet", method]["of_budget"] < 1 for method in check.CHECKS)
    assert found["recurrent-afa", "context, contiguous"]["status"] == "refused"


def test_idle_time_is_what_no_interval_covers():
    assert idle([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5), (8.0, 9.0)]) == 4.0
    assert idle([]) == 0.0


def test_captured_rows_are_not_those_of_plain_steps():
    (cell,) = speed.cells_of(["kla-toy"], ["context"], [1], 32, 64, True, True)
    plain = cell._replace(captured=False)._asdict() | {"status": "ok"}
    del plain["captured"]  # older rows
    assert speed.next_cell(cell, [plain], [], 1.0) == cell
    assert speed.next_cell(cell._replace(captured=False), [plain], [], 1.0) is None
    assert speed.next_cell(cell, [plain | {"captured": True}], [], 1.0) is None


@pytest.mark.slow
def test_speed_writes_a_row_per_method_and_repeats_none(tmp_path):
    options = ("--models", "gated-deltanet-toy", "--batch", 1, "--length", 32, "--long", 64, "--steps", 1)
    for _ in range(2):
        assert fork_ranks(speed, *options, "--output", tmp_path) == [0, 0]
    found = {row["method"]: row for row in rows(tmp_path)}
    assert len(rows(tmp_path)) == len(found) == len(speed.METHODS)
    assert all(row["status"] == "ok" for row in found.values())
    assert found["fsdp2"]["tokens"] == 64 and found["context"]["tokens"] == 64 and found["one"]["tokens"] == 32


@pytest.mark.slow
def test_groups_of_blocks_take_fewer_collectives():
    command = [
        sys.executable,
        "-m",
        "kalmix_bench.perf.scaling.host",
        "--models",
        "gated-deltanet-narrow",
        "--steps",
        "1",
    ]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [re.search(r", (.*): .* (\d+) gathers, (\d+) scatters", line) for line in done.stdout.splitlines()]
    counts = {x[1]: (int(x[2]), int(x[3])) for x in found if x}
    blocks, groups, root = 24, 6, 1
    assert counts["one"] == (0, 0)
    assert counts["fsdp2"] == (2 * blocks + root, blocks + root)
    assert counts["fsdp2 by 4"] == (2 * groups + root, groups + root)
    assert counts["fsdp2 by 4 kept"] == (groups + root, groups + root)


@pytest.mark.slow
def test_speed_goes_on_after_a_failure_of_all_ranks(tmp_path):
    options = ("--models", "recurrent-afa-toy", "--methods", "context,ddp", "--batch", 1, "--length", 32, "--long", 64)
    assert fork_ranks(speed, *options, "--steps", 1, "--output", tmp_path) == [0, 0]
    assert [row["status"] for row in rows(tmp_path)] == ["failed", "ok"]
    assert "cannot take part" in rows(tmp_path)[0]["error"]


@pytest.mark.slow
def test_programs_give_up_a_row_that_takes_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(group, "WRITE_SECONDS", 0.5)
    options = ("--models", "kla-toy", "--methods", "ddp", "--limit", 0.1, "--output", tmp_path)
    assert 0 not in fork_ranks(speed, *options)
    (row,) = rows(tmp_path)
    assert "took longer than 0.1 s" in row["error"] and "raise --limit" in row["error"] and row["limit"] == 0.1
    options = ("--layers", "kla", "--methods", "ddp;fsdp2", "--limit", 0.1, "--output", tmp_path / "check")
    assert 0 not in fork_ranks(check, *options)
    (row,) = rows(tmp_path / "check")
    assert (row["method"], row["status"], row["limit"]) == ("ddp", "failed", 0.1) and "raise --limit" in row["reason"]


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
    next_cell = partial(speed.next_cell, limit=300.0)
    one, sharded, context = (Cell("kla-1b", method, 4, 8, False) for method in ("one", "fsdp2", "context"))
    again = one._replace(checkpointing=True)
    full, done = ({**x._asdict(), "status": status} for x, status in ((one, "out of memory"), (again, "ok")))
    assert next_cell(one, [], []) == one
    assert next_cell(one, [full], []) == again
    assert next_cell(one, [full, done], []) is None
    assert next_cell(one, [{**full, "checkpointing": True}], []) is None
    assert next_cell(sharded, [full, done], []) == sharded._replace(checkpointing=True)
    assert next_cell(context, [full, done], []) == context
    assert next_cell(context, [], [context._asdict()]) is None  # it ended the program
    assert next_cell(one, [{**one._asdict(), "status": "failed"}], []) is None


def test_rows_cut_by_the_time_limit_run_again_with_a_longer_one():
    cell, options = Cell("kla-1b", "context", 4, 8, True), {"limit": 300.0}
    begun, cut = cell._asdict(), {**cell._asdict(), "status": "failed", "limit": 60.0}
    assert speed.next_cell(cell, [cut], [begun], **options) == cell
    assert speed.next_cell(cell, [cut], [begun], limit=60.0) is None
    assert speed.next_cell(cell, [cut], [begun, begun], **options) is None  # it ended the program
    assert speed.next_cell(cell, [cut, {**begun, "status": "ok"}], [begun, begun], **options) is None


class OneRank(Ranks):
    """One rank that waits for no other."""

    def collect(self, value):
        return [value]

    def from_first(self, value):
        return value


ONE = OneRank(torch.device("cpu"), 0, 1, None)


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setattr(distributed, "get_world_size", lambda *_: 2)


def checked(monkeypatch, folder, results, *, stop=math.inf, limit=300.0, layer="gla"):
    """Check one layer by a method with these results in float32 and in float64; return its last row."""

    def method(case):
        result = results[case.dtype == torch.float64]
        if isinstance(result, Exception):
            raise result
        return {"loss": 0.0, "some.weight": result}

    monkeypatch.setitem(check.CHECKS, "ddp", method)
    monkeypatch.setattr(check, "budgets_of", lambda layer, method: {"loss": 1e-7, "some.weight": 1e-5})
    found = check.run_all([(layer, "ddp")], ONE, check.Options(folder, stop, limit))
    return found[0] if found else None


DOUBLE = "\"some_kernel\" not implemented for 'Double'"


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ((1e-6, 1e-14), "ok"),
        ((1e-5, 1e-9), "ok"),
        ((1.01e-5, 1e-14), "wrong"),
        ((1e-6, 2e-9), "wrong"),
        ((1e-6, math.inf), "wrong"),
        ((1e-6, NotImplementedError(DOUBLE)), "ok"),
        ((1e-4, NotImplementedError(DOUBLE)), "wrong"),
        ((1e-6, RuntimeError("sizes differ")), "failed"),
        ((RuntimeError("sizes differ"), 1e-14), "failed"),
        ((RuntimeError("`Layer` cannot take part"), 1e-14), "refused"),
    ],
)
def test_a_row_is_right_if_it_is_right_in_both_formats(results, status, monkeypatch, tmp_path, two_ranks):
    row = checked(monkeypatch, tmp_path, results)
    assert row["status"] == status and rows(tmp_path) == [row]
    assert ("no_float64" in row) == isinstance(results[1], NotImplementedError)
    if status == "failed" and isinstance(results[1], Exception):
        assert row["reason"] == "in float64: RuntimeError: sizes differ" and row["error"] == 1e-6
    if row.get("error", 0.0) > 1e-5 and "no_float64" not in row:
        assert row["of_budget"] > 1 and 1e-8 < row["float32_error"] < 1e-5


@pytest.mark.slow
def test_budgets_follow_from_the_conditioning_of_each_gradient(two_ranks):
    device = torch.device("cpu")
    whole, packed = (budgets_of("gla", method) for method in ("heads", "context, head-tail, packed"))
    assert min(*whole.values(), *packed.values()) >= 32 * 2**-23
    assert max(whole.values()) < 1e-4 < max(packed.values())  # a document of one token: its output is normalised
    for method, budgets in (("heads", whole), ("context, head-tail, packed", packed)):
        assert check.rounding_of("gla", method, device) < max(budgets.values())
    model, data = methods.build(methods.Case("gla", device)), methods.make_data(device, 2)
    expected = methods.expect(methods.build(methods.Case("gla", device, torch.float64)), data)
    with torch.no_grad():
        model.model.layers[0].mlp_norm.weight[0] *= 1.01
    found = methods.expect(model, data)
    for name, p in model.named_parameters():
        p.grad = found.gradients[name]
    errors = methods.errors_of(model, found.loss, expected)
    assert check.compare_with_budgets(errors, whole)["of_budget"] > 1


def test_errors_of_kernels_without_float64_are_told_from_others():
    request = KernelRequest("cpu", torch.float64, 8, 8, 20)
    single = Kernel("triton", print, dtypes=(torch.float32,))
    with pytest.raises(KernelError) as raised:
        select_kernel("dense", [single], request)
    assert check.refuses_float64(raised.value)
    assert not check.refuses_float64(KernelError("`kernel` is 'triton'; it supports cuda devices"))
    assert not check.refuses_float64(RuntimeError("expected scalar type Float but found Double"))


def test_check_continues_after_a_line_that_was_cut_off(monkeypatch, tmp_path, two_ranks):
    checked(monkeypatch, tmp_path, (1e-6, 1e-14), layer="kla")
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"layer": "gla", "met')
    with pytest.warns(UserWarning, match="skipping line 2"):
        assert checked(monkeypatch, tmp_path, (1e-6, 1e-14))["status"] == "ok"
    with pytest.warns(UserWarning, match="skipping line 2"):
        assert [row["layer"] for row in read_rows(tmp_path / "results.jsonl")] == ["kla", "gla"]


def test_check_repeats_only_rows_that_a_shorter_limit_cut(monkeypatch, tmp_path, two_ranks):
    cut = {"layer": "gla", "method": "ddp", "status": "failed", "reason": "took longer", "limit": 60.0}
    append_rows(tmp_path / "begun.jsonl", [{"layer": "gla", "method": "ddp"}])
    append_rows(tmp_path / "results.jsonl", [cut])
    assert checked(monkeypatch, tmp_path, (1e-6, 1e-14), limit=60.0) == cut
    for error in (1e-6, 1e-5):  # the second is not computed
        assert checked(monkeypatch, tmp_path, (error, 1e-14))["error"] == 1e-6
    assert [row["status"] for row in rows(tmp_path)] == ["failed", "ok"]


def test_no_row_begins_after_the_deadline(monkeypatch, tmp_path):
    assert checked(monkeypatch, tmp_path, (1e-6, 1e-14), stop=0.0) is None
    cells = [Cell("kla-toy", method, 1, 32, False) for method in speed.METHODS]
    speed.run_cells(cells, ONE, speed.Options(tmp_path, 1, False, 0.0, 300.0, None))
    assert not list(tmp_path.iterdir())


def test_check_continues_from_committed_rows(monkeypatch, tmp_path):
    committed = Path(__file__).parents[2] / "results" / "2026-11-27-nvidia-h200-scaling" / "check.jsonl"
    (tmp_path / "results.jsonl").write_text(committed.read_text())
    row = checked(monkeypatch, tmp_path, (1e-6, 1e-14), layer="kla")
    assert row["ranks"] == 4 and row["status"] == "ok" and "error_float64" not in row
    every = read_rows(committed)
    assert all(check.describe(row) for row in every)
    assert check.summary(every, 59) == "of 59 rows, 51 are right (0 of them compared in float64, too), 0 refused"


def test_wrong_gradients_are_found():
    model = torch.nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    expected = methods.Expected(torch.tensor(1.0), gradients)
    assert methods.errors_of(model, torch.tensor(1.0), expected) == {"loss": 0.0, "weight": 0.0, "bias": 0.0}
    model.weight.grad *= 1.01
    error, where = check.worst(methods.errors_of(model, torch.tensor(1.0), expected))
    assert where == "weight" and error == pytest.approx(0.01, rel=1e-3)
    model.bias.grad.fill_(torch.nan)
    assert check.worst(methods.errors_of(model, torch.tensor(1.0), expected)) == (math.inf, "bias")


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
    data, segments = methods.pack(methods.Data(ids, torch.cat([ids[:, 1:], ids[:, :1]], 1), 36))
    for row, _, stop in segments.rows.tolist():
        assert data.labels[row, stop - 1] == methods.IGNORED
    assert data.count == 36 - segments.count
