"""Compare models on several GPUs with one process: loss and gradients of all parameters, on every rank.

    torchrun --nproc-per-node 4 -m kalmix_bench.perf.scaling.check --output build/scaling
    torchrun --nproc-per-node 2 -m kalmix_bench.perf.scaling.check --layers kla,attention      # CPUs, with gloo

Each layer is tried in a model of two blocks, in float32 without TF32: DDP, FSDP2, tensor parallelism by heads, context
parallelism in both layouts, whole and packed, and context parallelism with FSDP2 if the number of ranks is even. NaN
and infinity count as an infinite error. The bound is 1e-5, or three times the error of one process in float32 against
float64 on the same data, if that is more and at most 5e-5: both sides round.

Writes one row per layer and method as soon as it is known. If a rank fails, it writes why and ends the program, since
the others might wait for it; so does a row that takes longer than `--limit`. Start it again with the same output folder
to continue: it repeats no row. Exits with 1 if a row is wrong, failed or missing.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from kalmix import ArgumentError, Segments
from kalmix.distributed import ContextParallel, gather_heads, shard_dynamics, shard_heads
from kalmix.layers import MIXERS
from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix_bench.perf.scaling.group import (
    BEGUN,
    RESULTS,
    Ranks,
    append_row,
    check_names,
    make_mesh,
    process_group,
    read_rows,
    summed,
    time_limit,
)

BOUND = 1e-5  # largest relative error of the loss and of a gradient, in float32
# Both sides of a comparison round. So a larger error is accepted up to ROUNDINGS times the error of one process in
# float32 against float64, if that is at most MOST_ROUNDING.
ROUNDINGS, MOST_ROUNDING = 3, 5e-5
WORDS, LENGTH = 61, 48  # vocabulary; tokens of a row per rank
IGNORED = -100


class Data(NamedTuple):
    """Tokens and labels `[B, T]` of all ranks, and the number of labels that count."""

    ids: Tensor
    labels: Tensor
    count: int


class Expected(NamedTuple):
    """Loss and gradients of one process."""

    loss: Tensor
    gradients: dict[str, Tensor | None]


def build(layer: str, device: torch.device) -> KalmixForCausalLM:
    """Build a model of two blocks, the same on every rank."""
    torch.manual_seed(0)
    options: dict[str, dict[str, Any]] = {"gated-kalmanet": {"ridge": 0.1}, "design": {"design": "kla"}}
    if layer == "hybrid":
        layers: list[Any] = ["kla", "gated-deltanet", "attention"]
    else:
        layers = [{"mixer": layer, **options.get(layer, {})}] * 2
    heads = max(2, distributed.get_world_size())
    config = KalmixConfig(vocab_size=WORDS, hidden_size=32 * heads, layers=layers, num_attention_heads=heads)
    return KalmixForCausalLM(config).to(device).train()


def count_rows(method: str) -> int:
    """Return the number of rows of the batch that a method is compared on."""
    world = distributed.get_world_size()
    return {"ddp": 2 * world, "fsdp2": 2 * world, "fsdp2 and context": world // 2}.get(method, 2)


def make_data(device: torch.device, rows: int) -> Data:
    """Return random tokens with next tokens as labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (rows, LENGTH * distributed.get_world_size()), generator=generator).to(device)
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], 1)
    return Data(ids, labels, int((labels != IGNORED).sum()))


