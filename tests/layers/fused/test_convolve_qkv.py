"""Short convolution with the unit norm of queries and keys: both forms against float64, and its step."""

from __future__ import annotations

import pytest
import torch
from forms import DEVICE, check_second_derivatives, compare_forms, form

from kalmix.layers import GatedDeltaNet, GatedKalmaNet
from kalmix.layers.fused import (
    Packing,
    QueryKeyColumns,
    UnitNorm,
    convolve_qkv,
    convolve_qkv_step,
    l2_normalize,
    short_convolution,
)
from kalmix.segments import Segments
from kalmix.steps import Slots

pytest.importorskip("triton")
ROWS = [[1, 2, 9], [0, 0, 2], [0, 2, 3], [0, 3, 3], [0, 5, 11], [1, 0, 1]]
NORM = UnitNorm(4, 0.5)


def packing_of(rows):
    segments = Segments.of(torch.tensor(rows, device=DEVICE))
    return Packing(segments, segments.segment_ids(2, 11))


def inputs(columns, values=5, *, taps=4, sequences=2):
    torch.manual_seed(0)
    channels = 2 * columns.keys + values
    state = torch.randn(sequences, taps - 1, channels)
    return [torch.randn(2, 11, channels), torch.randn(channels, taps), torch.randn(channels), state]


def part(columns, packing=None, activation="silu"):
    return lambda *tensors: [y for y in convolve_qkv(*tensors, packing, activation, columns) if y.numel()]


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    """Let sequences of a few tokens and channels span several programs."""
    from kalmix.layers.fused.triton import convolution_launch

    for name in ("FORWARD", "BACKWARD"):
        sizes = getattr(convolution_launch, name)
        monkeypatch.setattr(convolution_launch, name, sizes._replace(channels=32, unroll=4, chunk=4))


@pytest.mark.parametrize(
    ("count", "norm", "rows"),
    [
        (8, NORM, None),
        (8, NORM, ROWS),
        (40, UnitNorm(8, 0.5), ROWS),  # more columns than a block has
        (9, UnitNorm(3, 0.5), ROWS),  # heads are padded to 4 columns
        (64, UnitNorm(64), ROWS),  # a head has more columns than a block should have
        (8, UnitNorm(8, 0.5, 1e-2, eps_on_length=True), ROWS),
        (8, UnitNorm(), ROWS),
    ],
)
@pytest.mark.slow
def test_queries_and_keys_have_unit_length(count, norm, rows):
    columns = QueryKeyColumns(count, norm)
    sequences = 2 if rows is None else len(ROWS)
    compare_forms(part(columns, rows and packing_of(rows)), inputs(columns, sequences=sequences))


def test_result_is_that_of_the_convolution_and_the_norm_after_it():
    columns = QueryKeyColumns(8, NORM)
    x, weight, bias, state = (y.double() for y in inputs(columns))
    y, after = short_convolution(x, weight, bias, state, None, "silu")
    q, k, v = (z.unflatten(-1, (-1, 4)) for z in y[..., :20].split([8, 8, 4], dim=-1))
    expected = (l2_normalize(q, 0.5).flatten(-2), l2_normalize(k).flatten(-2), v.flatten(-2), after)
    got = list(convolve_qkv(x, weight, bias, state, None, "silu", columns))
    got[2] = got[2][..., :4]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_fewer_taps_without_activation(taps):
    columns = QueryKeyColumns(8, NORM)
    *given, state = inputs(columns, taps=taps, sequences=len(ROWS))
    compare_forms(part(columns, packing_of(ROWS), None), [*given, state if taps > 1 else None])


def test_half_precision():
    columns = QueryKeyColumns(8, NORM)
    compare_forms(part(columns, packing_of(ROWS)), inputs(columns, sequences=len(ROWS)), torch.bfloat16)


def test_heads_wider_than_a_program(monkeypatch):
    monkeypatch.setattr("kalmix.layers.fused.convolution.MAX_WIDTH", 2)
    columns = QueryKeyColumns(8, NORM)
    compare_forms(part(columns), inputs(columns))


