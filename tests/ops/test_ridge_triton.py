"""Tests of the Triton kernels of `ridge`: tile boundaries, widths, absent signals and stored tensors.

Without a GPU, kernels run in Triton's interpreter at small sizes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from agreement import check_agreement
from launch_log import log_launches

from kalmix.beliefs import RidgeBelief
from kalmix.ops import Adaptive, Chebyshev, ConjugateGradient, Fixed, ridge
from kalmix.ops._ridge import custom_op as fused
from kalmix.ops._ridge import reference
from kalmix.ops._ridge.signals import RidgeSignals
from kalmix.ops._ridge.triton import backward as triton_backward
from kalmix.segments import Segments
from kalmix.testing.heads import draw_weights
from kalmix.testing.tolerances import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16
NAMES = ("q", "k", "v", "log_decay", "gain", "mix", "cross", "gram")
OUTPUTS = {"variance": 2, "cross": 1, "gram": 1, "mean": 2}  # axis of the heads
CONVERGED = {Adaptive(0.5): Chebyshev(14), Adaptive(0.02): Chebyshev(60), Fixed(0.25): Chebyshev(40)}
CONVERGED |= {Adaptive(0.3): ConjugateGradient(20)}


def arguments(
    batch: int,
    length: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    without: tuple[str, ...] = (),
    sequences: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Return random signals and a prior, by name."""
    draw = torch.Generator().manual_seed(0)
    (key_heads, value_heads), (width, values) = heads, widths

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    q, k = (torch.nn.functional.normalize(normal(batch, length, key_heads, width), dim=-1) for _ in range(2))
    tokens, belief = (batch, length, value_heads), (batch if sequences is None else sequences, value_heads, width)
    root = normal(*belief, width) / width
    inputs = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": normal(*tokens, values).to(dtype),
        "log_decay": -0.1 * normal(*tokens).exp(),
        "gain": normal(*tokens).sigmoid(),
        "mix": normal(*tokens).sigmoid(),
        "cross": normal(*belief, values) / width,
        "gram": root @ root.mT,
    }
    return {name: x.to(DEVICE) for name, x in inputs.items() if name not in without}