def packing(data: Data) -> tuple[Segments, Data]:
    """Return documents that begin and end inside ranks and between them, and labels that stay inside of them."""
    rows, length = data.ids.shape
    cuts = [0, length // 9, length // 2, length // 2 + 1, length - length // 7]
    documents = [(row, a, b) for row in range(rows) for a, b in zip(cuts, [*cuts[1:], length], strict=True)]
    labels = data.labels.clone()
    for row, _, stop in documents:
        labels[row, stop - 1] = IGNORED
    segments = Segments.of(torch.tensor(documents, dtype=torch.int32, device=data.ids.device))
    return segments, Data(data.ids, labels, int((labels != IGNORED).sum()))


def loss_of(model: nn.Module, data: Data, **options: Any) -> Tensor:
    """Return the sum of the losses of some tokens, divided by the number of all labels."""
    ids, labels, count = data
    return model(input_ids=ids, labels=ids, shift_labels=labels, num_items_in_batch=count, **options).loss


def expect(model: nn.Module, data: Data, segments: Segments | None = None) -> Expected:
    """Return loss and gradients of one process, without leaving gradients in the model."""
    options = {} if segments is None else {"seq_idx": segments.segment_ids(*data.ids.shape).to(torch.int32)}
    loss = loss_of(model, data, **options)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return Expected(loss.detach(), gradients)


def error_of(model: nn.Module, loss: Tensor, expected: Expected) -> tuple[float, str]:
    """Return the largest relative error of the loss and the gradients of this rank, and the name of its tensor."""
    errors = [(float((loss - expected.loss).abs() / expected.loss.abs()), "loss")]
    found = gradients_of(model)
    for name, reference in expected.gradients.items():
        got = found[name]
        if reference is None or got is None:
            errors.append((0.0 if reference is got else float("inf"), name))
        else:
            errors.append((float((got - reference).norm() / reference.norm().clamp(min=1e-3)), name))
    return max((error if math.isfinite(error) else math.inf, name) for error, name in errors)


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Return whole gradients by the names of the model in one process."""
    parameters = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    return {name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in parameters.items()}


def check_ddp(layer: str, device: torch.device) -> tuple[float, str]:
    """Compare DDP: each rank has two of the rows."""
    world, rank = distributed.get_world_size(), distributed.get_rank()
    data = make_data(device, count_rows("ddp"))
    expected = expect(build(layer, device), data)
    model = DistributedDataParallel(build(layer, device))
    loss = loss_of(model, Data(*(x[2 * rank : 2 * rank + 2] for x in data[:2]), data.count))
    (world * loss).backward()  # DDP averages
    return error_of(model, summed(loss), expected)


def check_fsdp(layer: str, device: torch.device) -> tuple[float, str]:
    """Compare FSDP2, with the dynamics in groups of their own."""
    world, rank = distributed.get_world_size(), distributed.get_rank()
    data, model = make_data(device, count_rows("fsdp2")), build(layer, device)
    expected = expect(model, data)
    shard_dynamics(model)
    for module in (*model.model.layers, model):
        fully_shard(module)
    loss = loss_of(model, Data(*(x[2 * rank : 2 * rank + 2] for x in data[:2]), data.count))
    (world * loss).backward()
    return error_of(model, summed(loss), expected)


def check_heads(layer: str, device: torch.device) -> tuple[float, str]:
    """Compare tensor parallelism by heads."""
    data, model = make_data(device, count_rows("heads")), build(layer, device)
    expected = expect(model, data)
    shard_heads(model, make_mesh(device))
    loss = loss_of(model, data)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():  # `gather_heads` gathers values
            if p.grad is not None:
                p.copy_(p.grad)
    has_grad = {name: p.grad is not None for name, p in model.named_parameters()}
    gathered = gather_heads(model)
    whole = build(layer, device)
    for name, p in whole.named_parameters():
        p.grad = gathered[name] if has_grad[name] else None
    return error_of(whole, loss.detach(), expected)


def check_context(
    layer: str, device: torch.device, layout: str, packed: bool = False, **options: Any
) -> tuple[float, str]:
    """Compare context parallelism."""
    data, model, segments = make_data(device, count_rows("context")), build(layer, device), None
    if packed:
        segments, data = packing(data)
    expected = expect(model, data, segments)
    with ContextParallel(make_mesh(device), layout, segments, **options) as cp:
        loss = loss_of(model, Data(cp.shard(data.ids), cp.shard(data.labels), data.count))
        loss.backward()
        cp.sum_gradients(model.parameters())
    return error_of(model, summed(loss), expected)


def check_both(layer: str, device: torch.device) -> tuple[float, str]:
    """Compare FSDP2 over all ranks with context parallelism over pairs of ranks."""
    world = distributed.get_world_size()
    mesh = make_mesh(device, world // 2, 2, names=("dp", "cp"))
    data, model = make_data(device, count_rows("fsdp2 and context")), build(layer, device)
    expected = expect(model, data)
    every = mesh["dp", "cp"]._flatten("all")
    shard_dynamics(model, every)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=every)
    row = mesh["dp"].get_local_rank()
    with ContextParallel(mesh["cp"], "head-tail") as cp:
        own = Data(cp.shard(data.ids[row : row + 1]), cp.shard(data.labels[row : row + 1]), data.count)
        loss = loss_of(model, own)
        (world * loss).backward()
    return error_of(model, summed(loss), expected)


CHECKS: dict[str, Callable[..., tuple[float, str]]] = {
    "ddp": check_ddp,
    "fsdp2": check_fsdp,
    "heads": check_heads,
    "context, contiguous": partial(check_context, layout="contiguous"),
    "context, contiguous, packed": partial(check_context, layout="contiguous", packed=True),
    "context, head-tail": partial(check_context, layout="head-tail"),
    "context, head-tail, packed": partial(check_context, layout="head-tail", packed=True),
    "context, head-tail, packed, ring": partial(check_context, layout="head-tail", packed=True, attention="ring"),
    "context, head-tail, packed, two phases": partial(check_context, layout="head-tail", packed=True, two_phase=True),
    "fsdp2 and context": check_both,
}


class Options(NamedTuple):
    """Folder of rows, time of `time.monotonic` after which no row begins, and seconds after which a row is given up."""

    output: Path
    stop: float
    limit: float


def check(layer: str, method: str, ranks: Ranks, options: Options) -> dict[str, Any]:
    """Return the row of a layer and a method: the largest error of all ranks and its tensor, or why there is none.

    If some ranks fail and others do not, or if it takes longer than the limit, the program ends.
    """
    begin, row = time.perf_counter(), {"layer": layer, "method": method, "ranks": ranks.world}

    def give_up() -> None:
        reason = f"took longer than {options.limit:.0f} s; a rank may have failed or may wait for another"
        write(row | {"status": "failed", "reason": reason}, options)

    with time_limit(options.limit, ranks, give_up):
        try:
            own: tuple[str, Any] = "compared", CHECKS[method](layer, ranks.device)
        except (ArgumentError, RuntimeError) as error:
            status = "refused" if "cannot take part" in str(error) else "failed"
            own = status, f"{type(error).__name__}: {error}".split("\n")[0][:300]
        found = ranks.collect(own)
        row["seconds"] = round(time.perf_counter() - begin, 2)
        unusual = [(status, reason) for status, reason in found if status != "compared"]
        if unusual:
            row |= dict(zip(("status", "reason"), unusual[0], strict=True))
        else:
            error, where = max(result for _, result in found)
            row |= {"status": "ok" if error <= BOUND else "wrong", "error": error, "where": where}
        if row["status"] == "wrong":
            rounding = rounding_of(layer, method, ranks.device)
            row["float32_error"] = rounding
            if error <= ROUNDINGS * rounding <= ROUNDINGS * MOST_ROUNDING:
                row["status"] = "ok"
    if unusual and len(unusual) < len(found):
        if ranks.rank == 0:
            write(row | {"status": "failed"}, options)
        print(f"rank {ranks.rank}: {len(unusual)} ranks failed; start the program again to continue", flush=True)
        ranks.wait()
        os._exit(1)
    return row


def rounding_of(layer: str, method: str, device: torch.device) -> float:
    """Return the error of one process in float32 against float64, on the data of a method.

    Rounding explains errors of this size.
    """
    data, segments = make_data(device, count_rows(method)), None
    if "packed" in method:
        segments, data = packing(data)
    expected = expect(build(layer, device).double(), data, segments)
    model = build(layer, device)
    found = expect(model, data, segments)
    for name, p in model.named_parameters():
        p.grad = found.gradients[name]
    return error_of(model, found.loss, expected)[0]


def write(row: dict[str, Any], options: Options) -> None:
    """Append a row to the folder, and print it."""
    append_row(options.output / RESULTS, row)
    shown = f"{row['error']:.1e} ({row['where']})" if "error" in row else row["reason"]
    noise = f", float32 itself {row['float32_error']:.1e}" if "float32_error" in row else ""
    print(f"{row['layer']:18} {row['method']:38} {row['status']:8} {shown}{noise}", flush=True)


def run_all(cells: list[tuple[str, str]], ranks: Ranks, options: Options) -> None:
    """Check all layers and methods that have no row in the folder and did not end an earlier run."""
    known = [*read_rows(options.output / RESULTS), *read_rows(options.output / BEGUN)]
    known = ranks.from_first({(row["layer"], row["method"]) for row in known})
    for layer, method in cells:
        if (layer, method) in known:
            continue
        if not ranks.from_first(time.monotonic() < options.stop):
            break
        if ranks.rank == 0:
            append_row(options.output / BEGUN, {"layer": layer, "method": method})
        row = check(layer, method, ranks, options)
        if ranks.rank == 0:
            write(row, options)


def main() -> int:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default=",".join([*MIXERS, "hybrid"]), help="layers, separated by commas")
    parser.add_argument("--methods", default=";".join(CHECKS), help="methods, separated by semicolons")
    parser.add_argument("--output", type=Path, default=Path("runs/scaling-check"), help="folder for results.jsonl")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which no row begins")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a row; then the program ends")
    arguments = parser.parse_args()
    layers, methods = arguments.layers.split(","), arguments.methods.split(";")
    check_names(parser, "--layers", layers, [*MIXERS, "hybrid"])
    check_names(parser, "--methods", methods, CHECKS)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    options = Options(arguments.output, begin + arguments.deadline, arguments.limit)
    with process_group() as ranks:
        even = ranks.world % 2 == 0
        cells = [(x, method) for x in layers for method in methods if even or method != "fsdp2 and context"]
        run_all(cells, ranks, options)
        statuses = {(row["layer"], row["method"]): row["status"] for row in read_rows(options.output / RESULTS)}
        good = [statuses.get(cell) in ("ok", "refused") for cell in cells]
        if ranks.rank == 0:
            print(f"{sum(good)} of {len(cells)} rows are right or refused", flush=True)
        every = ranks.from_first(all(good))
    return int(not every)


if __name__ == "__main__":
    sys.exit(main())
