"""Calls of ops and of layer parts, on meta tensors, that together reach the branches of their launch rules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.filtering import lower
from kalmix.layers import fused
from kalmix.ops import OPS, ConjugateGradient, attend_radial
from kalmix.ops._dense.solve import MAX_WIDTH
from kalmix.ops._dense.triton.solve import solve
from kalmix.segments import segments_without_checks
from kalmix.testing.cases import PROBLEMS, Case
from kalmix_bench.perf.gpu_steps import STEPS

DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((2, 256), (128, 256), (2, 32), (8, 2048))  # sequences and tokens; the first two are the core
FEATURE_WIDTH = 128  # width at which features and options are varied, one by one
ABSENT = {
    "additive": ("log_decay", "gain"),
    "delta": ("log_decay",),
    "dense": ("log_decay",),
    "ridge": ("log_decay", "gain", "mix"),
}  # signals that a call may lack
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "attend": ({"causal": False}, {"weight": "exponential"}, {"window": 32}),
    "ridge": ({"solver": ConjugateGradient(10)},),
}
NormWidths = ((128, 128), (64, 512), (1024, 1024), (8192, 8192))  # columns normalised together, and of the weight


class OpCall(NamedTuple):
    """Call of a Triton kernel.

    Attributes:
        case: problem, dtype and sizes.
        packed: whether segments are given.
        variance: whether the variance is requested.
        absent: signal that is not given.
        options: further arguments of the op.
    """

    case: Case
    packed: bool = False
    variance: bool = False
    absent: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012 - never modified

    def __str__(self) -> str:
        x = self.case
        sizes = f"{x.name} {x.dtype} {x.sizes}"
        return f"{sizes} {'packed ' * self.packed}{'variance ' * self.variance}{'-' * bool(self.absent)}{self.absent}"

    def run(self) -> None:
        """Run the op, forward and backward, on meta tensors."""
        case, segments = self.case.with_changes(device="meta"), None
        if self.packed:
            segments = segments_without_checks(torch.empty(3, 3, dtype=torch.int32, device="meta"))
        with torch.device("meta"):
            inputs = case.inputs_from(_empty, None if segments is None else segments.count)
        inputs = {name: x.requires_grad_("times" not in name and x.is_floating_point()) for name, x in inputs.items()}
        arguments = case.arguments(inputs)
        belief, fixed = arguments.pop("belief"), {name: arguments.pop(name) for name in case.problem.options}
        arguments.pop("variance")
        q, k, v = (arguments.pop(name) for name in "qkv")
        signals = lower(case.problem.design, k, v, arguments) | fixed | self.options
        signals.pop(self.absent, None)
        if case.problem.design.has_variance:
            signals["variance"] = self.variance
        belief = belief if self.options.get("causal", True) else None
        result = OPS[case.op].function(q, k, v, **signals, belief=belief, segments=segments, kernel=case.kernel)
        _differentiate([result.mean, result.variance, *(result.belief or ())], list(inputs.values()))


def calls(widths: list[int], core: bool) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Return calls: the op, "fused", "solve" or "steps", a description, and a function that calls it on meta tensors.

    Args:
        widths: widths of keys and values.
        core: leave out short and long sequences, features and options.
    """
    for name in PROBLEMS:
        for call in _op_calls(name, widths, core):
            if call.case.unsupported_reason is None:
                yield call.case.op, str(call), call.run
    for width in widths:
        if width <= MAX_WIDTH:
            yield "solve", f"{width} unknowns", partial(_solve, width)
    for dtype in DTYPES:
        for part, functions in (("fused", FUSED), ("steps", STEPS)):
            for name, function in functions.items():
                yield part, f"{name} {dtype}", partial(function, dtype)


def _op_calls(name: str, widths: list[int], core: bool) -> Iterator[OpCall]:
    problem = PROBLEMS[name]
    base = Case(name, "triton", "cuda", torch.bfloat16, 2, 256, 2, 2, 64, 64)
    yield OpCall(base.with_changes(dtype=torch.float16))
    yield OpCall(base.with_changes(length=255, key_width=50, value_width=70))
    for dtype, width in itertools.product(DTYPES, widths):
        case = base.with_changes(dtype=dtype, key_width=width, value_width=width)
        for batch, length in SHAPES[:2] if core else SHAPES:
            yield OpCall(case.with_changes(batch=batch, length=length))
        if width != FEATURE_WIDTH:
            continue
        yield OpCall(case.with_changes(value_width=512))
        if problem.design.has_variance:
            yield OpCall(case, variance=True)
        if core:
            continue
        yield OpCall(case, packed=True)
        yield OpCall(case.with_changes(value_heads=4))
        for absent in ABSENT.get(problem.design.op, ()):
            yield OpCall(case, absent=absent)
        for options in OPTIONS.get(problem.design.op, ()):
            yield OpCall(case, options=options)


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float64)


def _differentiate(outputs: list[Tensor | None], inputs: list[Tensor]) -> None:
    total = sum(x.float().sum() for x in outputs if x is not None and x.requires_grad)
    assert isinstance(total, Tensor)
    torch.autograd.grad(total, [x for x in inputs if x.requires_grad], allow_unused=True)


def _draw(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes]


def _l2_normalize(dtype: torch.dtype) -> None:
    for width in (16, 64, 128, 256):
        x = _draw(dtype, (2, 64, 8, width))
        _differentiate([fused.l2_normalize(x[0])], x)


