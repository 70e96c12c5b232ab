"""Every op registered under `torch.ops.kalmix` passes `torch.library.opcheck`: schema, fake kernel, autograd, AOT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kalmix import ops
from kalmix.layers import MIXERS
from kalmix.testing.cases import PROBLEMS, Case, outputs
from kalmix.testing.measure import differentiable

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
CASES = {  # a call that runs each op, forward and backward
    "additive_chunked": ("additive-keys", "chunked"),
    "attend_chunked": ("attend", "chunked"),
    "attend_segment_slots": ("attend-window", "triton"),
    "attend_triton": ("attend", "triton"),
    "delta_chunked": ("delta-keys", "chunked"),
    "dense_chunked": ("dense-turning", "chunked"),
    "dense_triton": ("dense", "triton"),
    "diagonal_chunked": ("diagonal", "chunked"),
    "diagonal_triton": ("diagonal", "triton"),
    "memory_triton": ("delta-keys", "triton"),
    "ridge_chunked": ("ridge", "chunked"),
    "ridge_triton": ("ridge", "triton"),
}
WITHOUT_BACKWARD = {"attend_segment_slots", "ridge_chunked"}
GRADIENTS_IN_FORWARD = {"linear_cross_entropy"}
GRADIENTS_BY_ITSELF = {"solve"}  # its backward pass calls the op again
WITHOUT_AOT = ("test_schema", "test_autograd_registration", "test_faketensor")


def head() -> tuple[Tensor, ...]:
    """Return hidden states, weight and bias of an output head."""
    return torch.randn(2, 3, 4), torch.randn(7, 4), torch.randn(7)


NO_GRADIENTS = {  # op without gradients -> its arguments
    "rotary_frequencies": lambda: (3, 1e4, torch.device(DEVICES[-1])),
    "linear_nll": lambda: (*head(), torch.tensor([[3, -100, 6], [0, 2, 2]]), torch.float32, 2.0),
}


def radial() -> tuple[Any, ...]:
    """Return arguments of the Triton kernel of `attend_radial`."""
    times, rank = torch.arange(5).double().expand(2, 5), torch.arange(5).expand(2, 5)
    tensors = (*torch.randn(3, 2, 5, 2, 4), torch.randn(2, 2), times, rank, torch.rand(2, 12) + 0.1)
    return *tensors, True, True, 1 << 39, False, True, torch.float32, True


def robust_filter() -> tuple[Any, ...]:
    """Return arguments of the Triton kernel of `recurrent-afa`."""
    state = torch.randn(3, 2, 2, 4), torch.rand(3, 1, 2, 1), torch.zeros(3, 1, 1, 1, dtype=torch.float64)
    times, rows = torch.arange(5).double().expand(2, 5), torch.tensor([[0, 0, 3], [0, 3, 5], [1, 0, 5]]).int()
    return *torch.randn(3, 2, 5, 2, 4), *state, torch.rand(6, 2) + 0.1, torch.randn(2, 2), times, rows, 2


def two_groups() -> tuple[Any, ...]:
    """Return arguments of the kernel of signals: decays with their steps, and gains."""
    weights, log_rate = (torch.randn(3, 4), torch.randn(2, 4), None), torch.randn(3)
    kinds = "decay-step,sigmoid,", 1.0, 2.0, 1.0, torch.bfloat16
    return torch.randn(2, 35, 4), *weights, torch.randn(3), None, None, log_rate, None, None, *kinds


def raw_parameters() -> tuple[Any, ...]:
    """Return parameters of AFA's dynamics and weights, floors of variances, and channels."""
    heads = [torch.randn(2) for _ in range(8)]
    return *heads[:5], torch.randn(2, 3), *heads[5:], 1e-3, 1e-2, 0.1, 5


