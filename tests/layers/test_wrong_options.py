"""Every option of every layer, given wrong values of every kind, raises a clear error or gives a finite output."""

import inspect
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from unclear_errors import unclear

from kalmix import ArgumentError
from kalmix.layers import MIXERS

WRONG = {
    "a text": "x",
    "a list": [1],
    "a mapping": {},
    "negative": -1,
    "zero": 0,
    "a fraction": 0.5,
    "NaN": float("nan"),
    "infinite": float("inf"),
    "huge": 10**30,
    "an object": object(),
    "a tensor": torch.tensor([1, 2]),
    "an array": np.ones(3),
    "none": None,
    "true": True,
    "a class": int,
}
NEEDED: dict[str, dict[str, Any]] = {"design": {"design": "longhorn"}}


@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_wrong_options_are_named(name):
    x = torch.randn(1, 3, 16)

    def attempt(option, value):
        layer = MIXERS[name](**{"hidden_size": 16} | NEEDED.get(name, {}) | {option: value})
        assert layer(x)[0].isfinite().all(), "the output is not finite"

    options = inspect.signature(MIXERS[name]).parameters
    found = unclear(
        (f"{option} is {what}", partial(attempt, option, value)) for option in options for what, value in WRONG.items()
    )
    assert not found, found


@pytest.mark.parametrize(
    "name", [name for name, mixer in MIXERS.items() if "kernel" in inspect.signature(mixer).parameters]
)
def test_unknown_kernels_are_refused_when_a_layer_is_built(name):
    options = NEEDED.get(name, {}) | {"kernel": "fast"}
    with pytest.raises(ArgumentError, match=r"`kernel` is 'fast'; expected .*'reference'"):
        MIXERS[name](16, **options)
    MIXERS[name](16, **options | {"kernel": "reference"})


def test_unknown_kernels_are_refused_in_a_configuration():
    with pytest.raises(ArgumentError, match="`kernel` is 'fast'"):
        MIXERS["kla"].check_options("kla", {"kernel": "fast"})
