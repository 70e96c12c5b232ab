"""One compiled or exported graph of a layer serves every batch size and length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from kalmix.testing.laws import CountingBackend

WIDTH = 16
LENGTHS = (7, 16, 33, 64, 65, 100, 128, 200, 257, 300)
BATCHES = (2, 3, 4, 5, 6) * 2
# In these, functions of autograd are traced. They are trained with `dynamic=True`, others with dynamic inputs only.
ALL_DYNAMIC = ("gated-kalmanet", "recurrent-afa", "controlled-afa")
COVERED = {"afa": "controlled-afa", "deltanet": "gated-deltanet"}  # code of the second includes that of the first
TRAINED = [name for name in MIXERS if name not in COVERED]


def fast_and_slow(fast: tuple[str, ...], slow: Sequence[str]) -> list[Any]:
    return [*fast, *(pytest.param(name, marks=pytest.mark.slow) for name in slow if name not in fast)]


def make_layer(name: str, **options: Any) -> Mixer:
    torch.manual_seed(0)
    return MIXERS[name](WIDTH, **({"design": "kla"} if name == "design" else {}), **options)


def has_triton_kernel(layer: type[Mixer]) -> bool:
    return layer.design is not None and any(kernel.triton for kernel in OPS[layer.design.op].kernels)


WITH_TRITON = [name for name, layer in MIXERS.items() if has_triton_kernel(layer)]


def compiled(layer: Mixer, backend: str, dynamic: bool | None = None) -> tuple[Callable[..., Any], CountingBackend]:
    torch.compiler.reset()
    counting = CountingBackend(backend)
    return torch.compile(layer, backend=counting, fullgraph=True, dynamic=dynamic), counting


def inputs(count: int, length: int) -> Tensor:
    return torch.randn(count, length, WIDTH, generator=torch.Generator().manual_seed(length))


def agree(got: Tensor, expected: Tensor) -> None:
    largest = float(expected.abs().max()) if expected.numel() else 0.0  # some states are empty
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * (1 + largest))


INFERENCE = ("gated-deltanet", "recurrent-afa", "bayesian", "gated-kalmanet", "linear-attention", "afa")


@pytest.mark.parametrize("name", fast_and_slow(("kla",), INFERENCE))
@pytest.mark.slow
def test_two_graphs_serve_inference_at_all_lengths_and_batch_sizes(name):
    layer = make_layer(name)
    run, counting = compiled(layer, "eager")
    with torch.no_grad():
        for batch, length in zip(BATCHES, LENGTHS, strict=True):
            x = inputs(batch, length)
            agree(run(x)[0], layer(x)[0])
    assert counting.graphs <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_one_dynamic_graph_serves_training_at_all_lengths_and_batch_sizes(name):
    """With `dynamic=True`, numbers of a module are inputs of the graph, so functions of autograd must not read them."""
    layer, graphs = make_layer(name), []
    batches = [inputs(*sizes) for sizes in zip(BATCHES, LENGTHS, strict=True)]
    run, counting = compiled(layer, "aot_eager", dynamic=True if name in ALL_DYNAMIC else None)
    if name not in ALL_DYNAMIC:
        torch._dynamo.mark_dynamic(batches[0], [0, 1])
    for x in batches:
        got, expected = (_gradients(function, layer, x) for function in (run, layer))
        for ours, theirs in zip(got, expected, strict=True):
            agree(ours, theirs)
        graphs.append(counting.graphs)
    # With `dynamic=True`, PyTorch compiles twice in the first call: again when it knows which numbers are constant.
    assert graphs[0] <= (2 if name in ALL_DYNAMIC else 1) and graphs[-1] == graphs[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kla", "bayesian", "gated-kalmanet", "gated-deltanet", "mamba2"])  # one for each op
def test_two_graphs_serve_training_with_triton_at_all_lengths(name, monkeypatch):
    """Tensors are fake: they have shapes but no data, so that nothing is computed."""
    monkeypatch.setattr(dispatch, "DEVICES", ("cuda", "cpu"))
    with FakeTensorMode():
        with torch.device("cuda" if torch.cuda.is_available() else "cpu") as device:
            layer = make_layer(name, kernel="triton")
        run, counting = compiled(layer, "aot_eager")
        for batch, length in zip(BATCHES, (*LENGTHS[:-2], 1000, 4096), strict=True):
            run(torch.randn(batch, length, WIDTH, device=device))[0].sum().backward()
    assert counting.graphs <= 2


def _gradients(function: Callable[..., Any], layer: Mixer, x: Tensor) -> list[Tensor]:
    y, state = function(x)
    final = [z for z in tree_leaves(state) if z.requires_grad]
    loss = y.square().sum() + torch.stack([z.float().mean() for z in final]).sum()
    found = torch.autograd.grad(loss, list(layer.parameters()), allow_unused=True)
    return [torch.zeros(()) if z is None else z for z in found]


@pytest.mark.parametrize("name", fast_and_slow(("gated-deltanet",), TRAINED))
@pytest.mark.slow
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


STRICT = ("kla", "recurrent-afa", "attention")  # traced by the compiler, as the tests above
EXPORTED = [(name, False) for name in MIXERS] + [(name, True) for name in STRICT]
EXPORTED_FAST = [(name, False) for name in ("kla", "recurrent-afa")]


@pytest.mark.parametrize(
    ("name", "strict"), [pytest.param(*x, marks=() if x in EXPORTED_FAST else pytest.mark.slow) for x in EXPORTED]
)
@pytest.mark.slow
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
@pytest.mark.slow
def test_export_with_triton_adds_no_guard(name):
    """An exported program takes all lengths if its length has no range; on a CPU it would run in the interpreter."""
    layer = make_layer(name, kernel="triton").to("cuda" if torch.cuda.is_available() else "cpu")
    example = inputs(2, 8).to(next(layer.parameters()).device)
    exported = export(layer, (example,), dynamic_shapes=({0: Dim("batch"), 1: Dim("length")},), strict=False)
    assert {str(x) for x in exported.range_constraints.values()} == {"VR[0, int_oo]"}
