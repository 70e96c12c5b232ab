"""Short convolution: both forms against float64, for any packing, state and split."""

from __future__ import annotations

import pytest
import torch
from forms import DEVICE, check_second_derivatives, compare_forms, form

from kalmix.layers.fused import Packing, short_convolution
from kalmix.segments import Segments

pytest.importorskip("triton")
# Out of order, with gaps; sequences shorter than the taps, an empty one, and adjacent ones.
ROWS = [[1, 2, 9], [0, 0, 2], [0, 2, 3], [0, 3, 3], [0, 5, 11], [1, 0, 1]]
LENGTH = 11


def packing_of(rows, length=LENGTH):
    segments = Segments.of(torch.tensor(rows, device=DEVICE))
    return Packing(segments, segments.segment_ids(2, length))


def inputs(taps, *, channels=5, bias=True, sequences=None, length=LENGTH):
    torch.manual_seed(taps)
    state = None if sequences is None else torch.randn(sequences, taps - 1, channels)
    offset = torch.randn(channels) if bias else None
    return [torch.randn(2, length, channels), torch.randn(channels, taps), offset, state]


def convolution(packing=None, activation="silu"):
    def part(*tensors):
        return [y for y in short_convolution(*tensors, packing, activation) if y.numel()]

    return part


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Let sequences of a few tokens and channels span several programs."""
    from kalmix.layers.fused.triton import convolution_launch

    for name in ("FORWARD", "BACKWARD"):
        sizes = getattr(convolution_launch, name)
        monkeypatch.setattr(convolution_launch, name, sizes._replace(unroll=4, chunk=4))


@pytest.mark.parametrize(("taps", "stateful"), [(1, False), *((n, x) for n in (2, 3, 4) for x in (False, True))])
def test_batch_rows_are_sequences(taps, stateful):
    compare_forms(convolution(), inputs(taps, sequences=2 if stateful else None))


@pytest.mark.parametrize(("taps", "stateful"), [(1, False), *((n, x) for n in (2, 3, 4) for x in (False, True))])
def test_packed_sequences(taps, stateful):
    compare_forms(convolution(packing_of(ROWS)), inputs(taps, sequences=len(ROWS) if stateful else None))


@pytest.mark.parametrize("rows", [None, ROWS])
def test_without_bias_and_activation(rows):
    compare_forms(convolution(rows and packing_of(rows), None), inputs(4, bias=False))


@pytest.mark.parametrize("length", [1, 2, 5])
def test_short_rows(length):
    """The state of a row shorter than the taps keeps inputs of the old one."""
    compare_forms(convolution(), inputs(4, sequences=2, length=length))
    compare_forms(convolution(), inputs(4, length=length))


def test_half_precision():
    compare_forms(convolution(packing_of(ROWS)), inputs(4, sequences=len(ROWS)), torch.bfloat16)


@pytest.mark.slow
def test_more_channels_than_a_program_has():
    compare_forms(convolution(packing_of(ROWS)), inputs(4, channels=300, sequences=len(ROWS)))


def test_more_taps_than_the_kernels_have():
    compare_forms(convolution(packing_of(ROWS)), inputs(6, sequences=len(ROWS)))


@pytest.mark.parametrize("rows", [None, ROWS])
def test_columns_of_a_wider_tensor(rows):
    x, weight, bias, state = inputs(4, sequences=2 if rows is None else len(ROWS))
    wide, part = torch.randn(2, LENGTH, 13), convolution(rows and packing_of(rows))
    compare_forms(lambda wide, *rest: part(wide[..., 3:8], *rest), [wide, weight, bias, state])
    compare_forms(part, [x.mT.contiguous().mT, weight.mT.contiguous().mT, bias, state])


@pytest.mark.parametrize("name", ["eager", "triton"])
def test_any_split_gives_the_same_result(name):
    x, weight, bias, state = (y.to(DEVICE) for y in inputs(4, sequences=2))
    with form(name):
        whole, final = short_convolution(x, weight, bias, state, None, "silu")
        for cut in range(LENGTH + 1):
            first, middle = short_convolution(x[:, :cut], weight, bias, state, None, "silu")
            second, last = short_convolution(x[:, cut:], weight, bias, middle, None, "silu")
            torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
            torch.testing.assert_close(last, final)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["eager", "triton"])
def test_sequences_are_isolated(name, bad):
    """NaN and infinity in a sequence, its state, or between sequences reach no other, nor their gradients."""
    packing = packing_of(ROWS)
    x, weight, bias, state = (y.to(DEVICE) for y in inputs(4, sequences=len(ROWS)))
    spoilt, spoilt_state = x.clone(), state.clone()
    spoilt[0, 3:] = spoilt[1, 9:] = spoilt[1, 1] = bad  # sequence 4 and gaps
    spoilt_state[4] = bad
    others = packing.ids.ge(0) & packing.ids.ne(4)
    kept = [0, 1, 2, 3, 5]
    found = []
    with form(name):
        for given in ((x, state), (spoilt, spoilt_state)):
            leaves = [y.clone().requires_grad_() for y in given]
            y, final = short_convolution(leaves[0], weight, bias, leaves[1], packing, "silu")
            grads = torch.autograd.grad(y[others].square().sum() + final[kept].square().sum(), leaves)
            assert y[packing.ids < 0].eq(0).all() and grads[0][packing.ids < 0].eq(0).all()
            found.append([y[others], final[kept], grads[0][others], grads[1][kept]])
    for clean, other in zip(*found, strict=True):
        assert torch.equal(clean, other)


@pytest.mark.parametrize("rows", [None, ROWS])
def test_second_derivatives(rows):
    packing = rows and packing_of(rows)
    check_second_derivatives(convolution(packing), inputs(3, channels=2, sequences=2 if rows is None else len(ROWS)))


def test_gradient_of_the_final_state_alone():
    x, weight, bias, state = (y.to(DEVICE).requires_grad_() for y in inputs(4, sequences=2, length=2))
    with form("triton"):
        _, final = short_convolution(x, weight, bias, state)
        dx, dweight, dstate = torch.autograd.grad(final.sum(), [x, weight, state])
    assert dx.eq(1).all() and dweight.eq(0).all()
    assert dstate[:, 2].eq(1).all() and dstate[:, :2].eq(0).all()


def test_compiled_convolution_is_a_custom_op():
    x, weight, bias, _ = (None if y is None else y.to(DEVICE) for y in inputs(4))
    graphs = []
    compiled = torch.compile(
        lambda *tensors: short_convolution(*tensors)[0] * 2,
        backend=lambda graph, _: graphs.append(graph) or graph.forward,
        fullgraph=True,
    )
    with form("triton"):
        found = compiled(x, weight, bias)
    torch.testing.assert_close(found, short_convolution(x, weight, bias)[0] * 2)
    assert "kalmix.short_convolution" in graphs[0].code


@pytest.mark.parametrize("rows", [None, ROWS])
def test_compiled_training(rows):
    packing = rows and packing_of(rows)
    given = [y.to(DEVICE).requires_grad_() for y in inputs(4, sequences=2 if rows is None else len(ROWS))]

    def function(*tensors):
        y, final = short_convolution(*tensors, packing, "silu")
        return y.square().sum() + final.pow(3).sum()

    expected = torch.autograd.grad(function(*given), given)
    with form("triton"):
        found = torch.autograd.grad(torch.compile(function, backend="aot_eager", fullgraph=True)(*given), given)
    torch.testing.assert_close(found, expected)
