"""Every option of every layer, given every kind of wrong value: one clear sentence, or a layer with a finite output."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from kalmix import ArgumentError, DesignError, KernelError
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
    unclear, x = {}, torch.randn(1, 3, 16)
    for option in inspect.signature(MIXERS[name]).parameters:
        for what, value in WRONG.items():
            try:
                layer = MIXERS[name](**{"hidden_size": 16} | NEEDED.get(name, {}) | {option: value})
                if not layer(x)[0].isfinite().all():
                    unclear[f"{option} is {what}"] = "its output is not finite"
            except (ArgumentError, DesignError, KernelError) as error:
                if "\n" in str(error) or len(str(error)) > 500:
                    unclear[f"{option} is {what}"] = str(error)
            except Exception as error:
                unclear[f"{option} is {what}"] = f"{type(error).__name__}: {error}"[:150]
    assert not unclear, "\n".join(f"{what}: {said}" for what, said in unclear.items())
