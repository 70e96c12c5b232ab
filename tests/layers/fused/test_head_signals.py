"""Signals of heads, decays per key and dynamics of cells, against float64 and against calls of the layers' modules."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from forms import DEVICE, check_second_derivatives, compare_forms, form
from torch import Tensor

from kalmix.layers import MIXERS
from kalmix.layers.fused import HeadSignal, can_fuse_signals, cell_dynamics, head_signals, step_decay
from kalmix.layers.fused.triton import head_signals_launch
from kalmix.layers.signal_groups import fused_signals, linear_signal

pytest.importorskip("triton")
CONSTANTS = {"sigmoid": 2.0, "squared": 1e-6, "softplus": 1e-4}
GROUPS = {
    "delta": (("sigmoid", 3), ("decay", 3)),
    "ridge": (("decay", 4), ("squared", 4), ("sigmoid", 4)),
    "dense": (("softplus", 2), ("softplus", 2), ("softplus", 6)),
    "mamba2": (("decay-step", 20),),
    "wide": (("sigmoid", 70), ("softplus", 50)),
}
LAYERS = {
    "deltanet": {"heads": 2},
    "gated-deltanet": {"heads": 2, "negative_eigenvalues": True},
    "gated-kalmanet": {"heads": 2, "gain": "squared"},
    "bayesian": {"heads": 2},
    "mamba2": {"heads": 4, "groups": 2, "state_dim": 4},
    "kda": {"heads": 2},
}


def parameters(groups: Sequence[tuple[str, int]], width: int, keys: int = 1) -> list[HeadSignal]:
    """Return random groups of columns; the first has `keys` decays per column."""
    found = []
    for i, (kind, columns) in enumerate(groups):
        rates = columns * (1 if i else keys)
        log_rate = torch.randn(rates, device=DEVICE) if kind.startswith("decay") else None
        bias = None if kind == "sigmoid" else torch.randn(columns, device=DEVICE)
        weight = torch.randn(columns, width, device=DEVICE) / width**0.5
        found.append(HeadSignal(kind, weight, bias, log_rate, CONSTANTS.get(kind, 0.0)))
    return found


def exact(x: Tensor, signals: Sequence[HeadSignal]) -> list[Tensor]:
    """Compute the signals with PyTorch."""
    results = []
    for kind, weight, bias, log_rate, constant in signals:
        raw = F.linear(x, weight, bias)
        if kind == "sigmoid":
            results.append(constant * raw.sigmoid())
        elif kind == "squared":
            results.append((raw.sigmoid() + constant).square())
        elif kind == "softplus":
            results.append(F.softplus(raw) + constant)
        else:
            step = F.softplus(raw)
            rates = log_rate.exp().view(len(weight), -1)
            results.append((-rates * step[..., None]).squeeze(-1))
            results += [step] if kind == "decay-step" else []
    return results


def leaves_of(x: Tensor, signals: Sequence[HeadSignal], dtype: torch.dtype | None) -> tuple[Tensor, list[HeadSignal]]:
    """Return copies that require gradients, in `dtype` or their own."""

    def leaf(y: Tensor | None) -> Tensor | None:
        return None if y is None else y.detach().to(dtype or y.dtype, copy=True).requires_grad_()

    return leaf(x), [HeadSignal(s.kind, *map(leaf, s[1:4]), s.constant) for s in signals]


def outputs_and_gradients(x: Tensor, signals: Sequence[HeadSignal], outputs: Sequence[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    loss = torch.stack([(y.double() * torch.randn(y.shape, device=DEVICE).double()).sum() for y in outputs]).sum()
    tensors = [x, *(y for s in signals for y in s[1:4] if y is not None)]
    return [*outputs, *torch.autograd.grad(loss, tensors)]


@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize("groups", GROUPS)
def test_signals_and_gradients_agree_with_float64(groups, rows):
    torch.manual_seed(0)
    x, signals = torch.randn(2, rows, 40, device=DEVICE).bfloat16(), parameters(GROUPS[groups], 40)
    x, fused = leaves_of(x, signals, None)
    with form("triton"), torch.autocast(DEVICE, torch.bfloat16):
        assert can_fuse_signals(x, fused)
        found = outputs_and_gradients(x, fused, head_signals(x, fused))
    rounded = [HeadSignal(s.kind, s.weight.bfloat16(), *s[2:]) for s in signals]
    exact_x, copies = leaves_of(x, rounded, torch.float64)
    expected = outputs_and_gradients(exact_x, copies, exact(exact_x, copies))
    for y, z in zip(found, expected, strict=True):
        assert ((y.double() - z).abs().max() / z.abs().max()) < 0.02


@pytest.mark.parametrize("keys", [1, 3])
def test_decoding_has_the_precision_of_float32_and_expands_decays(keys):
    torch.manual_seed(0)
    x, signals = torch.randn(3, 1, 40, device=DEVICE), parameters((("decay", 5), ("softplus", 2)), 40, keys)
    with form("triton"):
        assert can_fuse_signals(x, signals)
        found = head_signals(x, signals)
        assert not can_fuse_signals(x.requires_grad_(), signals)
    for y, z in zip(found, exact(x, signals), strict=True):
        torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-6)


def test_missing_gradients_are_zero():
    torch.manual_seed(0)
    x, signals = leaves_of(torch.randn(1, 70, 20, device=DEVICE).bfloat16(), parameters(GROUPS["ridge"], 20), None)
    with form("triton"), torch.autocast(DEVICE, torch.bfloat16):
        decay, gain, _ = head_signals(x, signals)
        only = torch.autograd.grad(gain.sum(), signals[0].weight, retain_graph=True)[0]
        both = torch.autograd.grad(decay.sum() + gain.sum(), signals[0].weight)[0]
    assert not only.any() and both.any()


def test_nan_of_a_token_reaches_no_other():
    torch.manual_seed(0)
    x, signals = torch.randn(1, 70, 20, device=DEVICE).bfloat16(), parameters(GROUPS["delta"], 20)
    x[0, 3] = torch.nan
    x, signals = leaves_of(x, signals, None)
    with form("triton"), torch.autocast(DEVICE, torch.bfloat16):
        outputs = head_signals(x, signals)
        dx = torch.autograd.grad(torch.stack([y.sum() for y in outputs]).sum(), x)[0]
    for y in (*outputs, dx):
        clean = y[0].isfinite().all(-1)
        assert not clean[3] and clean.sum() == 69


def test_second_derivatives_agree_with_pytorch():
    torch.manual_seed(0)
    signals, found = parameters(GROUPS["delta"], 20), []
    x = torch.randn(1, 70, 20, device=DEVICE).bfloat16()
    for name in ("triton", "eager"):
        copy, groups = leaves_of(x, signals, None if name == "triton" else torch.float64)
        with form(name), torch.autocast(DEVICE, torch.bfloat16, enabled=name == "triton"):
            outputs = head_signals(copy, groups) if name == "triton" else exact(copy, groups)
        loss = torch.stack([y.pow(3).sum() for y in outputs]).sum()
        first = torch.autograd.grad(loss, [groups[0].weight, groups[1].log_rate], create_graph=True)
        second = torch.autograd.grad(torch.stack([y.square().sum() for y in first]).sum(), groups[1].weight)
        found.append(second[0].double())
    assert (found[0] - found[1]).norm() < 0.03 * found[1].norm()


@pytest.mark.parametrize("name", LAYERS)
def test_layers_agree_in_half_precision(name):
    """Training and decoding, with one kernel and with calls of the modules."""
    torch.manual_seed(0)
    layer = MIXERS[name](16, **LAYERS[name]).to(DEVICE)
    x, found = torch.randn(2, 40, 16, device=DEVICE).bfloat16(), []
    for each in ("eager", "triton"):
        with form(each), torch.autocast(DEVICE, torch.bfloat16):
            signals = layer.signals(x)
            loss = torch.stack([y.square().sum() for y in signals.values()]).sum()
            wanted = [w for n, w in layer.named_parameters() if "gain_proj" in n or "decay" in n or "noise" in n]
            with torch.no_grad():
                step = layer.signals(x[:, :1])
            found.append([*signals.values(), *torch.autograd.grad(loss, wanted), *step.values()])
    for eager, triton in zip(*found, strict=True):
        assert eager.shape == triton.shape and eager.dtype == triton.dtype
        assert (eager - triton).abs().max() <= 0.02 * eager.abs().max()


def test_modules_with_hooks_are_called():
    """Adapters and quantized layers replace modules or add hooks."""
    layer, x, calls = MIXERS["gated-deltanet"](16, heads=2).to(DEVICE), torch.randn(1, 1, 16, device=DEVICE), []
    with form("triton"), torch.no_grad():
        assert fused_signals(x, linear_signal(layer.gain_proj, "sigmoid")) is not None
        layer.gain_proj.register_forward_hook(lambda *_: calls.append(1))
        layer.signals(x)
        assert calls and fused_signals(x, linear_signal(layer.gain_proj, "sigmoid")) is None
        layer.decay.proj = torch.nn.Sequential(layer.decay.proj)
        layer.signals(x)


@pytest.mark.parametrize("name", ["gated-deltanet", "kda"])
def test_hooks_of_decays_are_called(name):
    layer, x, calls = MIXERS[name](16, heads=2).to(DEVICE), torch.randn(1, 1, 16, device=DEVICE), []
    layer.decay.register_forward_hook(lambda *_: calls.append(1))
    for each in ("eager", "triton"):
        with form(each), torch.no_grad():
            layer.signals(x)
    assert len(calls) == 2


def test_wrong_dtypes_are_refused_as_by_linear_layers():
    layer = MIXERS["gated-deltanet"](16, heads=2).to(DEVICE)
    with form("triton"), pytest.raises(RuntimeError, match="dtype"):
        layer.signals(torch.randn(1, 70, 16, device=DEVICE).bfloat16())


def test_compiled_training():
    """torch.compile calls the kernel."""
    torch.manual_seed(0)
    x, signals = torch.randn(2, 40, 12, device=DEVICE).bfloat16(), parameters(GROUPS["delta"], 12)
    names, found = set(), []

    def function(x: Tensor, *groups: HeadSignal) -> list[Tensor]:
        return head_signals(x, groups) if can_fuse_signals(x, groups) else exact(x, groups)

    def record(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        names.update(str(node.target) for node in graph.graph.nodes)
        return graph

    with form("triton"), torch.autocast(DEVICE, torch.bfloat16):
        torch.compile(function, backend=record, fullgraph=True)(x, *signals)
        for each in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
            copy, groups = leaves_of(x, signals, None)
            found.append(outputs_and_gradients(copy, groups, each(copy, *groups)))
    assert any("kalmix.head_signals" in name for name in names)
    for y, z in zip(*found, strict=True):
        assert torch.equal(y, z)


@pytest.mark.parametrize("kibibytes", [99, 163, 227])
def test_tiles_fit_into_shared_memory(kibibytes):
    """`python -m kalmix_bench.perf.gpu_targets` finds the same numbers of bytes."""
    for columns in (16, 32, 64, 128):
        for groups in (1, 2, 3):
            weights = [torch.empty(1)] * groups
            tile = head_signals_launch._forward_tile(columns, weights, kibibytes * 1024)
            stages = (tile["num_stages"] - 1) * tile["BD"] * (2 * tile["BM"] + 4 * groups * columns)
            assert stages + 2 * tile["BD"] * (tile["BM"] + columns) <= kibibytes * 1024
        tile = head_signals_launch._backward_tile(columns, kibibytes * 1024)
        assert tile["num_stages"] * 2 * tile["BM"] * (tile["BD"] + columns) <= kibibytes * 1024


def test_step_decay_agrees_on_both_forms():
    torch.manual_seed(0)
    inputs = [torch.randn(2, 11, 9), torch.randn(9), torch.randn(3)]
    compare_forms(lambda *tensors: (step_decay(*tensors),), inputs)
    check_second_derivatives(lambda *tensors: (step_decay(*tensors),), inputs)


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("diffuses", [False, True])
def test_cell_dynamics_agree_on_both_forms(diffuses, hold):
    torch.manual_seed(0)
    inputs = [4 * torch.randn(2, 150), 4 * torch.randn(2, 150) - 4, 4 * torch.randn(2, 150) if diffuses else None]
    inputs[0][0, :2] = torch.tensor([-90.0, 20.0])

    def scaled(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        decay, noise = cell_dynamics(*tensors, hold)
        return decay / (1 + decay.abs()), noise / (1 + noise)

    compare_forms(scaled, inputs)
    check_second_derivatives(
        lambda *tensors: scaled(*tensors)[:2], [x if x is None else x.clamp(-3, 3) for x in inputs]
    )
