"""Parts around the step of `attend`: both forms agree with the layer's own functions in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from forms import DEVICE, form

from kalmix import steps
from kalmix.layers import (
    AdaptiveFilterAttention,
    AFATransformerBlock,
    ControlledFilter,
    afa_transformer,
    controlled_filter,
)
from kalmix.layers.fused import waypoint_step
from kalmix.layers.parametrize import StateDynamics
from kalmix.layers.robust_weights import RobustWeights, attend_parameters

pytest.importorskip("triton")
EXTREMES = torch.tensor([-80.0, -9.0, -1e-3, 0.0, 0.5, 9.0, 60.0])


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def spread(module):
    """Set parameters of 7 heads to numbers between -80 and 60."""
    for index, parameter in enumerate(module.parameters()):
        values = EXTREMES.roll(index).clamp(-20, 20) if parameter.ndim == 2 else EXTREMES.roll(index)
        parameter.copy_(values.view(-1, *[1] * (parameter.ndim - 1)).expand_as(parameter) + 0.01 * parameter)
    return module.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("channels", "floor", "base"), [(5, True, 10.0), (1, False, 10.0), (4, None, 10.0), (2, True, None)]
)
def test_parameters_of_both_forms_agree_with_float64(channels, floor, base, dtype):
    dynamics = spread(StateDynamics(7, channels, base)).to(dtype)
    weights = None if floor is None else spread(RobustWeights(7, nu=2.0, floor=floor)).to(dtype)
    x = torch.ones(2, 1, 3, device=DEVICE, dtype=dtype)
    wide = [None if module is None else copy.deepcopy(module).double() for module in (dynamics, weights)]
    expected = attend_parameters(x.double(), *wide)
    for name in ("eager", "triton"):
        with form(name):
            found = attend_parameters(x, dynamics, weights)
        missing = {"floor"} if name == "triton" and floor is False else set()
        assert set(found) - set(expected) == missing
        for key, value in expected.items():
            torch.testing.assert_close(found[key].double(), value, rtol=1e-5, atol=1e-30, msg=f"{name} {key}")
        assert not any(found[key].any() for key in missing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("channels", "floor", "base", "given"),
    [(5, True, 10.0, None), (1, False, 10.0, None), (4, None, 10.0, None), (4, True, 10.0, 0), (1, True, None, None)],
)
def test_gradients_of_parameters_agree_with_float64(channels, floor, base, given, dtype):
    """With `given`, only that output has a gradient."""
    torch.manual_seed(0)
    dynamics = StateDynamics(7, channels, base).to(DEVICE, dtype)
    weights = None if floor is None else RobustWeights(7, nu=2.0, floor=floor).to(DEVICE, dtype)
    for module in (dynamics, weights):
        for parameter in [] if module is None else module.parameters():
            parameter.add_(3 * torch.randn_like(parameter))
    modules = [dynamics, weights]
    wide = [None if module is None else copy.deepcopy(module).double() for module in modules]
    factors, results = torch.randn(8, 1, 1, device=DEVICE, dtype=torch.float64), []
    for name, used in (("eager", wide), ("triton", modules)):
        x = torch.ones(2, 1, 3, device=DEVICE, dtype=next(used[0].parameters()).dtype)
        with torch.enable_grad(), form(name):
            found = attend_parameters(x, *used)
            names = [key for key in sorted(found) if key != "floor" or floor]
            names = names if given is None else names[given : given + 1]
            loss = sum((found[key].double() * w).sum() for key, w in zip(names, factors, strict=False))
            leaves = [p for module in used if module is not None for p in module.parameters()]
            results.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for expected, found in zip(*results, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_second_derivatives_of_parameters_agree():
    dynamics, weights = StateDynamics(2, 3, 10.0).to(DEVICE), RobustWeights(2, nu=2.0, floor=True).to(DEVICE)
    leaves, results = [*dynamics.parameters(), *weights.parameters()], []
    for name in ("eager", "triton"):
        with torch.enable_grad(), form(name):
            values = attend_parameters(torch.ones(2, 1, 3, device=DEVICE), dynamics, weights).values()
            grads = torch.autograd.grad(sum(x.pow(3).sum() for x in values), leaves, create_graph=True)
            results.append(torch.autograd.grad(sum(x.square().sum() for x in grads), leaves))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "options", [{}, {"predict": None}, {"predict": "gate"}, {"confidence": True}, {"value_dynamics": True}]
)
def test_both_forms_of_a_layer_step_agree(options):
    torch.manual_seed(0)
    layer = AdaptiveFilterAttention(12, heads=2, head_dim=3, floor=True, **options).to(DEVICE)
    layer.residual.copy_(torch.tensor([-1.0, 0.7]))
    rows, results = torch.tensor([2, -1, 0], device=DEVICE), []
    x = torch.randn(3, 4, 12, device=DEVICE)
    for name in ("eager", "triton"):
        pool = layer.state_pool(3, tokens=4)
        with form(name):
            results.append([layer.step(x[:, [i]], pool, steps.Slots(rows, rows)) for i in range(4)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("log_rate", [-20.0, -2.5, -1.9, 2.0])
def test_both_forms_of_a_step_apply_the_control(rank, log_rate):
    """Rates are tiny, on both sides of the end of a series, and large."""
    torch.manual_seed(0)
    layer = ControlledFilter(12, heads=2, head_dim=3, rank=rank).to(DEVICE)
    layer.waypoint_control.log_waypoint_weight.add_(torch.randn(2, 3, device=DEVICE))
    layer.dynamics.log_rate.fill_(log_rate)
    slots = torch.tensor([1, -1, 0], device=DEVICE)
    x, results = torch.randn(3, 2, 12, device=DEVICE), []
    for name in ("eager", "triton"):
        with form(name):
            pool = layer.state_pool(2, tokens=2)
            results.append(torch.cat([layer.step(x[:, [i]], pool, steps.Slots(slots, slots)) for i in range(2)], 1))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0][[0, 2]], layer(x[[0, 2]])[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", ["none", "hook", "size"])
def test_the_control_is_one_kernel_unless_modules_changed(change, monkeypatch):
    calls, run = [], controlled_filter.steer_step
    monkeypatch.setattr(controlled_filter, "steer_step", lambda *given: calls.append(1) or run(*given))
    layer, row = ControlledFilter(12, heads=2, head_dim=3).to(DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    if change == "hook":
        layer.waypoint_control.up_proj.register_forward_hook(lambda module, given, y: 2 * y)
    if change == "size":
        monkeypatch.setattr(waypoint_step, "MAX_TILE", 64)
    x = torch.randn(1, 1, 12, device=DEVICE)
    with form("triton"):
        y = layer.step(x, layer.state_pool(1, tokens=2), steps.Slots(row, row))
    torch.testing.assert_close(y, layer(x)[0], rtol=1e-5, atol=1e-6)
    assert len(calls) == (change == "none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_forms_of_a_step_split_magnitudes_and_directions(dtype, monkeypatch):
    """A head of zeros has no direction; one row is padding. The kernels agree with the ordinary call in float64."""
    torch.manual_seed(0)
    calls, run = [], afa_transformer.join_step
    monkeypatch.setattr(afa_transformer, "join_step", lambda *given: calls.append(1) or run(*given))
    layer = AFATransformerBlock(12, heads=3, head_dim=3).to(DEVICE)
    for parameter in layer.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    layer = layer.to(dtype)
    x, slots = torch.randn(3, 4, 12, device=DEVICE).to(dtype), torch.tensor([2, -1, 0], device=DEVICE)
    x[0, 1] = 0
    exact = copy.deepcopy(layer).double()
    exact.in_proj.bias.zero_()
    layer.in_proj.bias.zero_()
    expected = exact(x.double())[0][[0, 2]]
    for name in ("eager", "triton"):
        pool = layer.state_pool(3, tokens=4)
        with form(name):
            y = torch.cat([layer.step(x[:, [i]], pool, steps.Slots(slots, slots)) for i in range(4)], 1)
        assert not y[1].any()
        bound = 2e-5 if dtype == torch.float32 else 0.06
        torch.testing.assert_close(y[[0, 2]].double(), expected, rtol=bound, atol=bound)
    assert len(calls) == 4


class OwnValues(AdaptiveFilterAttention):
    """Layer that ignores estimates."""

    def mix_residual(self, filtered, v):
        return super().mix_residual(filtered._replace(mean=torch.zeros_like(v)), v)


def test_both_forms_of_a_step_call_mix_residual_of_a_subclass():
    torch.manual_seed(0)
    layer, row = OwnValues(12, heads=2, head_dim=3).to(DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    x = torch.randn(1, 1, 12, device=DEVICE)
    for name in ("eager", "triton"):
        with form(name):
            result = layer.step(x, layer.state_pool(1, tokens=2), steps.Slots(row, row))
        torch.testing.assert_close(result, layer(x)[0], rtol=1e-5, atol=1e-6)


def test_a_step_reads_the_present_parameters():
    """A step stores nothing that depends on parameters."""
    torch.manual_seed(0)
    layer = AdaptiveFilterAttention(12, heads=2, head_dim=3).to(DEVICE)
    x, row = torch.randn(1, 1, 12, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with form("triton"):
        first = layer.step(x, layer.state_pool(1, tokens=2), steps.Slots(row, row))
        layer.dynamics.log_rate.add_(3.0)
        second = layer.step(x, layer.state_pool(1, tokens=2), steps.Slots(row, row))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("part", ["dynamics", "weights"])
def test_hooks_of_parameters_are_called(part):
    modules = {"dynamics": StateDynamics(2, 3, 10.0).to(DEVICE), "weights": RobustWeights(2, nu=2.0).to(DEVICE)}
    calls = []
    modules[part].register_forward_hook(lambda *_: calls.append(1))
    with form("triton"):
        attend_parameters(torch.ones(2, 1, 3, device=DEVICE), **modules)
    assert calls == [1]
