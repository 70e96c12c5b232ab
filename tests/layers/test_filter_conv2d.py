"""The filter over images compared with a loop over pixels, and with `attend` along a line."""

from __future__ import annotations

from math import exp, expm1

import pytest
import torch
import torch.nn.functional as F

from kalmix import ArgumentError
from kalmix.layers import FilterConv2d
from kalmix.layers.filter_conv2d import path_statistics
from kalmix.ops import attend

from .conftest import shake

F64 = torch.float64


def _layer(size: int = 3, **options: int) -> FilterConv2d:
    torch.manual_seed(0)
    layer = FilterConv2d(2, 3, size, **options).double()
    shake(layer)
    return layer


def _grown(rate: float, lag: float) -> float:
    return -expm1(-2 * rate * lag) / (2 * rate) if rate * lag else lag


def test_against_a_loop_over_pixels() -> None:
    """Compute every number by its formula, with both orders of a path."""
    layer, image = _layer(heads=2, head_dim=2), torch.randn(1, 2, 4, 5, dtype=F64)
    z = layer.in_proj(image)[0].unflatten(0, (2, 2, 2))
    want = torch.zeros_like(z)
    noises = (layer.log_rate, layer.log_process_noise, layer.log_key_noise, layer.log_query_noise)
    rate, process, key, query = (x.exp().tolist() for x in noises)
    for h in range(2):
        for y in range(4):
            for x in range(5):
                scores, moved = [], []
                own = torch.complex(*z[h, :, :, y, x])
                for v in range(max(0, y - 1), min(4, y + 2)):
                    for u in range(max(0, x - 1), min(5, x + 2)):
                        offset = torch.tensor([x - u, v - y], dtype=F64)  # rows are counted downwards
                        across, upwards = (layer.axes[h] @ offset + layer.shift[h]).tolist()
                        i, j = (0 if across > 0 else 1), (2 if upwards > 0 else 3)
                        across, upwards = abs(across), abs(upwards)
                        first = process[i][h] * _grown(rate[i][h], across), process[j][h] * _grown(rate[j][h], upwards)
                        fades = exp(-rate[i][h] * across), exp(-rate[j][h] * upwards)
                        x_then_y = fades[1] ** 2 * first[0] + first[1]
                        y_then_x = fades[0] ** 2 * first[1] + first[0]
                        reach = fades[0] * fades[1]
                        V = (x_then_y + y_then_x) / 2 + key[h] * reach**2 + query[h]
                        angle = layer.frequency[i, h] * across + layer.frequency[j, h] * upwards
                        carried = torch.polar(reach * torch.ones_like(angle), angle) * torch.complex(*z[h, :, :, v, u])
                        scores.append(-(V + (own - carried).abs().square().sum()).log())
                        moved.append(carried)
                mean = (torch.stack(scores).softmax(0)[:, None] * torch.stack(moved)).sum(0)
                want[h, :, :, y, x] = torch.stack([mean.real, mean.imag])
    torch.testing.assert_close(layer(image)[0], layer.out_proj(want.flatten(0, 2)), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("axis", "sides"), [("x", (0, 1)), ("y", (3, 2))])
def test_on_a_line_it_is_attend_from_either_side(axis: str, sides: tuple[int, int]) -> None:
    """Combine the estimates from both sides by their precisions, without counting the pixel itself twice."""
    layer = _layer(5, heads=2, head_dim=2)
    with torch.no_grad():
        layer.axes.copy_(torch.eye(2))
        layer.shift.zero_()
        layer.log_query_noise.fill_(-1e300)  # `attend` leaves it out of precisions
    z = torch.randn(1, 8, 1, 9, dtype=F64)
    rate, process, key = (x.exp() for x in (layer.log_rate, layer.log_process_noise, layer.log_key_noise))
    line = z.flatten(2).mT.unflatten(2, (2, -1))
    evidence, total = -line / key[:, None], -1 / key[:, None]
    for side, order in zip(sides, (slice(None), torch.arange(8, -1, -1)), strict=True):
        numbers = {"log_decay": -rate[side], "frequency": layer.frequency[side], "process_noise": process[side]}
        x = line[:, order]
        found = attend(x, x, x, **numbers, key_noise=key, query_noise=0 * key, window=3, variance=True)
        precision = 1 / found.variance[:, order]
        evidence, total = evidence + precision * found.mean[:, order], total + precision
    want = (evidence / total).flatten(2).mT[:, :, None]
    got = layer.estimate(z) if axis == "x" else layer.estimate(z.mT).mT
    torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


