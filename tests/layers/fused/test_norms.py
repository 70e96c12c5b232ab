"""Norms and gated products: both forms against float64."""

from __future__ import annotations

import pytest
import torch
from forms import DEVICE, check_second_derivatives, compare_forms, form, results

from kalmix.layers.fused import Gate, Norm, add_rms_norm, gated_skip, l2_normalize, rms_norm, softplus_precision, swiglu

pytest.importorskip("triton")
SHAPES = [(1,), (3, 1), (2, 5, 3, 12), (4, 130), (1, 1, 2, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_length", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_unit_norm(shape, on_length, dtype):
    torch.manual_seed(0)
    options = {"scale": 0.3, "eps": 1e-2, "eps_on_length": on_length}
    compare_forms(lambda x: [l2_normalize(x, **options)], [torch.randn(shape)], dtype)


def test_unit_norm_reads_columns_of_a_projection_in_place():
    torch.manual_seed(0)
    projection = torch.randn(2, 5, 30)

    def part(x):
        q, k, _ = x.split([12, 12, 6], dim=-1)
        return [l2_normalize(y.unflatten(-1, (3, 4)), scale) for y, scale in ((q, 0.5), (k, 1.0))]

    compare_forms(part, [projection])
    compare_forms(part, [projection.mT.contiguous().mT])
    with form("triton"):
        assert all(x.is_contiguous() for x in part(projection.to(DEVICE)))


@pytest.mark.parametrize("name", ["eager", "triton"])
@pytest.mark.parametrize("on_length", [False, True])
def test_zero_vectors_stay_zero_and_have_finite_gradients(name, on_length):
    x = torch.zeros(2, 5, device=DEVICE).requires_grad_()
    with form(name):
        y = l2_normalize(x, eps_on_length=on_length)
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert y.eq(0).all() and grad.isfinite().all()


@pytest.mark.parametrize("on_length", [False, True])
def test_unit_norm_has_second_derivatives(on_length):
    torch.manual_seed(0)
    check_second_derivatives(lambda x: [l2_normalize(x, 0.7, 0.1, eps_on_length=on_length)], [torch.randn(4, 3)])


GATES = [None, ("silu", False), ("sigmoid", False), ("silu", True), ("sigmoid", True)]


def normed(width, options):
    def part(x, weight, gate=None):
        return [rms_norm(x, weight, Norm(width, 1e-3), None if gate is None else Gate(gate, *options))]

    return part


def norm_inputs(shape, weight, options):
    torch.manual_seed(0)
    return [torch.randn(shape), 1 + torch.randn(weight) / 4, *([] if options is None else [torch.randn(shape)])]


@pytest.mark.parametrize("options", GATES)
@pytest.mark.parametrize(("shape", "weight", "width"), [((2, 3, 24), 8, 8), ((7, 15), 15, 5), ((1, 1), 1, 1)])
def test_rms_norm(shape, weight, width, options):
    """The weight is shared by groups of columns, or each group has its own."""
    compare_forms(normed(width, options), norm_inputs(shape, weight, options))


@pytest.mark.parametrize("options", GATES[:4])
def test_rms_norm_in_half_precision(options):
    compare_forms(normed(8, options), norm_inputs((5, 16), 8, options), torch.bfloat16)


def test_gradients_of_the_weight_cover_rows_of_many_programs():
    """More row blocks than programs of the backward pass."""
    from kalmix.layers.fused.triton import rms, rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rms, "MAX_PARTIALS", 3)
        patch.setattr(rows, "BLOCK", 16)
        compare_forms(normed(8, ("silu", False)), norm_inputs((37, 16), 8, ("silu", False)))
        compare_forms(normed(8, ("silu", True)), norm_inputs((37, 16), 16, ("silu", True)))


@pytest.mark.parametrize("options", [None, ("silu", False), ("sigmoid", True)])
def test_rms_norm_has_second_derivatives(options):
    check_second_derivatives(normed(6, options), norm_inputs((3, 6), 6, options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 2, 20), (1, 1)])
def test_residual_and_norm(shape, dtype):
    x, weight, residual = norm_inputs(shape, shape[-1], GATES[1])
    compare_forms(lambda *tensors: add_rms_norm(*tensors, 1e-3), [x, residual, weight], dtype)


