"""Every layer and every design, given wrong tokens, states, segments and signals, raises a clear error or runs."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from unclear_errors import unclear

import kalmix
from kalmix import ArgumentError, Segments, designs

from .conftest import LAYERS


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_layers_name_wrong_inputs(name):
    layer: Any = LAYERS[name]().eval()
    x = torch.randn(2, 5, layer.hidden_size)
    state = layer(x)[1]
    inputs = {
        "none": None,
        "a list": [1],
        "integers": x.long(),
        "complex": x.to(torch.complex64),
        "one dimension less": x[0],
        "NaN": x * float("nan"),
        "no tokens": x[:, :0],
        "no rows": x[:0],
        "sparse": x.to_sparse(),
        "of another dtype": x.double(),
        "on another device": x.to("meta"),
    }
    states = {"a tensor": x, "a list": [], "a text": "x", "of fewer": state.take(torch.tensor([0]))}
    states["of nothing"] = type(state)(*[None] * len(state))
    beyond = {"beyond the end": [0, 0, 9], "beyond the batch": [7, 0, 3]}
    segments = {"a tensor": x, "a list": [], "a text": "x", "a mask": torch.ones(2, 5)} | {
        what: Segments(torch.tensor([row], dtype=torch.int32)) for what, row in beyond.items()
    }
    attempts = [(f"x is {what}", partial(layer, bad)) for what, bad in inputs.items()]
    attempts += [(f"state is {what}", partial(layer, x, bad)) for what, bad in states.items()]
    attempts += [(f"segments is {what}", partial(layer, x, None, bad)) for what, bad in segments.items()]
    found = unclear(attempts)
    assert not found, found


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_layers_refuse_states_that_lack_a_field(name):
    layer: Any = LAYERS[name]().eval()
    x = torch.randn(2, 5, layer.hidden_size)
    state = layer(x)[1]
    for field in state._fields:
        with pytest.raises(ArgumentError, match=f"`state` lacks {field}"):
            layer(x, state._replace(**{field: None}))


def resized(leaf: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensor as complex, with fewer or more axes, and with axes of other sizes (1 could be broadcast)."""
    found = [("complex", leaf.to(torch.complex64)), ("without an axis", leaf[0]), ("with a further axis", leaf[None])]
    for axis in range(leaf.ndim):
        grown = torch.cat([leaf, leaf.new_ones([*leaf.shape[:axis], 1, *leaf.shape[axis + 1 :]])], axis)
        sizes = {0, 1, leaf.shape[axis] + 1} - {leaf.shape[axis]}
        found += [(f"axis {axis} of {size}", grown.narrow(axis, 0, size)) for size in sizes]
    return found


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_layers_refuse_states_of_another_shape(name):
    layer: Any = LAYERS[name]().eval()
    x = torch.randn(2, 5, layer.hidden_size)
    leaves, tree = tree_flatten(layer(x)[1])
    for segments in (None, Segments.whole(2, 5, x.device)):
        layer(x, tree_unflatten(leaves, tree), segments)
        for number, leaf in enumerate(leaves):
            for what, wrong in resized(leaf):
                state = tree_unflatten([*leaves[:number], wrong, *leaves[number + 1 :]], tree)
                with pytest.raises(ArgumentError, match=r"`(state|belief)"):
                    layer(x, state, segments)
                    pytest.fail(f"tensor {number} {what} is accepted")


@pytest.mark.parametrize("design", designs.CATALOGUE.values(), ids=lambda design: design.name)
def test_designs_name_wrong_signals(design):
    run: Any = kalmix.filter
    x, good = torch.rand(1, 4, 1, 2), {name: torch.rand(1, 4, 1) + 0.1 for name in design.signals}
    wrong = {
        "a list": [1],
        "a text": "x",
        "a number": 1.0,
        "integers": torch.ones(1, 4, 1).long(),
        "no dimensions": torch.tensor(1.0),
        "complex": torch.ones(1, 4, 1, dtype=torch.complex64),
    }
    valid = {"q": x, "k": x, "v": x} | good
    attempts = [
        (f"{name} is {what}", partial(run, design, **valid | {name: bad}))
        for name in (*design.signals, *design.optional)
        for what, bad in wrong.items()
    ] + [(f"{name} is a list", partial(run, design, **valid | {name: [1]})) for name in "qkv"]
    found = unclear(attempts)
    assert not found, found
