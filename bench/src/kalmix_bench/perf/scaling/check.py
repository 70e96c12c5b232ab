"""Compare models on several GPUs with one process: loss and gradients of all parameters, on every rank.

    torchrun --nproc-per-node 4 -m kalmix_bench.perf.scaling.check --output build/scaling
    torchrun --nproc-per-node 2 -m kalmix_bench.perf.scaling.check --layers kla,attention      # CPUs, with gloo

Each layer is tried in a model of two blocks, in float32: DDP, FSDP2, tensor parallelism by heads, context parallelism
in both layouts, whole and packed, and context parallelism with FSDP2 if the number of ranks is even. Writes one row per
layer and method, and exits with 1 if an error exceeds the bound. NaN and infinity count as an infinite error.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
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
from kalmix_bench.perf.scaling.group import check_names, largest, make_mesh, process_group, summed

BOUND = 1e-5  # largest relative error of the loss and of a gradient, in float32
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
    data = make_data(device, 2 * world)
    expected = expect(build(layer, device), data)
    model = DistributedDataParallel(build(layer, device))
    loss = loss_of(model, Data(*(x[2 * rank : 2 * rank + 2] for x in data[:2]), data.count))
    (world * loss).backward()  # DDP averages
    return error_of(model, summed(loss), expected)


def check_fsdp(layer: str, device: torch.device) -> tuple[float, str]:
    """Compare FSDP2, with the dynamics in groups of their own."""
    world, rank = distributed.get_world_size(), distributed.get_rank()
    data, model = make_data(device, 2 * world), build(layer, device)
    expected = expect(model, data)
    shard_dynamics(model)
    for module in (*model.model.layers, model):
        fully_shard(module)
    loss = loss_of(model, Data(*(x[2 * rank : 2 * rank + 2] for x in data[:2]), data.count))
    (world * loss).backward()
    return error_of(model, summed(loss), expected)


def check_heads(layer: str, device: torch.device) -> tuple[float, str]:
    """Compare tensor parallelism by heads."""
    data, model = make_data(device, 2), build(layer, device)
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


def check_context(layer: str, device: torch.device, layout: str, packed: bool, **options: Any) -> tuple[float, str]:
    """Compare context parallelism."""
    data, model, segments = make_data(device, 2), build(layer, device), None
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
    data, model = make_data(device, world // 2), build(layer, device)
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
    **{
        f"context, {layout}{', packed' if packed else ''}{''.join(f', {x}' for x in options.values() if x is not True)}"
        f"{', two phases' if options.get('two_phase') else ''}": (
            lambda layer, device, a=layout, b=packed, c=options: check_context(layer, device, a, b, **c)
        )
        for layout, packed, options in (
            ("contiguous", False, {}),
            ("contiguous", True, {}),
            ("head-tail", False, {}),
            ("head-tail", True, {}),
            ("head-tail", True, {"attention": "ring"}),
            ("head-tail", True, {"two_phase": True}),
        )
    },
    "fsdp2 and context": check_both,
}


def check(layer: str, method: str, device: torch.device) -> dict[str, Any]:
    """Return the row of a layer and a method: the largest error of all ranks, the tensor with the largest error of this
    rank, or the reason why the layer refuses."""
    begin, row = time.perf_counter(), {"layer": layer, "method": method, "ranks": distributed.get_world_size()}
    try:
        error, where = CHECKS[method](layer, device)
    except (ArgumentError, RuntimeError) as refusal:
        if "cannot take part" not in str(refusal):
            raise
        return row | {"status": "refused", "reason": str(refusal).split("\n")[0]}
    worst = largest(error, device)
    status = "ok" if worst <= BOUND else "wrong"
    return row | {"status": status, "error": worst, "where": where, "seconds": time.perf_counter() - begin}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default=",".join([*MIXERS, "hybrid"]), help="layers, separated by commas")
    parser.add_argument("--methods", default=";".join(CHECKS), help="methods, separated by semicolons")
    parser.add_argument("--output", type=Path, help="folder for results.jsonl")
    arguments = parser.parse_args()
    check_names(parser, "--layers", arguments.layers.split(","), [*MIXERS, "hybrid"])
    check_names(parser, "--methods", arguments.methods.split(";"), CHECKS)
    wrong = 0
    with process_group() as device:
        first = distributed.get_rank() == 0
        even = distributed.get_world_size() % 2 == 0
        methods = [x for x in arguments.methods.split(";") if even or x != "fsdp2 and context"]
        for layer in arguments.layers.split(","):
            rows = [check(layer, method, device) for method in methods]
            wrong += sum(row["status"] == "wrong" for row in rows)
            if first:
                for row in rows:
                    shown = f"{row['error']:.1e} ({row['where']})" if "error" in row else row["reason"]
                    print(f"{layer:18} {row['method']:38} {row['status']:8} {shown}", flush=True)
                if arguments.output:
                    arguments.output.mkdir(parents=True, exist_ok=True)
                    with (arguments.output / "results.jsonl").open("a") as file:
                        file.writelines(json.dumps(row) + "\n" for row in rows)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