@pytest.mark.parametrize("used", [0, 1])
def test_gradients_of_the_sum_or_its_norm_alone(used):
    x, weight, residual = norm_inputs((3, 8), 8, GATES[1])
    compare_forms(lambda x, residual: add_rms_norm(x, residual, weight.to(x), 1e-3)[used : used + 1], [x, residual])


def test_residual_and_norm_have_second_derivatives():
    x, weight, residual = norm_inputs((3, 6), 6, GATES[1])
    check_second_derivatives(lambda *tensors: add_rms_norm(*tensors, 1e-2), [x, residual, weight])


@pytest.mark.parametrize("name", ["eager", "triton"])
def test_wide_residual_of_a_narrow_output(name):
    """Under autocast the sum stays float32, and each input gets a gradient of its own dtype."""
    x, weight, residual = (y.to(DEVICE).requires_grad_() for y in norm_inputs((3, 8), 8, GATES[1]))
    narrow = x.detach().bfloat16().requires_grad_()
    expected = torch.autograd.grad(add_rms_norm(narrow.float(), residual, weight, 1e-5)[1].pow(3).sum(), residual)[0]
    with form(name), torch.autocast(DEVICE, torch.bfloat16):
        total, y = add_rms_norm(narrow, residual, weight, 1e-5)
        grads = torch.autograd.grad(y.float().pow(3).sum() + total.sum(), [narrow, residual, weight])
    assert [z.dtype for z in (total, y, *grads)] == [
        *(torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
    ]
    assert torch.equal(total, narrow.float() + residual)
    torch.testing.assert_close(grads[0].float(), grads[1], rtol=0.01, atol=0.0)
    torch.testing.assert_close(grads[1], expected + 1, rtol=0.03, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 2, 10), (2, 600), (1, 2)])
def test_swiglu(shape, dtype):
    torch.manual_seed(0)
    compare_forms(lambda x: [swiglu(x)], [torch.randn(shape)], dtype)


def test_swiglu_accepts_strided_inputs_and_has_second_derivatives():
    torch.manual_seed(0)
    compare_forms(lambda x: [swiglu(x.mT)], [torch.randn(4, 3)])
    check_second_derivatives(lambda x: [swiglu(x)], [torch.randn(3, 4)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 9, 5), (3, 300), (1, 1)])
def test_precision(shape, dtype):
    """Small variances, too, where log(1 + exp(raw)) cancels."""
    torch.manual_seed(0)
    raw = (8 * torch.randn(shape)).to(DEVICE, dtype)
    exact = raw.double().requires_grad_()
    expected = softplus_precision(exact, 1e-4)
    for name in ("eager", "triton"):
        leaf = raw.clone().requires_grad_()
        with form(name):
            found = softplus_precision(leaf, 1e-4)
            found.log().sum().backward()
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-5, atol=0.0)
        (grad,) = torch.autograd.grad(expected.log().sum(), exact, retain_graph=True)
        error = 1e-4 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(leaf.grad.double(), grad, rtol=error, atol=1e-7)


@pytest.mark.parametrize("name", ["eager", "triton"])
def test_precision_of_extreme_numbers(name):
    raw = torch.tensor([-torch.inf, -200.0, 200.0, torch.inf, torch.nan], device=DEVICE)
    with form(name):
        found = softplus_precision(raw, 0.5)
    torch.testing.assert_close(found.tolist(), [2.0, 2.0, 1 / 200.5, 0.0, torch.nan], equal_nan=True)


def test_precision_of_views_and_second_derivatives():
    torch.manual_seed(0)
    wide = torch.randn(2, 3, 8)
    compare_forms(lambda x: [softplus_precision(x[..., 4:], 0.1)], [wide])
    compare_forms(lambda x: [softplus_precision(x.mT, 0.1)], [wide])
    check_second_derivatives(lambda x: [softplus_precision(x, 0.1)], [wide[0]])


def skip_inputs(shape):
    torch.manual_seed(0)
    return [torch.randn(shape), torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 9, 5), (3, 300), (1, 1)])
