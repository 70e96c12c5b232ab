"""`attend` against a double loop; limits, times, windows, and the belief."""

from __future__ import annotations

from functools import cache, partial
from math import expm1
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from histories import (
    Signals,
    arguments,
    assert_close_to,
    double_loop,
    gradients,
    mean_var,
    signals,
    slice_tokens,
    to_complex,
    with_gradients,
)
from torch import Tensor

from kalmix import ArgumentError, HistoryBelief, Segments
from kalmix.ops import attend
from kalmix.ops._attend import tiles
from kalmix.ops._attend.dynamics import accumulated_noise_slope, kappa
from kalmix.ops._shared import batching
from kalmix.types import Filtered

KERNELS = ("chunked", "reference")


def _run(x: Signals, **options: Any) -> Filtered:
    return attend(**(arguments(x) | options))


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a kernel, with tiles so small that there are several."""
    monkeypatch.setattr(tiles, "QUERY_TILE", 4)
    monkeypatch.setattr(batching, "MAX_ENTRIES_CPU", 1)
    return request.param


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "one token": ({"length": 1}, {}),
    "exponential": ({}, {"weight": "exponential"}),
    "own value dynamics": ({"value_channels": 2}, {}),
    "own value dynamics, exponential": ({"value_channels": 2}, {"weight": "exponential"}),
    "window": ({}, {"window": 3}),
    "two-sided": ({}, {"causal": False}),
    "two-sided, values of their own": ({"value_channels": 2, "length": 7}, {"causal": False, "weight": "exponential"}),
    "two-sided window": ({"value_channels": 2}, {"causal": False, "window": 3}),
}


@pytest.mark.parametrize("no_decay", [False, True], ids=["decay", "no decay"])
@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients_match_the_double_loop(form: str, no_decay: bool, kernel: str) -> None:
    given, want, want_gradients = _loop(form, no_decay)
    got = mean_var(_run(given, variance=True, kernel=kernel, **FORMS[form][1]))
    assert_close_to(got, want, 1e-10)
    assert_close_to(gradients(got, given), want_gradients, 1e-8)


@cache
def _loop(form: str, no_decay: bool) -> tuple[Signals, list[Tensor], list[Tensor]]:
    """Return inputs, and outputs and gradients of the double loop: the same for all kernels."""
    drawn, options = FORMS[form]
    x = signals(**({"length": 6} | drawn))
    if no_decay:
        x |= {name: torch.zeros_like(y) for name, y in x.items() if name.endswith("log_decay")}
    given = with_gradients(x)
    want = double_loop(given, **options)
    return given, [y.detach() for y in want], gradients(want, given)


def test_without_process_noise_it_equals_a_kalman_filter(kernel: str) -> None:
    """Weights of 1, no query noise and a flat prior; the Kalman filter runs channel by channel."""
    x = signals(length=20, groups=1)
    nothing = torch.zeros_like(x["log_decay"])
    x |= {"process_noise": nothing, "query_noise": nothing, "floor": nothing, "nu": nothing + 1e16}
    x["temperature"] = nothing + 1
    found = _run(x, variance=True, kernel=kernel)
    mean, variance = to_complex(x["v"][:, 0]), x["key_noise"].expand(2, -1)
    for t in range(20):
        if t:
            lag = (x["times"][:, t] - x["times"][:, t - 1])[:, None]
            decay = (x["log_decay"] * lag).exp()
            mean = mean * torch.polar(decay[..., None].expand_as(mean), lag[..., None] * x["frequency"])
            variance = variance * decay**2
            gain = variance / (variance + x["key_noise"])
            mean, variance = mean + gain[..., None] * (to_complex(x["v"][:, t]) - mean), (1 - gain) * variance
        torch.testing.assert_close(to_complex(found.mean[:, t]), mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(mean_var(found)[1][:, t, :, 0], variance, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("nu", "error"), [(50.0, 1e-4), (500.0, 1e-6)])
def test_without_decay_and_process_noise_it_approaches_rotary_attention(nu: float, error: float, kernel: str) -> None:
    x = signals(length=40, channels=8, groups=1)
    x |= {name: F.normalize(x[name], dim=-1) for name in "qkv"}
    nothing = torch.zeros_like(x["log_decay"])
    x |= {"log_decay": nothing, "process_noise": nothing, "floor": nothing, "nu": nothing + nu}
    x |= {"key_noise": nothing + 0.9, "query_noise": nothing + 1.3, "temperature": nothing + 1}
    angle = x["times"][..., None, None] * x["frequency"]

    def turn(y: Tensor, angle: Tensor) -> Tensor:
        y = to_complex(y) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([y.real, y.imag], -1)

    turned = (turn(x[name], -angle).transpose(1, 2) for name in "qkv")
    want = F.scaled_dot_product_attention(*turned, is_causal=True, scale=2 / (nu * 2.2 + 2))
    assert float((_run(x, kernel=kernel).mean - turn(want.transpose(1, 2), angle)).abs().max()) < error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_shift_of_all_times_changes_no_output(dtype: torch.dtype, kernel: str) -> None:
    """Also for times as large as a clock in seconds."""
    x = {name: y if name == "times" else y.to(dtype) for name, y in signals(value_channels=2).items()}
    x["times"] = (16 * x["times"]).round() / 16
    before, after = (_run(x | {"times": x["times"] + shift}, variance=True, kernel=kernel) for shift in (0.0, 2.0**31))
    for ours, theirs in zip(mean_var(after), mean_var(before), strict=True):
        assert torch.equal(ours, theirs)


def test_large_times_keep_precision_in_packed_and_continued_sequences(kernel: str) -> None:
    x = signals()
    x["times"] = (16 * x["times"]).round() / 16
    length = x["q"].shape[1]

    def run(shift: float) -> list[Tensor]:
        now = x | {"times": x["times"] + shift}
        rows = torch.tensor([(0, 0, length // 2), (1, 1, length)], dtype=torch.int32)
        packed = _run(now, segments=Segments.of(rows), kernel=kernel)
        head = _run(slice_tokens(now, 0, 3), kernel=kernel)
        return [packed.mean, _run(slice_tokens(now, 3, length), belief=head.belief, kernel=kernel).mean]

    for ours, theirs in zip(run(2.0**31), run(0.0), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_gradients_of_half_precision_dynamics_are_rounded_once(kernel: str) -> None:
    """Keys and values share the dynamics. Their gradients nearly cancel, so they must be added in float32."""
    worst = 0.0
    for seed in range(8):
        x = {name: y if name == "times" else y.bfloat16().float() for name, y in signals(seed=seed).items()}
        halved = {name: y.bfloat16() if name in "qkv" else y for name, y in x.items()}

        def gradient(dtype: torch.dtype, x: Signals = halved) -> Tensor:
            rate = x["log_decay"].to(dtype).requires_grad_()
            found = _run(x | {"log_decay": rate}, kernel=kernel)
            weights = torch.randn(found.mean.shape, generator=torch.Generator().manual_seed(0))
            return torch.autograd.grad((found.mean.float() * weights).sum(), rate)[0]

        half, single = gradient(torch.bfloat16), gradient(torch.float32)
        worst = max(worst, float(((half - single) / single).abs().max()))
    assert worst <= torch.finfo(torch.bfloat16).eps / 2


def test_later_tokens_change_no_earlier_output(kernel: str) -> None:
    x, now = signals(), 6
    other = {name: y.clone() for name, y in x.items()}
    for name in "qkv":
        other[name][:, now:] += 1
    other["times"][:, now:] += 0.5
    before, after = (mean_var(_run(y, variance=True, kernel=kernel)) for y in (x, other))
    assert all(torch.equal(y[:, :now], z[:, :now]) for y, z in zip(before, after, strict=True))
    assert not torch.equal(before[0][:, now], after[0][:, now])


def test_a_tiny_decay_gives_the_same_as_no_decay(kernel: str) -> None:
    def answer(decay: float) -> list[Tensor]:
        given = with_gradients(signals() | {"log_decay": torch.full((2,), decay, dtype=torch.float64)})
        found = mean_var(_run(given, variance=True, kernel=kernel))
        return [*found, *gradients(found, given)]

    for none, little in zip(answer(0.0), answer(-1e-10), strict=True):
        torch.testing.assert_close(little, none, rtol=1e-8, atol=1e-8)


def test_long_sequences_stay_finite_in_float32() -> None:
    """Heads without decay, with slow decay, and with decay that underflows, with and without process noise."""
    x = signals(length=2048, channels=1, heads=3, groups=1)
    x = {name: y[:1] if y.ndim == 4 or name == "times" else y for name, y in x.items()}
    x = {name: y if name == "times" else y.float() for name, y in x.items()}
    x |= {"log_decay": torch.tensor([0.0, -1e-3, -30.0]), "process_noise": torch.tensor([0.0, 1.0, 0.0])}
    given = with_gradients(x)
    found = mean_var(_run(given, variance=True, kernel="chunked"))
    assert all(bool(torch.isfinite(y).all()) for y in (*found, *gradients(found, given)))


@pytest.mark.parametrize("limit", [{"window": 2}, {"log_decay": torch.full((2,), -9.0)}], ids=["window", "decay"])
def test_frequency_gradients_are_accurate_for_short_lags_at_late_times(limit: dict[str, Any], kernel: str) -> None:
    """In float32, a gradient computed from times instead of lags would have no correct digit."""
    x = signals(length=120)
    decay = {name: y.double() for name, y in limit.items() if name == "log_decay"}
    window = {name: y for name, y in limit.items() if name == "window"}
    x |= {"times": x["times"] + 1e6, **decay}
    found = []
    for dtype in (torch.float32, torch.float64):
        given = with_gradients({name: y if name == "times" else y.to(dtype) for name, y in x.items()})
        mean = _run(given, kernel=kernel, **window).mean
        weight = torch.randn(mean.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        found.append(torch.autograd.grad((weight.to(dtype) * mean).sum(), given["frequency"])[0].double())
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-5


def test_kappa_and_its_derivative() -> None:
    rate = torch.tensor([0.0, 1e-12, 1e-3, 0.1, 0.24999, 0.25001, 3.0, 400.0], dtype=torch.float64)
    lag = torch.tensor([[0.0], [1e-6], [1.0], [1e4]], dtype=torch.float64)
    exact = [
        [float(t) if a * t == 0 else -expm1(-2 * a * t) / (2 * a) for a in rate.tolist()] for t in lag[:, 0].tolist()
    ]
    torch.testing.assert_close(kappa(rate, lag), torch.tensor(exact, dtype=torch.float64), rtol=1e-14, atol=0)
    slope = accumulated_noise_slope(rate, lag)
    torch.testing.assert_close(slope[:, 0], -(lag[:, 0] ** 2), rtol=1e-14, atol=0)
    torch.testing.assert_close(slope[:, 4], slope[:, 5], rtol=1e-3, atol=0)
    smooth = rate[2:].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda a: kappa(a, lag[:3]), (smooth,), eps=1e-6, atol=1e-8)
    single = accumulated_noise_slope(rate.float(), lag.float()).double()
    torch.testing.assert_close(single, accumulated_noise_slope(rate, lag), rtol=4e-6, atol=0)


def test_another_observation_never_raises_the_variance(kernel: str) -> None:
    x = signals()
    left = {
        name: y if y.ndim < 2 or name == "frequency" else y[:, [t for t in range(11) if t != 4]]
        for name, y in x.items()
    }
    more, less = (mean_var(_run(y, variance=True, kernel=kernel))[1] for y in (x, left))
    assert bool((more[:, 5:] <= less[:, 4:]).all()) and bool((more[:, 5:] < less[:, 4:]).any())


def test_default_times_continue_from_the_belief(kernel: str) -> None:
    """By default a token takes one unit of time, counted in each sequence."""
    x = signals()
    del x["times"]
    whole = _run(x | {"times": torch.arange(11).expand(2, 11)}, kernel=kernel)
    head = _run(slice_tokens(x, 0, 5), kernel=kernel)
    tail = _run(slice_tokens(x, 5, 11), belief=head.belief, kernel=kernel)
    torch.testing.assert_close(torch.cat([head.mean, tail.mean], 1), whole.mean, rtol=1e-12, atol=1e-12)
    assert torch.equal(tail.belief.times, whole.belief.times)
    packed = _run(x, segments=Segments.of(torch.tensor([[1, 2, 9], [0, 0, 5]])), kernel=kernel)
    torch.testing.assert_close(packed.mean[0, :5], head.mean[0], rtol=1e-12, atol=1e-12)
    assert packed.belief.compact().times.tolist() == [list(range(7)), [0, 0, *range(5)]]


def test_the_belief_has_at_most_window_tokens(kernel: str) -> None:
    x, window = signals(), 4
    prior, mean_var = None, []
    for t in range(11):
        mean, _, prior = _run(slice_tokens(x, t, t + 1), window=window, belief=prior, kernel=kernel)
        assert prior.keys.shape[1] == min(t + 1, window)
        mean_var.append(mean)
    assert prior is not None and prior.positions.tolist() == [[7, 8, 9, 10]] * 2
    torch.testing.assert_close(
        torch.cat(mean_var, 1), _run(x, window=window, kernel=kernel).mean, rtol=1e-12, atol=1e-12
    )


def test_packed_sequences_share_slots_of_their_row(kernel: str) -> None:
    x = {name: y[:1] if y.ndim == 4 or name == "times" else y for name, y in signals().items()}
    belief = _run(x, segments=Segments.packed(torch.tensor([0, 3, 3, 11])), kernel=kernel).belief
    assert isinstance(belief, HistoryBelief) and belief.keys.stride(0) == 0
    assert belief.lengths.tolist() == [3, 0, 8]
    assert belief.newest(2).positions.tolist() == [[1, 2], [-1, -1], [6, 7]]
    assert belief.newest(99).positions.shape == (3, 11)
    last = belief.take(torch.tensor([2])).compact()
    assert torch.equal(last.keys[0], x["k"][0, 3:]) and torch.equal(last.times[0], x["times"][0, 3:])
    half = last.to(torch.bfloat16)
    assert (
        half.keys.dtype == torch.bfloat16 and half.times.dtype == torch.float64 and half.positions.dtype == torch.int64
    )


@pytest.mark.parametrize("window", [None, 3])
def test_two_sided_attention_stays_within_packed_sequences(window: int | None, kernel: str) -> None:
    x = signals()
    options: dict[str, Any] = {"causal": False, "window": window, "variance": True, "kernel": kernel}
    runs = [[1, 6, 11], [0, 2, 2], [1, 0, 6]]
    packed = _run(x, segments=Segments.of(torch.tensor(runs)), **options)
    assert packed.belief is None
    for row, start, stop in runs[::2]:
        part = slice_tokens(x, start, stop)
        alone = _run(
            {name: y[row : row + 1] if y.ndim == 4 or name == "times" else y for name, y in part.items()}, **options
        )
        assert_close_to([y[row : row + 1, start:stop] for y in mean_var(packed)], mean_var(alone), 1e-12)


def test_chunked_stores_nothing_per_pair() -> None:
    """The backward pass stores inputs, rotated inputs, outputs, and two values per query."""
    given, kept = with_gradients(signals(length=512, groups=1)), {}

    def keep(y: Tensor) -> Tensor:
        kept[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes() // 8
        return y

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda y: y):
        _run(given, variance=True, kernel="chunked")
    assert sum(kept.values()) < 30 * given["q"].numel() < 2 * 2 * 512 * 512


class Counting:
    """Compiler backend that counts the operations of forward and backward graphs."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, module: Any, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def count(graph: Any, _: Any) -> Any:
            self.sizes.append(len(graph.graph.nodes))
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=count, bw_compiler=count)(module, inputs)


