"""Every argument of every op with wrong values: an error of one sentence, or a result of the right shape."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from unclear_errors import unclear

from kalmix import ArgumentError, Segments, ops
from kalmix.ops import experimental
from kalmix.types import Filtered

B, T, H, G, K, V = 2, 5, 1, 2, 4, 4
GAUSS = {"log_decay": (H,), "frequency": (H, K // 2), "process_noise": (H,), "key_noise": (H,), "query_noise": (H,)}


def draw(**shapes):
    """Return random positive signals; log-decays are negative."""
    torch.manual_seed(0)
    return {name: -torch.rand(*x) if name == "log_decay" else 0.1 + 0.8 * torch.rand(*x) for name, x in shapes.items()}


TOKENS = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, G, V)}
ALIKE = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, H, K)}
CELLS = {"precision": (B, T, G, V), "log_decay": (G, K, V), "process_noise": (G, K, V)}
# Valid arguments of each op: tensors by shape, then options.
CALLS = {
    "additive": (TOKENS | {"log_decay": (B, T, G), "gain": (B, T, G)}, {"kernel": None}),
    "delta": (TOKENS | {"log_decay": (B, T, G), "gain": (B, T, G)}, {"kernel": None}),
    "diagonal": (TOKENS | CELLS, {"variance": True, "kernel": None}),
    "diagonal_matrix": (TOKENS | CELLS, {"belief": None}),
    "diagonal_fft": (TOKENS | {"k": (H, K), "precision": (B, T, G, V), "log_decay": (G, K, V)}, {}),
    "dense": (
        TOKENS | {"log_decay": (B, T, G), "obs_noise": (B, T, G), "process_noise": (B, T, G)},
        {"variance": True, "kernel": None},
    ),
    "ridge": (
        TOKENS | {"log_decay": (B, T, G), "gain": (B, T, G), "mix": (B, T, G)},
        {"ridge": 0.1, "solver": ops.Chebyshev(5), "variance": True, "kernel": None},
    ),
    "attend": (
        TOKENS | GAUSS | {"times": (B, T)},
        {"nu": 1.0, "temperature": 1.0, "weight": "rational", "window": 3, "floor": 0.0, "causal": True}
        | {"variance": True, "kernel": None, "value_dynamics": None},
    ),
    "attend_corotating": (
        TOKENS | {"direction": (B, T, G, V), "log_decay": (H,), "frequency": (H, K // 2)}
        | dict.fromkeys(("process_noise", "key_noise", "query_noise"), (H, 2)),
        {"nu": 1.0, "temperature": 1.0, "variance": True, "window": 3, "causal": True},
    ),
    "attend_radial": (
        ALIKE | {name: x if name == "frequency" else (*x, 2) for name, x in GAUSS.items() if name != "log_decay"}
        | {"log_decay": (H,)},
        {"window": 3, "causal": True, "variance": True, "weight": "rational"},
    ),
    "attend_channels": (
        TOKENS | {name: x if name == "frequency" else (H, K // 2) for name, x in GAUSS.items()},
        {"window": 3, "causal": True, "variance": True, "weight": "rational"},
    ),
    "attend_separable": (
        {"v": (B, T, H, K), "frequency": (H, K // 2)}
        | dict.fromkeys(("log_decay", "process_noise", "key_noise", "query_noise"), (H, K // 2)),
        {},
    ),
}  # fmt: skip
TIMED = ("times",)  # must not decrease


def function(op):
    return getattr(ops if hasattr(ops, op) else experimental, op)


def call(op, changes):
    shapes, options = CALLS[op]
    given = draw(**shapes) | options | changes
    for name in TIMED:
        if name in shapes and name not in changes:
            given[name] = torch.arange(T, dtype=torch.float64).expand(B, T)
    return function(op)(**given)


def wrong_tensors(x):
    """Yield wrong values for a tensor argument."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)
    return {
        "none": None,
        "a number": 3.0,
        "a list": x.tolist(),
        "a text": "x",
        "an array": x.numpy(),
        "one dimension less": x[0],
        "one dimension more": x[None],
        "no dimensions": torch.tensor(1.0),
        "one more in the last": torch.cat([x, x[..., :1]], -1),
        "empty": x[..., :0],
        "complex": x.to(torch.complex64),
        "int64": x.long(),
        "bool": x > 0,
        "float8": x.to(torch.float8_e5m2),
        "quantized": quantized,
        "half": x.half(),
        "double": x.double(),
        "on meta": x.to("meta"),
        "sparse": x.to_sparse(),
        "NaN": torch.full_like(x, float("nan")),
        "infinite": torch.full_like(x, float("inf")),
        "a class": torch.Tensor,
    }