def test_gated_skip(shape, dtype):
    compare_forms(lambda *tensors: [gated_skip(*tensors)], skip_inputs(shape), dtype)


def test_gated_skip_reads_views_in_place_and_has_second_derivatives(monkeypatch):
    from kalmix.layers.fused.triton import skip

    monkeypatch.setattr(skip, "MAX_PARTIALS", 2)
    x, _, scale, _ = skip_inputs((2, 20, 3))
    compare_forms(
        lambda x, scale, wide: [gated_skip(x, wide[..., :3], scale, wide[..., 3:])], [x, scale, x.repeat(1, 1, 2)]
    )
    compare_forms(lambda x, *rest: [gated_skip(x, *rest)], [x[None], *skip_inputs((2, 20, 3))[1:]])
    check_second_derivatives(lambda *tensors: [gated_skip(*tensors)], skip_inputs((4, 3)))


def test_rms_norm_accepts_strided_inputs_and_gates_that_broadcast():
    x, weight, gate = norm_inputs((3, 2, 8), 4, ("silu", False))
    part = normed(4, ("silu", False))
    compare_forms(part, [x.mT.contiguous().mT, weight, gate.transpose(0, 1).contiguous().transpose(0, 1)])
    compare_forms(part, [x, weight, gate[0]])


@pytest.mark.parametrize("name", ["eager", "triton"])
def test_norms_under_autocast_return_its_dtype(name):
    x, weight, gate = (y.to(DEVICE) for y in norm_inputs((2, 8), 8, GATES[1]))
    with form(name), torch.autocast(DEVICE, torch.bfloat16):
        (y,) = normed(8, GATES[1])(x, weight, gate)
        assert rms_norm(x.double(), weight.double(), Norm(8, 0.0)).dtype == torch.float64
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), normed(8, GATES[1])(x, weight, gate)[0], rtol=0.01, atol=0.01)


@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_transforms_run_the_eager_form(transform):
    x = torch.randn(3, 4, device=DEVICE)
    with form("triton"):
        if transform == "vmap":
            found = torch.vmap(l2_normalize)(x)
        else:
            found = torch.func.jvp(l2_normalize, (x,), (torch.ones_like(x),))[0]
    torch.testing.assert_close(found, l2_normalize(x))


def record_graphs(function):
    """Return the function, compiled by a backend that runs the graphs as they are, and the list of these graphs."""
    graphs = []

    def record(graph, _):
        graphs.append(graph)
        return graph.forward

    return torch.compile(function, backend=record, fullgraph=True), graphs


def test_compiled_norms_without_gate_are_traced():
    """torch.compile sees PyTorch operations, which it fuses with their neighbours."""
    x, weight = (y.to(DEVICE) for y in norm_inputs((2, 8), 8, None))

    def function(x, weight):
        y = l2_normalize(rms_norm(x, weight, Norm(8, 1e-5)), 0.5)
        return swiglu(add_rms_norm(y, x, weight, 1e-5)[1])

    compiled, graphs = record_graphs(function)
    with form("triton"):
        found = compiled(x, weight)
    torch.testing.assert_close(found, function(x, weight))
    assert "kalmix" not in graphs[0].code


@pytest.mark.parametrize("options", GATES[1:])
def test_compiled_norms_with_a_gate_run_in_triton(options):
    x, weight, gate = (y.to(DEVICE) for y in norm_inputs((3, 16), 8, options))
    part = normed(8, options)
    compiled, graphs = record_graphs(lambda *inputs: part(*inputs)[0])
    with form("triton"):
        found = compiled(x, weight, gate)
    torch.testing.assert_close(found, part(x, weight, gate)[0])
    assert "kalmix.rms_norm" in graphs[0].code


def test_compiled_training_with_a_gated_norm():
    inputs = [y.to(DEVICE) for y in norm_inputs((3, 16), 8, GATES[1])]
    part = normed(8, GATES[1])
    weights = [torch.randn(3, 16, device=DEVICE, dtype=torch.float64)]
    with form("triton"):
        found = results(torch.compile(part, backend="aot_eager", fullgraph=True), inputs, weights)
        expected = results(part, inputs, weights)
    torch.testing.assert_close(found, expected)
