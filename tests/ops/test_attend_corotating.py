"""`attend_corotating` against covariances integrated from the stochastic differential equation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kalmix import ArgumentError
from kalmix.ops import Dynamics, attend, attend_radial
from kalmix.ops.experimental import attend_corotating
from kalmix.testing.tolerances import relative_error

F64, LENGTH, CHANNELS = torch.float64, 7, 3


def _signals(heads: int = 2) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=F64)

    tokens = {name: normal(1, LENGTH, heads, 2 * CHANNELS) for name in ("q", "k", "v", "direction")}
    noises = {name: normal(heads, 2).exp() for name in ("process_noise", "key_noise", "query_noise")}
    times = {"times": normal(1, LENGTH).abs().cumsum(1)}
    return tokens | noises | times | {"log_decay": -0.3 * normal(heads).exp(), "frequency": normal(heads, CHANNELS)}


def _covariance(x: dict[str, Tensor], h: int, p: Tensor, lag: Tensor) -> Tensor:
    """Integrate the covariance `[C, C]` of a token moved by a lag: noise along and across the rotating direction p,
    propagated to the end of the lag and summed by quadrature."""
    eye, at = torch.eye(CHANNELS, dtype=torch.complex128), p[:, None] @ p[None].conj()

    def noise(name: str, ago: Tensor) -> Tensor:
        flow = torch.exp(torch.complex(torch.zeros_like(x["frequency"][h]), -x["frequency"][h] * ago)).diag()
        then = flow @ at @ flow.mH  # the direction rotates with the state
        along, across = x[name][h]
        carry = torch.exp(torch.complex(x["log_decay"][h].expand(CHANNELS), x["frequency"][h]) * ago).diag()
        return carry @ (across * (eye - then) + along * then) @ carry.mH

    nodes, weights = (torch.from_numpy(y) for y in np.polynomial.legendre.leggauss(30))
    way = sum(w * lag / 2 * noise("process_noise", lag / 2 * (1 + y)) for y, w in zip(nodes, weights, strict=True))
    return way + noise("key_noise", lag) + noise("query_noise", torch.zeros((), dtype=F64))


def test_mean_is_the_generalised_least_squares_estimate() -> None:
    """The reference solves generalised least squares with full covariance matrices."""
    x = _signals()
    found = attend_corotating(**x, nu=1e14).mean
    for i in range(LENGTH):
        for h in range(2):
            p = torch.complex(*x["direction"][0, i, h].chunk(2))
            information, evidence = torch.zeros(CHANNELS, CHANNELS), torch.zeros(CHANNELS)
            for j in range(i + 1):
                lag = x["times"][0, i] - x["times"][0, j]
                precision = torch.linalg.inv(_covariance(x, h, p / p.abs().square().sum().sqrt(), lag))
                carry = torch.exp(torch.complex(x["log_decay"][h].expand(CHANNELS), x["frequency"][h]) * lag)
                information = information + precision
                evidence = evidence + precision @ (carry * torch.complex(*x["v"][0, j, h].chunk(2)))
            want = torch.linalg.solve(information, evidence)
            torch.testing.assert_close(torch.complex(*found[0, i, h].chunk(2)), want, atol=1e-10, rtol=0)


def test_isotropic_noise_gives_attend() -> None:
    x = _signals()
    both = {name: x[name][:, :1].expand(-1, 2) for name in ("process_noise", "key_noise", "query_noise")}
    direction = x.pop("direction")
    got = attend_corotating(**(x | both), direction=direction, nu=2.0, window=3, variance=True)
    want = attend(**(x | {name: y[:, 0] for name, y in both.items()}), nu=2.0, window=3, variance=True)
    torch.testing.assert_close(got.mean, want.mean, atol=1e-12, rtol=0)
    torch.testing.assert_close(got.variance, want.variance.expand_as(got.variance))


def test_direction_of_the_value_gives_the_step_of_attend_radial() -> None:
    """With weights of 1, and magnitude and direction combined as in `attend_radial`."""
    x = _signals() | {"nu": 1e12}
    x.pop("direction")
    own = x["v"] / x["v"].norm(dim=-1, keepdim=True)
    mean = attend_corotating(**x, direction=3 * x["v"]).mean
    real, imaginary = own.chunk(2, -1)
    length = (own * mean).sum(-1, keepdim=True)
    other = torch.cat([-imaginary, real], -1)
    across = mean - length * own - (other * mean).sum(-1, keepdim=True) * other
    ahead = x["v"] + across
    want = attend_radial(**x).mean
    torch.testing.assert_close(length * ahead / ahead.norm(dim=-1, keepdim=True), want, atol=1e-9, rtol=0)


def test_zero_direction_is_across_and_pieces_equal_one_call() -> None:
    x = _signals()
    nowhere = attend_corotating(**(x | {"direction": 0 * x["direction"]}))
    across = {name: x[name][:, 1] for name in ("process_noise", "key_noise", "query_noise")}
    rest = {name: y for name, y in x.items() if name != "direction"}
    torch.testing.assert_close(nowhere.mean, attend(**(rest | across)).mean)
    whole, belief, parts = attend_corotating(**x, variance=True), None, []
    for cut in (slice(0, 3), slice(3, LENGTH)):
        now = {name: y[:, cut] if y.shape[:2] == (1, LENGTH) else y for name, y in x.items()}
        part = attend_corotating(**now, belief=belief, variance=True)
        belief, parts = part.belief, [*parts, part]
    for n in range(2):
        torch.testing.assert_close(torch.cat([part[n] for part in parts], 1), whole[n])
    assert (whole.variance > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_variance_is_float32_for_half_precision_inputs(dtype: torch.dtype) -> None:
    tokens = ("q", "k", "v", "direction")
    x = {name: y.to(dtype) if name in tokens else y if name == "times" else y.float() for name, y in _signals().items()}
    found, want = (attend_corotating(**y, variance=True) for y in (x, {name: y.double() for name, y in x.items()}))
    assert found.variance is not None and want.variance is not None
    assert relative_error(found.variance, want.variance) < 16 * torch.finfo(torch.float32).eps
    assert relative_error(found.mean, want.mean) < torch.finfo(dtype).eps


def test_gradients_of_all_inputs_pass_gradcheck() -> None:
    x = {name: y[:, :3] if y.shape[:2] == (1, LENGTH) else y for name, y in _signals(1).items()}
    x = {name: y.requires_grad_(name != "times") for name, y in x.items()}
    names = [name for name in x if name != "times"]
    assert torch.autograd.gradcheck(
        lambda *ys: attend_corotating(**dict(zip(names, ys, strict=True)), times=x["times"]).mean,
        [x[name] for name in names],
        fast_mode=True,
    )


def test_a_direction_of_another_width_raises() -> None:
    x = _signals()
    with pytest.raises(ArgumentError, match="direction"):
        attend_corotating(**(x | {"direction": x["direction"][..., 1:]}))


def test_value_dynamics_and_values_of_another_width_raise() -> None:
    x = _signals()
    dynamics = Dynamics(*(torch.ones(2, CHANNELS if n == 1 else 1, dtype=F64).squeeze(1) for n in range(5)))
    with pytest.raises(ArgumentError, match="value_dynamics"):
        attend_corotating(**x, value_dynamics=dynamics)
    with pytest.raises(ArgumentError, match=r"`v` has shape \[1, 7, 2, 8\]"):
        attend_corotating(**x | {name: torch.zeros(1, LENGTH, 2, 8, dtype=F64) for name in ("v", "direction")})