FUSED = {  # parts of layers and of updates: arguments of the op
    "head_signals": two_groups,
    "step_decay": lambda: (torch.randn(2, 5, 6), torch.randn(6), torch.randn(3)),
    "cell_dynamics": lambda: (torch.randn(2, 6), torch.randn(2, 6), torch.randn(2, 6), False),
    "attend_radial_triton": radial,
    "recurrent_afa_triton": robust_filter,
    "positive": lambda: (torch.randn(2, 3),),
    "l2_normalize": lambda: (torch.randn(2, 5, 3, 4), 0.5, 1e-6, False),
    "short_convolution": lambda: (
        *(torch.randn(2, 5, 6), torch.randn(6, 4), torch.randn(6), torch.randn(3, 3, 6)),
        *(torch.tensor([[0, 0, 3], [0, 3, 5], [1, 0, 5]]).int(), torch.tensor([[0, 0, 0, 1, 1], [2] * 5]), "silu"),
        *(2, 2, 0.5, 1e-6, False),
    ),
    "gated_skip": lambda: (torch.randn(2, 5, 4), torch.randn(2, 5, 4), torch.randn(4), torch.randn(2, 5, 4).half()),
    "solve": lambda: (torch.randn(3, 5, 5).double(), torch.randn(3, 5, 4).double()),
    "softplus_precision": lambda: (torch.randn(2, 5, 4).half(), 1e-4),
    "swiglu": lambda: (torch.randn(2, 5, 6),),
    "add_rms_norm": lambda: (torch.randn(2, 5, 4).half(), torch.randn(2, 5, 4), torch.ones(4), 1e-6, torch.half),
    "linear_cross_entropy": lambda: (*head(), torch.tensor([[3, -100, 6], [0, 2, 2]]), torch.float32, [True] * 3),
    "linear_nll_carrier": lambda: (*head(), torch.tensor([[3, -100, 6], [0, 2, 2]]), torch.float32, 2.0, [True] * 3),
    "trajectory_parameters": raw_parameters,
    "rms_norm": lambda: (torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.ones(4), 4, 1e-6, "silu", False, torch.half),
}
RECOMPUTED = {"attend_radial": "rt-afa", "recurrent_afa": "recurrent-afa"}  # op -> layer that calls it if compiled