def test_small_inputs_give_a_convolution_and_no_dynamics_a_mean() -> None:
    """For z much smaller than V, the deviation from a convolution is of order z^2 / V, about 1e-12 here."""
    layer = _layer(3, heads=1, head_dim=2)
    a, b = torch.randn(2, 1, 4, 5, 6, dtype=F64).unbind(0)
    for size, linear in ((1e-7, True), (1.0, False)):
        apart, together = layer.estimate(size * a) + layer.estimate(size * b), layer.estimate(size * (a + b))
        assert (float((together - apart).detach().abs().max()) < 1e-9 * size) == linear
    with torch.no_grad():
        for raw in (layer.log_rate, layer.log_process_noise):
            raw.fill_(-1e300)
        layer.frequency.zero_()
    mean = F.avg_pool2d(a, 3, 1, 1, count_include_pad=False)
    torch.testing.assert_close(layer.estimate(1e-7 * a) * 1e7, mean, atol=1e-10, rtol=0)


def test_rotated_axes_equal_a_rotated_image() -> None:
    """A quarter turn of a head's axes and sides equals a quarter turn of the image."""
    layer, z = _layer(3, heads=1), torch.randn(1, 4, 5, 5, dtype=F64)
    with torch.no_grad():
        layer.shift.zero_()
    want = layer.estimate(z).rot90(dims=(2, 3))
    with torch.no_grad():  # right becomes up
        layer.axes.copy_(layer.axes @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=F64))
    torch.testing.assert_close(layer.estimate(z.rot90(dims=(2, 3))), want, atol=1e-12, rtol=0)


def test_gradients_reach_every_parameter() -> None:
    layer, x = _layer(3, heads=1, head_dim=1), torch.randn(1, 2, 3, 3, dtype=F64, requires_grad=True)
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(image: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(names, given, strict=True)), (image,))

    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)


def test_variance_is_no_less_than_its_noise_and_grows_along_a_path() -> None:
    one, still = torch.ones(4, 1, dtype=F64), torch.zeros(4, 1, 1, dtype=F64)
    path = torch.tensor([[[x, y] for x, y in ((0.0, 0.0), (1.0, 0.0), (0.0, -1.0), (1.0, 1.0), (9.0, 9.0))]], dtype=F64)
    _, _, V = path_statistics(0.2 * one, still, one, 0.1 * one[0], 0.3 * one[0], path)
    assert V[0, 0] == 0.4 and V[0, 1] == V[0, 2] and (V[0, 1:].diff() >= 0).all()
    assert V[0, -1] == pytest.approx(1 / 0.4 + 0.3, rel=0.03)  # stationary variance


def test_half_precision_and_bad_input() -> None:
    layer = FilterConv2d(1, 1, 5)
    image = torch.rand(2, 1, 3, 7)  # smaller than the kernel along one axis
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(image)
    torch.testing.assert_close(half.float(), layer(image), atol=0.05, rtol=0.05)
    with pytest.raises(ArgumentError, match="kernel_size"):
        FilterConv2d(1, 1, 4)
    with pytest.raises(ArgumentError, match="`x`"):
        layer(torch.rand(2, 3, 4, 4))


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (torch.zeros(1, 1, 4, 4, dtype=torch.uint8), "has dtype torch.uint8; expected torch.float"),
        (torch.zeros(1, 1, 4, 4, dtype=F64), "has dtype torch.float64; expected torch.float32"),
        (torch.zeros(1, 1, 4, 4, device="meta"), "is on meta; expected a tensor on cpu"),
        (torch.zeros(1, 1, 0, 4), "expected at least one row and one column"),
    ],
)
def test_wrong_images_are_named(image: torch.Tensor, problem: str) -> None:
    with pytest.raises(ArgumentError, match=f"`x` .*{problem}"):
        FilterConv2d(1, 1, 3)(image)


def test_autocast_does_not_convert_float64() -> None:
    image = torch.zeros(1, 1, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ArgumentError, match=r"`x` has dtype torch.float64"):
            FilterConv2d(1, 1, 3)(image.double())
        with pytest.raises(ArgumentError, match=r"`x` has dtype torch.float32; expected torch.float64"):
            FilterConv2d(1, 1, 3).double()(image)
        assert FilterConv2d(1, 1, 3)(image.half()).dtype == torch.bfloat16
        assert FilterConv2d(1, 1, 3).double()(image.double()).dtype == F64


def test_an_empty_batch_gives_an_empty_batch() -> None:
    assert FilterConv2d(2, 3, 3)(torch.zeros(0, 2, 4, 5)).shape == (0, 3, 4, 5)


def test_images_keep_their_size_and_initial_noises_are_small() -> None:
    layer = FilterConv2d(2, 3, 5)
    assert layer(torch.randn(1, 2, 6, 7)).shape == (1, 3, 6, 7)
    for noise in (layer.log_process_noise, layer.log_key_noise, layer.log_query_noise):
        torch.testing.assert_close(noise.exp(), torch.full_like(noise, 0.02))