def answer(
    function: Any, segments: Segments | None, strength: Any, inputs: dict[str, Tensor], count: int = 1
) -> list[Tensor]:
    """Return outputs, and gradients of their weighted sum; `count` problems have joined heads."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    *signals, cross, gram = (leaves.get(name) for name in NAMES)
    assert cross is not None and gram is not None
    belief = RidgeBelief(cross, (gram + gram.mT) / 2)
    result = function(RidgeSignals(*signals), belief, segments, True, strength, CONVERGED[strength])
    outputs = [result.variance, *result.belief, result.mean]
    weights = draw_weights(outputs, [*OUTPUTS.values()], count)
    return [x.detach() for x in outputs] + list(torch.autograd.grad(outputs, list(leaves.values()), weights))


SPANS = Segments.of(torch.tensor([[0, 3, 30], [1, 0, 9], [0, 30, 36], [1, 20, 20], [1, 21, 38]]))
LONG_SPANS = Segments.of(torch.tensor([[0, 3, 203], [1, 0, 10], [0, 203, 236], [1, 50, 50], [1, 60, 240]]))
STRONG, USUAL, MESA, CONJUGATE = Adaptive(0.5), Adaptive(0.02), Fixed(0.25), Adaptive(0.3)
SHAPES = [  # batch, tokens, (key heads, value heads), (key, value width), absent signals, segments, ridge, dtype
    (1, 37, (1, 2), (3, 5), (), None, STRONG, torch.float32),  # three tiles, the last one partial; shared keys
    (2, 38, (1, 1), (4, 3), ("mix", "log_decay"), SPANS, STRONG, torch.float32),
    (1, 18, (1, 1), (17, 16), ("gain",), None, STRONG, HALF),
    (1, 18, (1, 1), (17, 16), ("mix",), None, CONJUGATE, HALF),
    (1, 18, (1, 1), (5, 4), (), None, CONJUGATE, torch.float32),
    (1, 18, (1, 1), (5, 4), ("gain", "mix", "log_decay"), None, MESA, torch.float32),
]
ON_GPU = [
    (2, 300, (heads, 2), (width, values), without, segments, strength, dtype)
    for dtype in (HALF, torch.float32)
    for width, values in ((16, 16), (32, 48), (40, 40), (64, 64), (96, 128), (128, 128), (200, 128), (256, 256))
    for heads, without, segments, strength in (
        (2, (), None, USUAL),
        (1, (), LONG_SPANS, MESA),
        (2, ("mix", "gain", "log_decay"), None, USUAL),
        (2, ("mix",), None, CONJUGATE),
    )
    if width <= 128 or dtype == HALF
]


@pytest.mark.parametrize("shape", SHAPES + ON_GPU if DEVICE == "cuda" else SHAPES, ids=str)
def test_triton_agrees_with_reference(shape: tuple[Any, ...]) -> None:
    """Outputs and gradients agree with the float64 reference, within the effect of rounding the inputs."""
    batch, length, heads, widths, without, segments, strength, dtype = shape
    inputs = arguments(batch, length, heads, widths, without, None if segments is None else segments.count, dtype)
    check_kernel(inputs, None if segments is None else Segments(segments.rows.to(DEVICE)), strength, dtype)


def test_strong_decay_of_one_token_keeps_precision_of_others() -> None:
    """Small log-decays keep their digits in sums with very large ones."""
    inputs = arguments(1, 18, (1, 1), (5, 4))
    inputs["log_decay"][:, [3, 9]] = -1e38
    check_kernel(inputs, None, STRONG, torch.float32)


def check_kernel(inputs: dict[str, Tensor], segments: Segments | None, strength: Any, dtype: torch.dtype) -> None:
    got, exactly = answer(fused.ridge, segments, strength, inputs), partial(answer, reference.ridge, segments, strength)
    axes = {name: OUTPUTS.get(name, 2) for name in inputs}  # the prior has the fields of the last belief
    check_agreement(got, exactly, inputs, axes, OUTPUTS, HALF if dtype == HALF else None)


def test_zero_keys_give_finite_results() -> None:
    inputs = arguments(1, 20, (1, 1), (4, 4))
    inputs["k"][:, :18] = 0
    inputs |= {name: torch.zeros_like(inputs[name]) for name in ("cross", "gram")}
    assert all(bool(torch.isfinite(x).all()) for x in answer(fused.ridge, None, USUAL, inputs))


@pytest.mark.skipif(DEVICE == "cuda", reason="logs launches without running them")
@pytest.mark.parametrize("segments", [None, SPANS], ids=["whole", "packed"])
def test_dry_run_compiles_every_launched_kernel(monkeypatch: pytest.MonkeyPatch, segments: Segments | None) -> None:
    log = log_launches(monkeypatch)
    monkeypatch.setattr(triton_backward, "launch_on_side_stream", lambda chain: chain.run() or (lambda: None))
    inputs = arguments(2, 38, (1, 2), (5, 4), sequences=None if segments is None else segments.count)
    *signals, cross, gram = (x.requires_grad_() for x in inputs.values())
    belief = RidgeBelief(cross, gram)
    fused.ridge(RidgeSignals(*signals), belief, segments, False, USUAL, Chebyshev(2)).mean.sum().backward()
    assert log[True] == log[False]
    assert len(log[True]) == (8 if segments is None else 10)  # two write the tables of tiles


def test_half_precision_reads_fewer_tokens_than_columns_accurately() -> None:
    """With a small ridge, x is far larger than its products with the keys."""
    draw = torch.Generator().manual_seed(0)
    signals = [torch.nn.functional.normalize(torch.randn(1, 8, 1, 32, generator=draw), dim=-1) for _ in range(2)]
    signals = [x.to(DEVICE, HALF) for x in (*signals, torch.randn(1, 8, 1, 2, generator=draw))]
    options = {"ridge": Adaptive(0.02), "solver": Chebyshev(60)}
    got = ridge(*signals, kernel="triton", **options).mean
    want = ridge(*(x.double() for x in signals), kernel="reference", **options).mean
    assert relative_error(got, want) < 2 * torch.finfo(HALF).eps


def test_strong_decay_with_large_gains_gives_right_gradients() -> None:
    """Directions of the adjoint's conjugate gradients are large then; their products must not overflow."""
    draw = torch.Generator().manual_seed(0)
    signals = [torch.randn(1, 15, 1, width, generator=draw, device="cpu") for width in (12, 12, 16)]
    gates = [torch.full((1, 15, 1), x) for x in (0.0, 6e3)]
    gates[0][:, [2, 4, 8, 11]] = -30.0
    options = {"ridge": Adaptive(0.1), "solver": ConjugateGradient(30)}
    found = []
    for kernel, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in (*signals, *gates)]
        q, k, v, log_decay, gain = leaves
        mean = ridge(q, k, v, log_decay=log_decay, gain=gain, kernel=kernel, **options).mean
        found.append(torch.autograd.grad(mean, leaves, (1e4 * mean).detach()))
    assert all(relative_error(got, want) < 1e-4 for got, want in zip(*found, strict=True))
