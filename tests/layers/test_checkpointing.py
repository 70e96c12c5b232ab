"""Gradient checkpointing (`torch.utils.checkpoint`, both modes) changes neither outputs nor gradients of any layer."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from kalmix import Segments
from kalmix.layers import MIXERS, FilterConv2d, GatedKalmaNet, Mixer
from kalmix.ops import Chebyshev, ConjugateGradient, Exact, Fixed

from .conftest import LAYERS, shake

LENGTH = 37  # more than a chunk of some layers, so that states pass between chunks
Function = Callable[[Tensor], tuple[Tensor, ...]]
MODES = {"plain": None, "reentrant": True, "not reentrant": False}


def results(module: nn.Module, x: Tensor, function: Function, mode: bool | None) -> list[Tensor]:
    """Return outputs, the gradient of `x` and the gradients of the parameters."""
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    found = function(leaf) if mode is None else checkpoint(function, leaf, use_reentrant=mode)
    smooth = [y for y in found if y.is_floating_point() and y.requires_grad]
    torch.stack([y.square().sum().float() for y in smooth]).sum().backward()
    parameters = [p.grad for p in module.parameters() if p.grad is not None]
    assert leaf.grad is not None
    return [*(y.detach() for y in found), leaf.grad, *parameters]


def check(module: nn.Module, x: Tensor, function: Function) -> None:
    want, *others = (results(module, x, function, mode) for mode in MODES.values())
    for got in others:
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def outputs(layer: Mixer, segments: Segments | None = None, state: object = None) -> Function:
    return lambda x: tuple(tree_leaves(layer(x, state, segments)))


def test_every_layer_is_tried():
    tried = {type(make()) for make in LAYERS.values()}
    assert {mixer for mixer in MIXERS.values() if mixer.__module__.startswith("kalmix.layers.")} == tried


@pytest.mark.parametrize("length", [3, LENGTH], ids=["few tokens", "many tokens"])
def test_checkpointing_changes_nothing(layer, length):
    check(layer, torch.randn(2, length, layer.hidden_size), outputs(layer))


def test_checkpointing_changes_nothing_for_packed_sequences(layer):
    before = layer(torch.randn(2, 5, layer.hidden_size))[1]
    state = tree_map(lambda x: x.detach(), before)
    segments = Segments.of(torch.tensor([[0, 2, 20], [0, 20, LENGTH]]))
    check(layer, torch.randn(1, LENGTH, layer.hidden_size), outputs(layer, segments, state))


@pytest.mark.parametrize("ridge", [0.1, Fixed(0.25)], ids=str)
@pytest.mark.parametrize(
    "solver", [Chebyshev(5), Chebyshev(5, backward="unrolled"), ConjugateGradient(5), Exact()], ids=str
)
def test_checkpointing_changes_nothing_for_any_solver(solver, ridge):
    torch.manual_seed(0)
    layer = GatedKalmaNet(12, heads=2, head_dim=3, ridge=ridge, solver=solver)
    shake(layer)
    for length in (3, LENGTH):
        check(layer, torch.randn(2, length, 12), outputs(layer))


def test_checkpointing_changes_nothing_for_images():
    torch.manual_seed(0)
    layer = FilterConv2d(3, 4, 3)
    shake(layer)
    check(layer, torch.randn(2, 3, 6, 5), lambda x: (layer(x),))
