"""One compiled or exported graph of a layer serves every batch size and length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.export import Dim, export
from torch.utils._pytree import tree_leaves

from kalmix.layers import MIXERS, Mixer
from kalmix.layers.fused import dispatch
from kalmix.ops import OPS

WIDTH = 16
LENGTHS = (7, 16, 33, 64, 65, 100, 128, 200, 257, 300)
KINDS = ("kla", "bayesian", "gated-kalmanet", "gated-deltanet", "recurrent-afa")  # one for each kind of kernel
KINDS += ("attention", "mamba2", "kda", "rt-afa")  # and for each kind of layer


def each_layer(fast: tuple[str, ...]) -> Any:
    marks = {name: [] if name in fast else [pytest.mark.slow] for name in MIXERS}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in MIXERS])


def make_layer(name: str, **options: Any) -> Mixer:
    torch.manual_seed(0)
    return MIXERS[name](WIDTH, **({"design": "kla"} if name == "design" else {}), **options)


def has_triton_kernel(layer: type[Mixer]) -> bool:
    return layer.design is not None and any(kernel.triton for kernel in OPS[layer.design.op].kernels)


WITH_TRITON = [name for name, layer in MIXERS.items() if has_triton_kernel(layer)]


class Counting:
    """Compiler backend that counts graphs."""

    def __init__(self, backend: str) -> None:
        self.compile = torch._dynamo.lookup_backend(backend)
        self.graphs = 0

    def __call__(self, *graph_and_inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return self.compile(*graph_and_inputs)


def compiled(layer: Mixer, backend: str) -> tuple[Callable[..., Any], Counting]:
    torch.compiler.reset()
    counting = Counting(backend)
    return torch.compile(layer, backend=counting, fullgraph=True), counting


def inputs(count: int, length: int) -> Tensor:
    return torch.randn(count, length, WIDTH, generator=torch.Generator().manual_seed(length))


def agree(got: Tensor, expected: Tensor) -> None:
    largest = float(expected.abs().max()) if expected.numel() else 0.0  # some states are empty
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * (1 + largest))


@each_layer(("kla", "gated-deltanet", "recurrent-afa"))
def test_two_graphs_serve_all_lengths_and_batch_sizes(name):
    layer = make_layer(name)
    run, counting = compiled(layer, "eager")
    with torch.no_grad():
        for batch, length in zip((2, 3, 4, 5, 6) * 2, LENGTHS, strict=True):
            x = inputs(batch, length)
            agree(run(x)[0], layer(x)[0])
    assert counting.graphs <= 2


@each_layer(())
def test_two_graphs_serve_training_at_all_lengths(name):
    layer = make_layer(name)
    run, counting = compiled(layer, "aot_eager")
    for length in LENGTHS:
        x = inputs(2, length)
        got, expected = (_gradients(function, layer, x) for function in (run, layer))
        for ours, theirs in zip(got, expected, strict=True):
            agree(ours, theirs)
    assert counting.graphs <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_layers_train_with_dynamic_shapes_from_the_first_call(name):
    """Numbers of a module are inputs of such a graph, so functions of autograd must not read them."""
    layer = make_layer(name)
    torch.compiler.reset()
    run = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (7, 33, 100):
        x = inputs(2, length)
        got, expected = (_gradients(function, layer, x) for function in (run, layer))
        for ours, theirs in zip(got, expected, strict=True):
            agree(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KINDS if name in WITH_TRITON])
def test_two_graphs_serve_training_with_triton_at_all_lengths(name, monkeypatch):
    """Tensors are fake: they have shapes but no data, so that nothing is computed."""
    monkeypatch.setattr(dispatch, "DEVICES", ("cuda", "cpu"))
    with FakeTensorMode():
        with torch.device("cuda" if torch.cuda.is_available() else "cpu") as device:
            layer = make_layer(name, kernel="triton")
        run, counting = compiled(layer, "aot_eager")
        for batch, length in zip((2, 3, 4, 5, 6) * 2, (*LENGTHS[:-2], 1000, 4096), strict=True):
            run(torch.randn(batch, length, WIDTH, device=device))[0].sum().backward()
    assert counting.graphs <= 2


def _gradients(function: Callable[..., Any], layer: Mixer, x: Tensor) -> list[Tensor]:
    y, state = function(x)
    final = [z for z in tree_leaves(state) if z.requires_grad]
    loss = y.square().sum() + torch.stack([z.float().mean() for z in final]).sum()
    found = torch.autograd.grad(loss, list(layer.parameters()), allow_unused=True)
    return [torch.zeros(()) if z is None else z for z in found]


@each_layer(("gated-deltanet",))
def test_two_graphs_serve_decoding(name):
    """A graph is compiled for the first state, and one for states of other sizes or memory layouts."""
    layer = make_layer(name)
    run, counting = compiled(layer, "eager")
    with torch.no_grad():
        _, state = layer(inputs(2, 5))
        expected = state
        for step in range(6):
            x = inputs(2, step + 1)[:, -1:].contiguous()
            (y, state), (want, expected) = run(x, state), layer(x, expected)
            agree(y, want)
    assert counting.graphs <= 2


EXPORTED = [(name, False) for name in MIXERS] + [(name, True) for name in KINDS]
EXPORTED_FAST = [(name, False) for name in ("kla", "bayesian", "afa", "recurrent-afa")]


@pytest.mark.parametrize(
    ("name", "strict"), [pytest.param(*x, marks=() if x in EXPORTED_FAST else pytest.mark.slow) for x in EXPORTED]
)
def test_export_serves_all_batch_sizes_and_lengths(name, strict):
    layer = make_layer(name).eval()
    dynamic = ({0: Dim("batch"), 1: Dim("length")},)
    exported = export(layer, (inputs(2, 8),), dynamic_shapes=dynamic, strict=strict).module()
    with torch.no_grad():
        for batch, length in ((3, 21), (1, 100)):
            x = inputs(batch, length)
            (y, state), (expected, final) = exported(x), layer(x)
            agree(y, expected)
            for ours, theirs in zip(*map(tree_leaves, (state, final)), strict=True):
                agree(ours, theirs)


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x == "afa" else pytest.mark.slow) for x in WITH_TRITON])
def test_export_with_triton_adds_no_guard(name):
    """An exported program takes all lengths if its length has no range; on a CPU it would run in the interpreter."""
    layer = make_layer(name, kernel="triton").to("cuda" if torch.cuda.is_available() else "cpu")
    example = inputs(2, 8).to(next(layer.parameters()).device)
    exported = export(layer, (example,), dynamic_shapes=({0: Dim("batch"), 1: Dim("length")},), strict=False)
    assert {str(x) for x in exported.range_constraints.values()} == {"VR[0, int_oo]"}
