"""Methods of distributed training, each compared with one process: loss and gradients of all parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from kalmix import Segments
from kalmix.distributed import ContextParallel, gather_heads, shard_dynamics, shard_heads
from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.ops import OPS
from kalmix_bench.perf.scaling.group import make_mesh, summed

WORDS, LENGTH = 61, 48  # vocabulary; tokens of a row per rank
IGNORED = -100
Errors = dict[str, float]  # by the names of parameters, and "loss"


class Data(NamedTuple):
    """Tokens and labels `[B, T]` of all ranks, and the number of labels that count."""

    ids: Tensor
    labels: Tensor
    count: int


class Case(NamedTuple):
    """Model to compare: its layer, its device and its dtype."""

    layer: str
    device: torch.device
    dtype: torch.dtype = torch.float32


class Expected(NamedTuple):
    """Loss and gradients of one process."""

    loss: Tensor
    gradients: dict[str, Tensor | None]


def build(case: Case) -> KalmixForCausalLM:
    """Build a model of two blocks, the same on every rank, and up to rounding in every dtype."""
    torch.manual_seed(0)
    layer = case.layer
    options: dict[str, dict[str, Any]] = {"gated-kalmanet": {"ridge": 0.1}, "design": {"design": "kla"}}
    if layer == "hybrid":
        layers: list[Any] = ["kla", "gated-deltanet", "attention"]
    else:
        layers = [{"mixer": layer, **options.get(layer, {})}] * 2
    heads = max(2, distributed.get_world_size())
    config = KalmixConfig(vocab_size=WORDS, hidden_size=32 * heads, layers=layers, num_attention_heads=heads)
    return KalmixForCausalLM(config).to(case.device, case.dtype).train()


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


def make_batch(device: torch.device, rows: int, packed: bool) -> tuple[Data, Segments | None]:
    """Return the data of `make_data`, and its documents if `packed`, otherwise `None`."""
    data = make_data(device, rows)
    return pack(data) if packed else (data, None)


def pack(data: Data) -> tuple[Data, Segments]:
    """Return data whose labels stay inside documents, and the documents, which begin inside and between ranks."""
    rows, length = data.ids.shape
    cuts = [0, length // 9, length // 2, length // 2 + 1, length - length // 7]
    documents = [(row, a, b) for row in range(rows) for a, b in zip(cuts, [*cuts[1:], length], strict=True)]
    labels = data.labels.clone()
    for row, _, stop in documents:
        labels[row, stop - 1] = IGNORED
    segments = Segments.of(torch.tensor(documents, dtype=torch.int32, device=data.ids.device))
    return Data(data.ids, labels, int((labels != IGNORED).sum())), segments


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


def errors_of(model: nn.Module, loss: Tensor, expected: Expected) -> Errors:
    """Return the relative errors of the loss and the gradients of this rank, infinite where they are not numbers."""
    return errors_between(Expected(loss, gradients_of(model)), expected)


def errors_between(found: Expected, expected: Expected) -> Errors:
    """Return the relative errors of a loss and of gradients, infinite where they are not numbers."""
    errors = {"loss": float((found.loss - expected.loss).abs() / expected.loss.abs())}
    for name, reference in expected.gradients.items():
        got = found.gradients[name]
        if reference is None or got is None:
            errors[name] = 0.0 if reference is got else math.inf
        else:
            errors[name] = float((got - reference).norm() / reference.norm().clamp(min=1e-3))
    return {name: error if math.isfinite(error) else math.inf for name, error in errors.items()}


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Return whole gradients by the names of the model in one process."""
    parameters = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    return {name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in parameters.items()}


def check_ddp(case: Case) -> Errors:
    """Compare DDP: each rank has two of the rows."""
    world, rank = distributed.get_world_size(), distributed.get_rank()
    data = make_data(case.device, count_rows("ddp"))
    expected = expect(build(case), data)
    model = DistributedDataParallel(build(case))
    loss = loss_of(model, Data(*(x[2 * rank : 2 * rank + 2] for x in data[:2]), data.count))
    (world * loss).backward()  # DDP averages
    return errors_of(model, summed(loss), expected)