@pytest.mark.slow
def test_compiled_graph_size_does_not_depend_on_length() -> None:
    sizes = []
    for length in (64, 256):
        torch.compiler.reset()
        counting, given = Counting(), with_gradients(signals(length=length))
        run = torch.compile(partial(_run, kernel="chunked"), fullgraph=True, backend=counting, dynamic=False)
        run(given).mean.sum().backward()
        sizes.append(counting.sizes)
    assert len(sizes[0]) == 2 and sizes[0] == sizes[1]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "odd key width": ({"q": torch.zeros(2, 3, 2, 5), "k": torch.zeros(2, 3, 2, 5)}, "`q` has 5 columns"),
    "odd value width": ({"v": torch.zeros(2, 3, 2, 3)}, "`v` has 3 columns"),
    "values of another width": ({"v": torch.zeros(2, 3, 2, 6)}, "`value_dynamics` is None"),
    "value dynamics as a tuple": ({"value_dynamics": ()}, "`value_dynamics` is a tuple"),
    "positive log decay": ({"log_decay": torch.ones(2)}, "`log_decay` has a maximum of 1"),
    "frequencies of another width": ({"frequency": torch.zeros(2, 3)}, "`frequency`"),
    "negative noise": ({"query_noise": -torch.ones(2)}, "`query_noise` has a minimum of -1"),
    "zero noises": ({"key_noise": torch.zeros(2), "query_noise": torch.zeros(2)}, "`key_noise + query_noise`"),
    "zero key noise with variance": ({"key_noise": torch.zeros(2), "variance": True}, "`key_noise` has a minimum of 0"),
    "zero nu": ({"nu": 0.0}, "`nu` is 0.0"),
    "temperature per channel": ({"temperature": torch.ones(4)}, "`temperature`"),
    "negative floor": ({"floor": -0.1}, "`floor` is -0.1"),
    "unknown weight": ({"weight": "student"}, "`weight` is 'student'"),
    "zero window": ({"window": 0}, "`window` is 0"),
    "belief without causal": ({"causal": False, "belief": ()}, "`belief` is given"),
    "decreasing times": ({"times": torch.tensor([[0.0, 2.0, 1.0]]).expand(2, 3)}, "`times` decreases"),
    "times of another length": ({"times": torch.zeros(2, 4)}, "`times` has shape [2, 4]"),
    "times in half precision": ({"times": torch.zeros(2, 3).half()}, "`times` has dtype torch.float16"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_arguments_raise(case: str) -> None:
    changes, message = BAD[case]
    good: dict[str, Any] = {name: torch.zeros(2, 3, 2, 4) for name in "qkv"}
    good |= {"log_decay": -torch.ones(2), "frequency": torch.ones(2, 2)}
    good |= {name: torch.ones(2) for name in ("process_noise", "key_noise", "query_noise")}
    attend(**good)
    with pytest.raises(ArgumentError) as caught:
        attend(**(good | changes))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_times_before_those_of_the_belief_raise() -> None:
    x = signals()
    belief = _run(x).belief
    with pytest.raises(ArgumentError, match="`times` decreases"):
        _run(x, belief=belief)
