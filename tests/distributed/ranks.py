"""Functions that run on several ranks of one machine, with gloo on CPUs; each rank is a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from host_reads import NoHostReads
from layers.conftest import LAYERS, shake
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distributed.processes import leave_group
from kalmix import ArgumentError, Segments, checks
from kalmix.distributed import ContextParallel
from kalmix.distributed.context import ATTENTION, Call
from kalmix.distributed.layout import LAYOUTS
from kalmix.layers import KLA, AdaptiveFilterAttention, Attention, RecurrentFilterAttention
from kalmix.ops import OPS

WIDTH = {"attention-grouped": 16}
MODES: dict[str, dict[str, Any]] = {"gather": {}, "ring": {"attention": "ring"}, "two-phase": {"two_phase": True}}
# Layers that take part in a ring.
RINGS = (
    *("attention", "attention-narrow", "attention-grouped"),
    *("afa", "afa-parts", "afa-transformer", "controlled-afa"),
)
# Documents of two rows of 24 tokens: they begin and end inside of ranks and between them, and padding lies between.
PACKED = [(0, 0, 5), (0, 5, 18), (0, 18, 24), (1, 1, 12), (1, 12, 23)]


def check_fast(rank: int, world: int, folder: str, names: list[str]) -> None:
    """Run all quick checks in one group of processes, since starting them takes longest."""
    start(rank, world, folder)
    compare_layers(world, names, torch.float64, 1e-9, (("contiguous", None), ("head-tail", PACKED)))
    rings = [name for name in names if name in RINGS]
    compare_layers(world, rings, torch.float64, 1e-9, (("head-tail", None), ("contiguous", PACKED)), "ring")
    memories = [name for name in names if name not in RINGS]
    compare_layers(world, memories, torch.float64, 1e-9, (("head-tail", PACKED),), "two-phase")
    with in_spans(3):
        compare_layers(world, memories, torch.float64, 1e-9, (("contiguous", None), ("head-tail", None)), "two-phase")
        for layouts in (LAYOUTS, LAYOUTS[::-1]):
            train_without_host_reads("bayesian", world, layouts)
    compare_layers(world, ["attention"], torch.float64, 1e-9, (("contiguous", [(0, 0, 5), (1, 1, 4)]),))
    asked = [name for name in names if name != "afa"]  # the `chunked` kernel of `attend` asks which slots it must read
    for number, name in enumerate(asked):
        train_without_host_reads(name, world, LAYOUTS if number % 2 else LAYOUTS[::-1])
    sum_gradients_of_one_rank(rank, world)
    compare_times(world)
    refuse(world)
    leave_group()


def check_model(rank: int, world: int, folder: str, sharded: bool) -> None:
    """Compare a model on all ranks with one process."""
    start(rank, world, folder)
    (compare_sharded_model if sharded else compare_model)(world)
    leave_group()


def check_layers(
    rank: int, world: int, folder: str, names: list[str], dtype: torch.dtype, tolerance: float, mode: str
) -> None:
    """Compare layers on all ranks with one process."""
    start(rank, world, folder)
    compare_layers(world, names, dtype, tolerance, [(x, rows) for x in LAYOUTS for rows in (None, PACKED)], mode)
    leave_group()


@contextmanager
def in_spans(count: int) -> Iterator[None]:
    """Let ranks cut their tokens into spans in two phases, with all ops."""
    changed = {name: replace(op, count_spans=lambda v, ranks: count) for name, op in OPS.items() if op.update}
    cut, calls = Call.cut, []
    with patch.dict(OPS, changed), patch.object(Call, "cut", lambda *given: calls.append(given) or cut(*given)):
        yield
    assert calls


def start(rank: int, world: int, folder: str, **options: Any) -> None:
    """Join the process group of a test. If this process crashes, it prints the native stack of every thread."""
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    torch.set_num_threads(1)
    store = f"file://{Path(folder) / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world, **options)


def compare_layers(world, names, dtype, tolerance, arrangements, mode="gather"):
    """Compare outputs and gradients of layers on all ranks with those of one process."""
    mesh = init_device_mesh("cpu", (world,))
    for name in names:
        for layout, rows in arrangements:
            what = f"{name}, {mode}, {layout}, {'packed' if rows else 'whole'}, rank {distributed.get_rank()}"
            compare_layer(mesh, name, layout, rows, mode, dtype, tolerance, what)


def compare_layer(mesh, name, layout, rows, mode, dtype, tolerance, what):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    shake(layer)
    layer = layer.to(dtype)
    x, target = (torch.randn(2, 24, WIDTH.get(name, 12), dtype=dtype) for _ in range(2))
    segments = None if rows is None else Segments.of(torch.tensor(rows, dtype=torch.int32))

    whole = x.clone().requires_grad_()
    expected, whole_state = layer(whole, None, segments)
    loss = (expected - target).square().sum()
    loss.backward()
    gradients = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}

    layer.zero_grad(set_to_none=True)
    with ContextParallel(mesh, layout, segments, **MODES[mode]) as cp:
        own = cp.shard(x).requires_grad_()
        y, state = layer(own)
        own_loss = (y - cp.shard(target)).square().sum()
        own_loss.backward()
        cp.sum_gradients(layer.parameters())
    distributed.all_reduce(own_loss.detach())

    def check(quantity, got, reference):
        error = float((got - reference).norm() / reference.norm().clamp(min=1e-3))
        assert error <= tolerance, f"{what}: {quantity} is off by {error:.1e}"

    check("loss", own_loss.detach(), loss.detach())
    check("y", y.detach(), cp.shard(expected.detach()))
    check("y", cp.unshard(y), expected.detach())
    check("gradient of x", own.grad, cp.shard(whole.grad))
    for parameter, gradient in gradients.items():
        check(f"gradient of {parameter}", layer.get_parameter(parameter).grad, gradient)
    last = distributed.get_rank() == (distributed.get_world_size() - 1 if layout == "contiguous" else 0)
    if mode != "ring" and rows is None and last:
        more = torch.randn_like(x[:, :3])
        state = state.take(torch.arange(2) + (0 if layout == "contiguous" else 2))  # after the last part of each row
        check("continued", *(layer(more, after.detach())[0].detach() for after in (state, whole_state)))
    assert gradients.keys() == {n for n, p in layer.named_parameters() if p.grad is not None}, what


def train_without_host_reads(name: str, world: int, layouts: Sequence[str]) -> None:
    """Train for two steps; in the second, the code around the ops must neither read from the device nor copy to it.

    The first layout is for the mode "gather", the second for a ring or two phases.
    """
    layer = LAYERS[name]()
    for layout, mode in zip(layouts, ("gather", "ring" if name in RINGS else "two-phase"), strict=True):
        with ContextParallel(init_device_mesh("cpu", (world,)), layout, **MODES[mode]) as cp:
            own = cp.shard(torch.randn(2, 24, WIDTH.get(name, 12)))
            layer(own)[0].sum().backward()
            read = patch("kalmix.ops._shared.isolation._all_finite", lambda _: False)  # a shortcut on CPUs only
            copy = patch("torch.tensor", side_effect=AssertionError("a CUDA graph would repeat this copy"))
            with NoHostReads(), checks(False), read, copy:
                layer(own)[0].sum().backward()


def sum_gradients_of_one_rank(rank: int, world: int) -> None:
    """Check sums of gradients that only one rank has, and that no rank has."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 2, 4)]
    loss = 2 * parameters[0].sum() if rank == 0 else 3 * parameters[1].sum()
    with ContextParallel(init_device_mesh("cpu", (world,))) as cp:
        loss.backward()
        cp.sum_gradients(x for x in parameters)
    assert parameters[0].grad.tolist() == [2.0] * 3
    assert parameters[1].grad.tolist() == [3.0 * (world - 1)] * 2
    assert parameters[2].grad is None


