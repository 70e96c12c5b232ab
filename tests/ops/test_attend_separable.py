"""`SeparablePrecision` and `attend_separable`: approximation error, exact cases, and numerical limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kalmix import ArgumentError
from kalmix.ops import Dynamics
from kalmix.ops._attend.dynamics import kappa
from kalmix.ops.experimental import SeparablePrecision, attend_channels, attend_separable
from kalmix.testing.tolerances import relative_error

F64 = torch.float64
WORST = {
    -0.1: 0.002,
    -0.5: 0.074,
    -0.9: 0.538,
    2.0: 0.173,
    10.0: 0.565,
}  # of first variance / last - 1; see docs/results/afa.md


def _precision(dynamics: Dynamics, lag: Tensor) -> Tensor:
    """Return the exact precision 1 / V."""
    accumulated = dynamics.process_noise * kappa(-dynamics.log_decay, lag)
    return 1 / (accumulated + dynamics.key_noise * (2 * dynamics.log_decay * lag).exp() + dynamics.query_noise)


def _signals(heads: int = 2, channels: int = 3, length: int = 9) -> dict[str, Tensor]:
    """Draw inputs with irregular times, two of them equal, and a channel without decay."""
    draw = torch.Generator().manual_seed(0)
    rate, *noises = (torch.rand(heads, channels, generator=draw, dtype=F64) for _ in range(4))
    rate[0, 0] = 0
    steps = torch.rand(2, length, generator=draw, dtype=F64)
    steps[:, length // 2] = 0
    signals = dict(zip(Dynamics._fields, (-rate, 4 * torch.rand_like(rate) - 2, *noises), strict=True))
    v = torch.randn(2, length, heads, 2 * channels, generator=draw, dtype=F64)
    return {"v": v, "times": steps.cumsum(1) + 50, **signals}


@pytest.mark.parametrize(("ratio", "worst"), WORST.items())
@pytest.mark.parametrize("query_noise", [0.0, 0.05])
def test_precision_is_too_small_by_a_known_fraction(ratio: float, worst: float, query_noise: float) -> None:
    """The fraction depends on the ratio alone: here the variance is 1 + ratio at lag 0, and 1 in the limit."""
    numbers = (-0.4, 0.0, 0.8 * (1 - query_noise), 1 + ratio - query_noise, query_noise)
    dynamics = Dynamics(*(torch.tensor(x, dtype=F64) for x in numbers))
    lag = torch.linspace(0, 600, 100_001, dtype=F64)
    short = 1 - SeparablePrecision.of(dynamics).after(lag) / _precision(dynamics, lag)
    assert float(short.min()) > -1e-12
    assert float(short.max()) == pytest.approx(worst, abs=6e-4)
    assert float(short[0]) == pytest.approx(0, abs=1e-14) and float(short[-1]) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("rate", "process_noise"), [(0.3, 0.7), (0.0, 0.7), (0.3, 0.0), (0.0, 0.0)])
def test_precision_has_the_exact_slope_at_lag_zero(rate: float, process_noise: float) -> None:
    dynamics = Dynamics(*(torch.tensor(x, dtype=F64) for x in (-rate, 0.0, process_noise, 0.9, 0.4)))
    lag = torch.tensor([0.0, 1e-6], dtype=F64)
    near, exact = SeparablePrecision.of(dynamics).after(lag), _precision(dynamics, lag)
    torch.testing.assert_close(near, exact, rtol=1e-11, atol=0)


def test_outputs_match_the_double_loop() -> None:
    x = _signals()
    found = attend_separable(**x)
    precision = SeparablePrecision.of(Dynamics(*(x[name] for name in Dynamics._fields)))
    z, rate = torch.complex(*x["v"].chunk(2, -1)), torch.complex(x["log_decay"], x["frequency"])
    for i in range(x["v"].shape[1]):
        lag = (x["times"][:, i, None] - x["times"][:, : i + 1])[..., None, None]
        known = precision.after(lag)
        mean = (known * (rate * lag).exp() * z[:, : i + 1]).sum(1) / known.sum(1)
        torch.testing.assert_close(found.mean[:, i], torch.cat([mean.real, mean.imag], -1), atol=1e-12, rtol=0)
        torch.testing.assert_close(found.variance[:, i], (1 / known.sum(1)).repeat(1, 1, 2))


def test_constant_variance_gives_the_exact_filter() -> None:
    """Equal to the per-channel form with weights of 1 if the variance does not depend on the lag, else not."""
    x = _signals()
    x["log_decay"] = x["log_decay"] - 0.2
    settled = {"key_noise": x["process_noise"] / (-2 * x["log_decay"])}
    for given, exact in ((x | settled, True), (x, False)):
        want = attend_channels(given["v"], given["v"], **given, nu=1e12).mean
        assert (float((attend_separable(**given).mean - want).abs().max()) < 1e-10) == exact


def test_long_sequences_do_not_overflow() -> None:
    """The factors of the paper are exp(2 a t): e^4096 for 4,096 tokens."""
    x = {name: y.float() for name, y in _signals(1, 1).items()}
    x |= {"log_decay": torch.full((1, 1), -0.5), "v": torch.ones(1, 4096, 1, 2)}
    del x["times"]
    found = attend_separable(**x)
    assert found.mean.isfinite().all() and found.mean.dtype == torch.float32


def test_gradients_of_all_inputs_pass_gradcheck() -> None:
    x = _signals(1, 2, 5)
    times = x.pop("times")
    x["log_decay"] = x["log_decay"] - 0.1
    leaves = [y.requires_grad_() for y in x.values()]
    assert torch.autograd.gradcheck(
        lambda *ys: attend_separable(**dict(zip(x, ys, strict=True)), times=times)[:2], leaves, fast_mode=True
    )


@pytest.mark.parametrize("key_noise", [1e-5, 1e-4, 1e-2, 1.0, 1e2])
@pytest.mark.parametrize("rest", [0.0, 1e-5, None], ids=["no query noise", "1e-5", "drawn"])
def test_float32_is_accurate_at_any_noise(key_noise: float, rest: float | None) -> None:
    """Outputs and gradients differ from float64 by the rounding of inputs and results only."""
    x = _signals(length=60)
    x["key_noise"] = torch.full_like(x["key_noise"], key_noise)
    x["process_noise"][0] = 1e-4
    if rest is not None:
        x["query_noise"] = torch.full_like(x["query_noise"], rest)
    x = {name: y if name == "times" else y.float().double() for name, y in x.items()}
    answers = []
    for dtype in (torch.float32, F64):
        leaves = {name: y.to(dtype).requires_grad_() for name, y in x.items() if name != "times"}
        found = attend_separable(**leaves, times=x["times"])
        assert found.variance is not None
        outputs, draw = [found.mean, found.variance], torch.Generator().manual_seed(1)
        weights = [torch.randint(-8, 9, y.shape, generator=draw).to(dtype) / 4 for y in outputs]
        answers.append([*outputs, *torch.autograd.grad(outputs, list(leaves.values()), weights)])
    for name, got, want in zip(["mean", "variance", *leaves], *answers, strict=True):
        assert relative_error(got, want) < 4 * torch.finfo(torch.float32).eps, name


def test_decreasing_times_raise() -> None:
    x = _signals()
    with pytest.raises(ArgumentError, match="`times` decreases"):
        attend_separable(**(x | {"times": -x["times"]}))


@pytest.mark.parametrize("wrong", [lambda v: v[..., 1:], lambda v: v[0], lambda v: v.long(), lambda v: v / 0])
def test_wrong_values_are_named(wrong: Callable[[Tensor], Tensor]) -> None:
    x = _signals()
    with pytest.raises(ArgumentError, match="`v`"):
        attend_separable(**(x | {"v": wrong(x["v"])}))


@pytest.mark.parametrize(
    ("wrong", "name"),
    [((1, 2, 3, 4, 5), "dynamics"), (Dynamics(*[1.0] * 5), "dynamics.log_decay")],  # type: ignore[arg-type]
)
def test_precision_of_anything_but_dynamics_is_refused(wrong: Dynamics, name: str) -> None:
    with pytest.raises(ArgumentError, match=f"`{name}`"):
        SeparablePrecision.of(wrong)