def _rms_norm(dtype: torch.dtype) -> None:
    for width, columns in NormWidths:
        x, gate, weight = _draw(dtype, (2, 64, columns), (2, 64, columns), (columns,))
        for chosen in (None, fused.Gate(gate), fused.Gate(gate, first=True)):
            _differentiate([fused.rms_norm(x, weight, fused.Norm(width, 1e-5), chosen)], [x, weight, gate])
        _differentiate([*fused.add_rms_norm(x, gate, weight, 1e-5)], [x, gate, weight])


def _gates(dtype: torch.dtype) -> None:
    x, z, scale, gate = _draw(dtype, (2, 64, 1024), (2, 64, 1024), (1024,), (2, 64, 1024))
    _differentiate([fused.swiglu(x)], [x])
    _differentiate([fused.gated_skip(x, z, scale, gate)], [x, z, scale, gate])


def _short_convolution(dtype: torch.dtype) -> None:
    for channels in (64, 3072):
        x, weight, bias, state = _draw(dtype, (2, 256, channels), (channels, 4), (channels,), (2, 3, channels))
        for activation in (None, "silu"):
            _differentiate([*fused.short_convolution(x, weight, bias, state, None, activation)], [x, weight, bias])
    for width in (16, 96, 128, 256):
        x, weight, state = _draw(dtype, (2, 256, 12 * width), (12 * width, 4), (2, 3, 12 * width))
        columns = fused.QueryKeyColumns(3 * width, fused.UnitNorm(width, width**-0.5))
        _differentiate([*fused.convolve_qkv(x, weight, None, state, None, "silu", columns)], [x, weight, state])


def _cross_entropy(dtype: torch.dtype) -> None:
    # On the CPU: the function disables autocast, which the device "meta" does not have.
    hidden, weight = (torch.zeros(n, 16, dtype=dtype, requires_grad=True) for n in (128, 32000))
    targets = torch.zeros(128, dtype=torch.int64)
    _differentiate([fused.linear_cross_entropy(hidden, weight, targets)], [hidden, weight])


def _attend_radial(dtype: torch.dtype) -> None:
    for length, width, options in itertools.product(
        (32, 256), (16, 64, 128), ({}, {"variance": True}, {"causal": False, "weight": "exponential", "window": 32})
    ):
        if width > 64 and dtype != torch.bfloat16:
            continue
        x = _draw(dtype, *[(2, length, 2, width)] * 3)
        log_decay, floor, frequency, *others = _draw(torch.float32, (2,), (2,), (2, width // 2), *[(2, 2)] * 5)
        names = ("process_noise", "key_noise", "query_noise", "nu", "temperature")
        given = {
            "log_decay": log_decay,
            "frequency": frequency,
            "floor": floor,
            **dict(zip(names, others, strict=True)),
        }
        result = attend_radial(*x, **given, **options, kernel="triton")
        _differentiate([*result[:2]], x)


def _robust_filter(dtype: torch.dtype) -> None:
    for width, iterations in itertools.product((16, 128, 512), (1, 3)):
        x = _draw(dtype, *[(2, 256, 2, width)] * 3)
        state = _draw(torch.float32, (2, 2, 2, width), (2, 1, 2, 1))
        time, params = torch.empty(2, 1, 1, 1, dtype=torch.float64, device="meta"), _draw(torch.float32, (6, 2))
        frequency = _draw(torch.float32, (2, width // 2))
        op = torch.ops.kalmix.recurrent_afa_triton.default
        for times in (None, torch.empty(2, 256, dtype=torch.float64, device="meta")):
            _differentiate([*op(*x, *state, time, *params, *frequency, times, None, iterations)[:2]], x)


def _solve(width: int) -> None:
    for columns in (width + 1, 3 * width):
        solve(*(torch.empty(6, width, n, dtype=torch.float64, device="meta") for n in (width, columns)))


def _signals(dtype: torch.dtype) -> None:
    x, step, raw = *_draw(torch.bfloat16, (2, 256, 1024), (2, 1, 1024)), *_draw(dtype, (2, 256, 1024))
    bias, log_rate = _draw(torch.float32, (128,), (128,))
    for sizes in ({"sigmoid": 6, "decay": 6}, {"decay": 8, "squared": 8, "sigmoid": 8}, {"decay-step": 128}):
        groups, leaves = [], [x]
        for kind, n in sizes.items():
            weight = _draw(dtype, (n, 1024))[0]
            groups.append(fused.HeadSignal(kind, weight, bias[:n], log_rate[:n] if "decay" in kind else None))
            leaves.append(weight)
        _differentiate(list(fused.head_signals(x, groups)), leaves)
        with torch.no_grad():
            fused.head_signals(step, groups)
    bias, log_rate = _draw(torch.float32, (1024,), (8,))
    _differentiate([fused.step_decay(raw, bias, log_rate)], [raw, bias, log_rate])
    logarithms = _draw(torch.float32, (2, 64), (2, 64), (2, 64))
    for hold in (False, True):
        _differentiate(list(fused.cell_dynamics(*logarithms, hold)), logarithms)


FUSED: dict[str, Callable[[torch.dtype], None]] = {
    "attend_radial": _attend_radial,
    "robust_filter": _robust_filter,
    "l2_normalize": _l2_normalize,
    "rms_norm": _rms_norm,
    "gates": _gates,
    "short_convolution": _short_convolution,
    "cross_entropy": _cross_entropy,
    "signals": _signals,
}