def compare_times(world: int) -> None:
    """Compare a layer in continuous time, with the times and horizons of tokens of this rank, and its variance."""
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    layer, x = AdaptiveFilterAttention(12, heads=2).double(), torch.randn(2, 24, 12, dtype=torch.float64)
    times, horizon = torch.rand(2, 2, 24, dtype=torch.float64)
    segments = Segments.of(torch.tensor(PACKED))
    for layout in LAYOUTS:
        for given in (None, segments):
            later = times.cumsum(1)
            expected = layer.filter(x, None, given, variance=True, times=later, horizon=horizon)
            for attention in ATTENTION:
                with ContextParallel(mesh, layout, given, attention) as cp, torch.no_grad():
                    own = {"times": cp.shard(later), "horizon": cp.shard(horizon)}
                    found = layer.filter(cp.shard(x), variance=True, **own)
                    for y, reference in zip(found[:2], expected[:2], strict=True):
                        torch.testing.assert_close(cp.unshard(y), reference)


def refuse(world: int) -> None:
    """Check what raises an error in a context, on every rank and before anyone waits."""
    mesh = init_device_mesh("cpu", (world,))
    layer, x = KLA(12, slots=4), torch.randn(1, 8, 12)
    _, state = layer(x)
    whole = Segments.whole(1, 8)
    with ContextParallel(mesh) as cp:
        with pytest.raises(RuntimeError, match="`RecurrentFilterAttention` cannot take part"):
            RecurrentFilterAttention(12)(x)
        with pytest.raises(ArgumentError, match="state"):
            layer(x, state)
        with pytest.raises(ArgumentError, match="Pass the segments of the whole sequences"):
            layer(x, None, whole)
        with pytest.raises(RuntimeError, match="call a layer"):
            layer.attention_map(x)
        with pytest.raises(RuntimeError, match="inside another"), cp:
            pass
    with pytest.raises(ArgumentError, match="an even number"), ContextParallel(mesh, "head-tail"):
        layer(x[:, :7])
    with pytest.raises(ArgumentError, match="at least 3"), ContextParallel(mesh, "head-tail"):
        layer(x[:, :4])
    with pytest.raises(ArgumentError, match="a multiple of 4"):
        ContextParallel(mesh, "head-tail").shard(x[:, :6])
    for rows in ([(0, 0, 9)], [(1, 0, 8)]):
        context = ContextParallel(mesh, segments=Segments.of(torch.tensor(rows)))
        with pytest.raises(ArgumentError, match="batch rows below 1 and at most 8 tokens"), context:
            layer(x[:, : 8 // world])
    with pytest.raises(ArgumentError, match="0 batch rows"), ContextParallel(mesh):
        layer(x[:0])
    with pytest.raises(ArgumentError, match="layout"):
        ContextParallel(mesh, "striped")
    with pytest.raises(ArgumentError, match="attention"):
        ContextParallel(mesh, attention="tree")
    with ContextParallel(mesh, attention="ring"):
        with pytest.raises(ArgumentError, match="None or 'chunked' inside a ring"):
            AdaptiveFilterAttention(12, heads=2, kernel="reference")(x)
        assert Attention(12, heads=2)(x)[1] is None
    with pytest.raises(ArgumentError, match="mesh"):
        ContextParallel(world)
    with pytest.raises(ArgumentError, match="one dimension"):
        ContextParallel(init_device_mesh("cpu", (1, world)))
    with pytest.raises(ArgumentError, match="segments"):
        ContextParallel(mesh, segments=[(0, 0, 8)])
    assert torch.equal(layer(x)[0], layer(x, None)[0])  # contexts have been left


def hybrid_model():
    """Return a hybrid language model, tokens, labels of next tokens, their number, and the expected gradients."""
    from kalmix.models import KalmixConfig, KalmixForCausalLM

    torch.manual_seed(0)
    layers = ["kla", {"mixer": "bayesian", "heads": 2}, {"mixer": "attention", "heads": 2}]
    model = (
        KalmixForCausalLM(KalmixConfig(vocab_size=17, hidden_size=16, layers=layers, initializer_range=0.5))
        .double()
        .train()
    )
    ids = torch.randint(17, (2, 16))
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    count = int((labels >= 0).sum())
    loss = model(input_ids=ids, shift_labels=labels, labels=ids, num_items_in_batch=count).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return model, (ids, labels, count), loss.detach(), gradients


def local_loss(model, cp, ids, labels, count):
    """Return the share of this rank in the mean loss."""
    own = cp.shard(ids)
    return model(input_ids=own, labels=own, shift_labels=cp.shard(labels), num_items_in_batch=count).loss


def compare_loss(loss, expected):
    total = loss.detach().clone()
    distributed.all_reduce(total)
    torch.testing.assert_close(total, expected)


def compare_model(world: int) -> None:
    """Compare loss and gradients of a model: alone, with gradient checkpointing, and with DDP."""
    mesh = init_device_mesh("cpu", (world,))
    model, data, expected, gradients = hybrid_model()
    for variant in ("sum_gradients", "checkpointing", "DistributedDataParallel", *MODES):
        model.zero_grad(set_to_none=True)
        if variant == "checkpointing":  # from here on
            model.gradient_checkpointing_enable()
        averages = variant == "DistributedDataParallel"
        with ContextParallel(mesh, "head-tail", **MODES.get(variant, {})) as cp:
            wrapped = DistributedDataParallel(model) if averages else model
            loss = local_loss(wrapped, cp, *data)
            (world * loss if averages else loss).backward()
            if not averages:
                cp.sum_gradients(model.parameters())
        compare_loss(loss, expected)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, gradients[name], msg=f"{variant}: {name}")


def compare_sharded_model(world: int) -> None:
    """Compare with FSDP2: parameters on all ranks, batch rows on half of the mesh, tokens on the other half."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "cp"))
    model, (ids, labels, count), expected, gradients = hybrid_model()
    every = mesh["dp", "cp"]._flatten("all")
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=every)
    row = slice(mesh["dp"].get_local_rank(), mesh["dp"].get_local_rank() + 1)
    with ContextParallel(mesh["cp"], "head-tail") as cp:
        loss = local_loss(model, cp, ids[row], labels[row], count)
        (world * loss).backward()
    compare_loss(loss, expected)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), gradients[name], msg=name)
