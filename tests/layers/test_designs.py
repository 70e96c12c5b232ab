"""Each published layer declares a design: its op calls equal `kalmix.filter` under that design."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import kalmix
from kalmix import designs, ops
from kalmix.designs import CATALOGUE, Design
from kalmix.layers import MIXERS, DeltaNet, DesignLayer, Mixer
from kalmix.types import Filtered

from .conftest import LAYERS, shake

NO_DESIGN = {
    "attention": "weighs values by how alike keys and queries are, and assumes no state",
    "rt-afa": "noise along a state and noise across it have variances of their own, which no `Evidence` says",
    "recurrent-afa": "weighs tokens inside a Kalman filter of its own, which is no op",
}
GIVEN_A_DESIGN = ("design",)  # calls `kalmix.filter`
CLOSE = {"rtol": 1e-9, "atol": 1e-12}  # float64: gains to noises and back, over a few tokens


class OpCall(NamedTuple):
    """Call of an op by a layer, with its output."""

    op: str
    tokens: tuple[Tensor, Tensor, Tensor]
    arguments: dict[str, Any]
    result: Filtered


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[OpCall]:
    """Record every op call."""
    made: list[OpCall] = []

    def recorded(name: str, function: Callable[..., Filtered]) -> Callable[..., Filtered]:
        def call(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Filtered:
            result = function(q, k, v, **arguments)
            made.append(OpCall(name, (q, k, v), arguments, result))
            return result

        return call

    for name in {row.op for row in CATALOGUE.values()}:
        monkeypatch.setattr(ops, name, recorded(name, getattr(ops, name)))
    return made


def signals(design: Design, call: OpCall) -> tuple[Tensor, dict[str, Any]]:
    """Return the values and signals of a design for which its op makes the same call: noises for gains.

    An additive gain above 1 (a long step of Mamba-2) is written as a gain of 1 of values larger by that factor.
    """
    (_, k, v), given = call.tokens, dict(call.arguments)
    gain = given.pop("gain", torch.ones(v.shape[:3], dtype=v.dtype))
    if design.op == "additive":
        scale = gain.clamp(min=1)
        noise = (scale / gain - 1).clamp(min=torch.finfo(torch.float32).tiny)
        return v * scale[..., None], given | {"obs_noise": noise, "write_variance": torch.ones_like(noise)}
    if design.op == "delta":
        square = k.square().sum(-1).repeat_interleave(v.shape[2] // k.shape[2], 2)
        return v, given | {"obs_noise": 1 / gain - square, "reset": torch.ones_like(gain)}
    if design.op == "ridge":
        return v, given | {"obs_noise": 1 / gain}
    return v, given


@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith("design-")])
def test_op_calls_equal_the_filter_of_the_declared_design(name: str, calls: list[OpCall]):
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    shake(layer)
    x = torch.randn(2, 7, layer.hidden_size, dtype=torch.float64)
    _, state = layer(x[:, :4])
    layer.filter(x[:, 4:], state, variance=True)
    if layer.design is None:
        assert isinstance(layer, tuple(MIXERS[name] for name in NO_DESIGN)) or layer.max_gain == 2
        return
    assert len(calls) >= 2
    for call in list(calls):
        assert call.op == layer.design.op
        v, given = signals(layer.design, call)
        got = kalmix.filter(layer.design, *call.tokens[:2], v, **given)
        for found, wanted in zip(tree_leaves(got), tree_leaves(call.result), strict=True):
            torch.testing.assert_close(found, wanted, **CLOSE)


def test_every_layer_declares_a_design_or_has_none():
    layers = {name: mixer for name, mixer in MIXERS.items() if mixer.__module__.startswith("kalmix.layers.")}
    undeclared = {name for name, mixer in layers.items() if mixer.design is None}
    assert undeclared == {*NO_DESIGN, *GIVEN_A_DESIGN}
    declared = {mixer.design.name for mixer in layers.values() if mixer.design is not None}
    assert declared == CATALOGUE.keys() - {"longhorn"}  # run by `DesignLayer`


def test_layers_outside_their_design_declare_none():
    assert DeltaNet(8, negative_eigenvalues=True).design is None  # no observation noise gives a gain of 2
    bare: Mixer = LAYERS["gated-kalmanet-bare"]()
    assert bare.design is not None and bare.design.transition == designs.Transition()
    assert DesignLayer(8, design="longhorn").design is designs.LONGHORN