def test_second_derivatives():
    columns = QueryKeyColumns(4, UnitNorm(2, 0.5))
    check_second_derivatives(part(columns, packing_of(ROWS)), inputs(columns, 1, sequences=len(ROWS)))


@pytest.mark.parametrize("output", range(3))
def test_gradient_of_one_output_alone(output):
    columns = QueryKeyColumns(8, NORM)
    compare_forms(lambda *tensors: [convolve_qkv(*tensors, None, "silu", columns)[output]], inputs(columns))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["eager", "triton"])
def test_sequences_are_isolated(name, bad):
    columns, packing = QueryKeyColumns(8, NORM), packing_of(ROWS)
    x, weight, bias, state = (y.to(DEVICE) for y in inputs(columns, sequences=len(ROWS)))
    spoilt = x.clone()
    spoilt[0, 3:] = spoilt[1, 9:] = spoilt[1, 1] = bad  # sequence 4 and gaps
    others = packing.ids.ge(0) & packing.ids.ne(4)
    found = []
    with form(name):
        for given in (x, spoilt):
            leaf = given.clone().requires_grad_()
            q, k, v, _ = convolve_qkv(leaf, weight, bias, state, packing, "silu", columns)
            y = torch.cat([q, k, v], dim=-1)
            (grad,) = torch.autograd.grad(y[others].pow(3).sum(), leaf)
            assert y[packing.ids < 0].eq(0).all() and grad[packing.ids < 0].eq(0).all()
            found.append([y[others], grad[others]])
    for clean, other in zip(*found, strict=True):
        assert torch.equal(clean, other)


@pytest.mark.slow
def test_compiled_training():
    columns = QueryKeyColumns(8, NORM)
    given = [y.to(DEVICE).requires_grad_() for y in inputs(columns)]

    def function(*tensors):
        q, k, v, final = convolve_qkv(*tensors, None, "silu", columns)
        return (q * k).square().sum() + v.square().sum() + final.pow(3).sum()

    expected = torch.autograd.grad(function(*given), given)
    with form("triton"):
        found = torch.autograd.grad(torch.compile(function, backend="aot_eager", fullgraph=True)(*given), given)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("make", [GatedDeltaNet, GatedKalmaNet])
def test_layers_use_one_kernel(make):
    torch.manual_seed(0)
    layer = make(8, heads=2, head_dim=4).to(DEVICE)
    x, graphs = torch.randn(2, 6, 8, device=DEVICE), []
    project = torch.compile(
        lambda y: layer.project(y, None, None, None),
        backend=lambda graph, _: graphs.append(graph) or graph.forward,
    )
    expected = layer.project(x, None, None, None)
    with form("triton"):
        found = project(x)
    torch.testing.assert_close(found, expected)
    code = "".join(graph.code for graph in graphs)
    assert code.count("kalmix.short_convolution") == 1 and "sqrt" not in code


@pytest.mark.parametrize("norm", [NORM, UnitNorm(8, 0.5, 1e-2, eps_on_length=True), UnitNorm()])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_steps_normalise_queries_and_keys(norm, dtype):
    columns = QueryKeyColumns(8, norm)
    x, weight, bias, _ = (y.to(DEVICE, dtype) for y in inputs(columns))
    pool = torch.randn(4, 3, x.shape[-1], device=DEVICE).to(dtype)
    slots = Slots(torch.tensor([2, -1], device=DEVICE), torch.tensor([3, -1], device=DEVICE))
    results = []
    for kernel in ("torch", "triton"):
        wide = torch.float64 if kernel == "torch" else dtype
        after = pool.to(wide, copy=True)
        arguments = (y.to(wide) for y in (x[:, :1], weight, bias))
        results.append([*convolve_qkv_step(*arguments, after, slots, "silu", columns, kernel), after])
    tolerance = 20 * torch.finfo(dtype).eps
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