OPTIONS = {
    "a text": "x",
    "a list": [1],
    "an empty list": [],
    "a mapping": {},
    "negative": -1,
    "zero": 0,
    "a fraction": 0.5,
    "NaN": float("nan"),
    "infinite": float("inf"),
    "huge": 10**30,
    "an object": object(),
    "an integer tensor": torch.tensor([1, 2]),
    "an array": np.ones(3),
    "a class": int,
    "none": None,
}
ALWAYS = {  # options of most ops
    "belief": ("a tensor", "a list", "a text", "a number", "another belief", "a belief of a list"),
    "segments": ("a tensor", "a list", "a text", "a number", "beyond"),
}
VALUES = {
    "a tensor": torch.zeros(B, G, K, V),
    "a list": [],
    "a text": "x",
    "a number": 3,
    "another belief": Filtered(torch.zeros(1), None, None),
    "beyond": Segments(torch.tensor([[0, 0, 9]], dtype=torch.int32)),
}


def attempts(op):
    shapes, options = CALLS[op]
    whole = draw(**shapes)
    for name, x in whole.items():
        yield from ((f"{name} is {what}", {name: bad}) for what, bad in wrong_tensors(x).items())
    for name in options:
        yield from ((f"{name} is {what}", {name: bad}) for what, bad in OPTIONS.items())
    if op not in ("diagonal_fft", "attend_separable"):
        yield from ((f"belief is {what}", {"belief": VALUES[what]}) for what in ALWAYS["belief"] if what in VALUES)
    if op not in ("diagonal_fft", "diagonal_matrix", "attend_separable"):
        yield from ((f"segments is {what}", {"segments": VALUES[what]}) for what in ALWAYS["segments"])


@pytest.mark.parametrize("op", CALLS)
@torch.no_grad()
def test_errors_name_the_wrong_argument(op):
    call(op, {})
    found = unclear((what, partial(call, op, changes)) for what, changes in attempts(op))
    assert not found, found


@pytest.mark.parametrize("size", ["B", "T"])
@pytest.mark.parametrize("op", CALLS)
def test_empty_inputs_give_empty_outputs(op, size):
    shapes, options = CALLS[op]
    cut = {n: tuple(0 if i == "BT".index(size) and len(x) > 1 and x[:2] == (B, T) else y for i, y in enumerate(x))
           for n, x in shapes.items()}  # fmt: skip
    given = draw(**cut) | options
    if "times" in given:
        given["times"] = torch.zeros(cut["times"])
    answer = function(op)(**given)
    assert 0 in answer[0].shape


@pytest.mark.parametrize("name", ["rate", "lag"])
def test_kappa_raises_argument_errors(name):
    given = {"rate": torch.rand(3), "lag": torch.rand(2, 3)}
    wrong = wrong_tensors(given[name]).items()
    assert not unclear((what, partial(ops.kappa, **given | {name: bad})) for what, bad in wrong)
    for bad in (-given[name], given[name] * float("nan"), torch.rand(4), 0.5):
        with pytest.raises(ArgumentError, match=name):
            ops.kappa(**given | {name: bad})