def check_fsdp(case: Case) -> Errors:
    """Compare FSDP2, with the dynamics in groups of their own."""
    world, rank = distributed.get_world_size(), distributed.get_rank()
    data, model = make_data(case.device, count_rows("fsdp2")), build(case)
    expected = expect(model, data)
    shard_dynamics(model)
    for module in (*model.model.layers, model):
        fully_shard(module)
    loss = loss_of(model, Data(*(x[2 * rank : 2 * rank + 2] for x in data[:2]), data.count))
    (world * loss).backward()
    return errors_of(model, summed(loss), expected)


def check_heads(case: Case) -> Errors:
    """Compare tensor parallelism by heads."""
    data, model = make_data(case.device, count_rows("heads")), build(case)
    expected = expect(model, data)
    shard_heads(model, make_mesh(case.device))
    loss = loss_of(model, data)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():  # `gather_heads` gathers values
            if p.grad is not None:
                p.copy_(p.grad)
    has_grad = {name: p.grad is not None for name, p in model.named_parameters()}
    gathered = gather_heads(model)
    whole = build(case)
    for name, p in whole.named_parameters():
        p.grad = gathered[name] if has_grad[name] else None
    return errors_of(whole, loss.detach(), expected)


def check_context(case: Case, layout: str, packed: bool = False, **options: Any) -> Errors:
    """Compare context parallelism."""
    (data, segments), model = make_batch(case.device, count_rows("context"), packed), build(case)
    expected = expect(model, data, segments)
    with ContextParallel(make_mesh(case.device), layout, segments, **options) as cp:
        loss = loss_of(model, Data(cp.shard(data.ids), cp.shard(data.labels), data.count))
        loss.backward()
        cp.sum_gradients(model.parameters())
    return errors_of(model, summed(loss), expected)


def check_spans(case: Case) -> Errors:
    """Compare context parallelism in two phases in which every op cuts the parts of a rank into two spans."""
    cut = {name: replace(op, count_spans=lambda v, ranks: 2) for name, op in OPS.items() if op.update is not None}
    with patch.dict(OPS, cut):
        return check_context(case, "head-tail", two_phase=True)


def check_both(case: Case) -> Errors:
    """Compare FSDP2 over all ranks with context parallelism over pairs of ranks."""
    world, (mesh, every) = distributed.get_world_size(), make_meshes_of_pairs(case.device)
    data, model = make_data(case.device, count_rows("fsdp2 and context")), build(case)
    expected = expect(model, data)
    shard_dynamics(model, every)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=every)
    row = mesh["dp"].get_local_rank()
    with ContextParallel(mesh["cp"], "head-tail") as cp:
        own = Data(cp.shard(data.ids[row : row + 1]), cp.shard(data.labels[row : row + 1]), data.count)
        loss = loss_of(model, own)
        (world * loss).backward()
    return errors_of(model, summed(loss), expected)


@cache  # groups of ranks, in both dtypes and for all layers
def make_meshes_of_pairs(device: torch.device) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh of pairs of ranks for context parallelism, and the mesh of all ranks."""
    mesh = make_mesh(device, distributed.get_world_size() // 2, 2, names=("dp", "cp"))
    return mesh, mesh["dp", "cp"]._flatten("all")


CHECKS: dict[str, Callable[..., Errors]] = {
    "ddp": check_ddp,
    "fsdp2": check_fsdp,
    "heads": check_heads,
    "context, contiguous": partial(check_context, layout="contiguous"),
    "context, contiguous, two phases": partial(check_context, layout="contiguous", two_phase=True),
    "context, contiguous, packed": partial(check_context, layout="contiguous", packed=True),
    "context, head-tail": partial(check_context, layout="head-tail"),
    "context, head-tail, two phases, spans": check_spans,
    "context, head-tail, packed": partial(check_context, layout="head-tail", packed=True),
    "context, head-tail, packed, ring": partial(check_context, layout="head-tail", packed=True, attention="ring"),
    "context, head-tail, packed, two phases": partial(check_context, layout="head-tail", packed=True, two_phase=True),
    "fsdp2 and context": check_both,
}
