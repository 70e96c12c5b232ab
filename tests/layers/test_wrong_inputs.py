"""Every layer and every design, given wrong tokens, states, segments and signals: one clear sentence, or an answer."""

from typing import Any

import pytest
import torch

import kalmix
from kalmix import ArgumentError, DesignError, KernelError, Segments, designs

from .conftest import LAYERS


def unclear(attempts):
    """Return what was raised that is neither ours nor one line, by attempt."""
    found = {}
    for what, attempt in attempts.items():
        try:
            attempt()
        except (ArgumentError, DesignError, KernelError) as error:
            if "\n" in str(error):
                found[what] = str(error)
        except Exception as error:
            found[what] = f"{type(error).__name__}: {error}"[:150]
    return found


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
    }
    states = {"a tensor": x, "a list": [], "a text": "x", "of fewer": state.take(torch.tensor([0]))}
    beyond = {"beyond the end": [0, 0, 9], "beyond the batch": [7, 0, 3]}
    segments = {"a tensor": x, "a list": [], "a text": "x", "a mask": torch.ones(2, 5)} | {
        what: Segments(torch.tensor([row], dtype=torch.int32)) for what, row in beyond.items()
    }
    found = unclear({f"x is {what}": lambda bad=bad: layer(bad) for what, bad in inputs.items()})
    found |= unclear({f"state is {what}": lambda bad=bad: layer(x, bad) for what, bad in states.items()})
    found |= unclear({f"segments is {what}": lambda bad=bad: layer(x, None, bad) for what, bad in segments.items()})
    assert not found, "\n".join(f"{what}: {said}" for what, said in found.items())


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
    attempts = {
        f"{name} is {what}": lambda name=name, bad=bad: run(design, x, x, x, **good | {name: bad})
        for name in (*design.signals, *design.optional)
        for what, bad in wrong.items()
    } | {
        f"{name} is a list": lambda name=name: run(design, **{"q": x, "k": x, "v": x} | {name: [1]} | good)
        for name in "qkv"
    }
    found = unclear(attempts)
    assert not found, "\n".join(f"{what}: {said}" for what, said in found.items())