class Recorded(TorchDispatchMode):
    """Record the arguments of ops of kalmix that run inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        if func.namespace == "kalmix":
            self.calls.append((func, tree_map_only(Tensor, lambda x: x.detach().clone(), args)))
        return func(*args, **(kwargs or {}))


def _registered() -> set[str]:
    names = (name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("kalmix::"))
    return {name.split(".")[0] for name in names}


def test_every_registered_op_has_a_case():
    found = {name.removesuffix("_backward") for name in _registered()}
    assert found == {*CASES, *FUSED, *RECOMPUTED, *NO_GRADIENTS}
    without = {name for name in found if f"{name}_backward" not in _registered()}
    assert without == WITHOUT_BACKWARD | GRADIENTS_IN_FORWARD | GRADIENTS_BY_ITSELF | NO_GRADIENTS.keys()


def _check(op: Any, arguments: tuple[Any, ...], **options: Any) -> None:
    """Run opcheck on an op; if it has a backward pass, with gradients for all floating-point arguments.

    The check of AOT dispatch of an op also dispatches its backward pass, which therefore needs none by itself.
    """
    name = op._schema.name.split("::")[1]
    if name.endswith("_backward"):
        options = {"test_utils": WITHOUT_AOT} | options
    trains = name in GRADIENTS_IN_FORWARD | GRADIENTS_BY_ITSELF or f"{name}_backward" in _registered()
    given = tree_map_only(Tensor, lambda x: x.requires_grad_(trains and x.is_floating_point()), arguments)
    torch.library.opcheck(op, given, rtol=1e-4, atol=1e-4, **options)


TRIED = [
    pytest.param(name, device, packed, marks=[pytest.mark.slow] if kernel == "triton" and device == "cpu" else [])
    for name, (_, kernel) in CASES.items()
    for device in DEVICES
    if not (
        kernel == "triton" and device == "cpu" and torch.cuda.is_available()
    )  # the interpreter is off on machines with a GPU
    for packed in ((True,) if kernel == "triton" and device == "cpu" else (False, True))
    if packed or name != "attend_segment_slots"  # runs for packed sequences only
]


@pytest.mark.parametrize(("name", "device", "packed"), TRIED)
@pytest.mark.slow
def test_op_passes_opcheck(name, device, packed):
    problem, kernel = CASES[name]
    heads = {"key_heads": 2, "value_heads": 2 if kernel == "triton" else 4}  # an axis of size 1 hides a wrong stride
    case = Case(problem, kernel, device, **(PROBLEMS[problem].interpreted or {}) | heads | {"length": 5})
    # Every token is in a sequence, because tensors stored for the backward pass are uninitialized at other tokens.
    segments = case.segments([(0, 0, 3), (0, 3, 5), (1, 0, 5)]) if packed else None
    inputs = case.inputs(sequences=segments and segments.count)
    if packed:  # strides of the results must not depend on those of the inputs
        inputs = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in inputs.items()}
    leaves = {name: x.requires_grad_() for name, x in differentiable(inputs).items()}
    with Recorded() as recorded:
        found = outputs(case.run(inputs | leaves, segments))
        torch.stack([y.float().sum() for y in found if y.requires_grad]).sum().backward()
    calls = {op._schema.name.split("::")[1]: (op, arguments) for op, arguments in recorded.calls}
    for called in {name, f"{name}_backward"} - {f"{x}_backward" for x in WITHOUT_BACKWARD}:
        _check(*calls[called])


INTERPRETED = () if torch.cuda.is_available() else ("attend_radial_triton", "recurrent_afa_triton")
FUSED_CASES = [
    pytest.param(name, strided, marks=[pytest.mark.slow] if name in INTERPRETED else [])
    for name in FUSED
    for strided in (False, True)
]


@pytest.mark.parametrize(("name", "strided"), FUSED_CASES)
@pytest.mark.slow
def test_fused_op_passes_opcheck(name, strided):
    """Inputs of other strides, on which those of the results must not depend, are checked in the fake kernel alone."""
    given = tree_map_only(Tensor, lambda x: x.to(DEVICES[-1]), FUSED[name]())
    if strided:
        given = tree_map_only(Tensor, lambda x: x.mT.contiguous().mT if x.ndim > 1 else x, given)
    given = tree_map_only(Tensor, lambda x: x.requires_grad_(x.is_floating_point()), given)
    with Recorded() as recorded:
        found = getattr(torch.ops.kalmix, name).default(*given)
        tree_leaves(found)[0].sum().backward()
    calls = {op._schema.name.split("::")[1]: (op, arguments) for op, arguments in recorded.calls}
    without = GRADIENTS_IN_FORWARD | GRADIENTS_BY_ITSELF
    assert calls.keys() == {name, f"{name}_backward"} - {f"{x}_backward" for x in without}
    for called in calls.values():
        _check(*called, **({"test_utils": "test_faketensor"} if strided else {}))


@pytest.mark.parametrize("name", NO_GRADIENTS)
def test_op_without_gradients_passes_opcheck(name):
    given = tree_map_only(Tensor, lambda x: x.to(DEVICES[-1]), NO_GRADIENTS[name]())
    _check(getattr(torch.ops.kalmix, name).default, given)


@pytest.mark.parametrize("name", RECOMPUTED)
@pytest.mark.slow
def test_recomputed_op_passes_opcheck(name, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # eager code calls the function itself
    layer = MIXERS[RECOMPUTED[name]](8, heads=2)
    with Recorded() as recorded:
        layer.filter(torch.randn(2, 5, 8), variance=True).mean.sum().backward()
    monkeypatch.undo()
    calls = {op._schema.name.split("::")[1]: (op, arguments) for op, arguments in recorded.calls}
    assert set(calls) == {name, f"{name}_backward"}
    _check(*calls[f"{name}_backward"])
    op, (tensors, options) = calls[name]
    torch.library.opcheck(op, ([x.requires_grad_(i < 3) for i, x in enumerate(tensors)], options))


class Seen(Tensor):
    """Subclass of `Tensor`, which PyTorch's dispatcher intercepts."""


@pytest.mark.parametrize("kind", [Seen, Tensor])
def test_plain_eager_calls_skip_the_dispatcher_and_agree_with_the_op(kind):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, 1, 4).requires_grad_() for _ in range(3))
    inputs = [x.as_subclass(Seen) for x in (q, k, v)] if kind is Seen else [q, k, v]
    y = ops.additive(*inputs, kernel="chunked").mean
    names = {x.name() for x in _graph(y.grad_fn)}
    assert any("EagerCall" in name for name in names) == (kind is Tensor)
    assert any("GeneratedBackward" in name for name in names) == (kind is Seen)
    found = torch.autograd.grad(y.sum(), (q, k, v))
    expected = torch.autograd.grad(ops.additive(q, k, v, kernel="reference").mean.sum(), (q, k, v))
    torch.testing.assert_close(found, expected)


def _graph(node: Any) -> list[Any]:
    """Return a node of an autograd graph and all nodes before it."""
    return [] if node is None else [node, *(x for before, _ in node.next_functions for x in _graph(before))]
