"""`run_steps` and `recomputed_op`, with which users write filters: wrong arguments and uses raise clear errors."""

import pytest
import torch

from kalmix import ArgumentError, KernelError, PointBelief
from kalmix.ops import recomputed_op, run_steps

X = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]])
IDS = torch.tensor([[0, 0, 1], [2, -1, 2]])


def add(belief, token):
    total = belief.mean + token[:, None, None, None]
    return (total[:, 0],), PointBelief(total)


def add_without_tuple(belief, token):
    (total,), belief = add(belief, token)
    return total, belief


def prior(rows):
    return PointBelief(torch.zeros(rows, 1, 1, 1))


def test_steps_of_packed_sequences():
    (sums,), final = run_steps(add, prior(4), zip(X.unbind(1)), IDS)
    assert sums[..., 0, 0].tolist() == [[1, 3, 3], [1, 0, 2]]
    assert final.mean.flatten().tolist() == [3, 3, 2, 0]
    assert run_steps(add, prior(2), [], None)[0] == []


@pytest.mark.parametrize(
    ("name", "step", "belief", "tokens", "segment_ids"),
    [
        ("belief", add, prior(1), zip(X.unbind(1)), None),
        ("belief", add, torch.zeros(2, 1, 1, 1), zip(X.unbind(1)), None),
        ("step", add_without_tuple, prior(2), zip(X.unbind(1)), None),
        ("tokens", add, prior(2), X.unbind(1), None),
        ("segment_ids", add, prior(2), zip(X.unbind(1)), IDS),
        ("segment_ids", add, prior(3), zip(X.unbind(1)), IDS[:, :2]),
        ("segment_ids", add, prior(3), zip(X.unbind(1)), IDS.float()),
        ("segment_ids", add, prior(3), zip(X.unbind(1)), IDS.tolist()),
    ],
)
def test_wrong_arguments_of_run_steps_are_named(name, step, belief, tokens, segment_ids):
    with pytest.raises(ArgumentError, match=f"`{name}`"):
        run_steps(step, belief, tokens, segment_ids)


def double(tensors, options):
    return [2 * x for x in tensors]


def double_fake(tensors, options):
    return [torch.empty_like(x) for x in tensors]


def test_op_rejects_derivatives_that_it_lacks():
    op = recomputed_op("kalmix_test::double", double, double_fake, "double")
    x = torch.ones(2, requires_grad=True)
    assert torch.autograd.grad(op([x], [])[0].sum(), x)[0].tolist() == [2, 2]
    with pytest.raises(KernelError, match="uncompiled"):
        torch.autograd.grad(op([x], [])[0].sum(), x, create_graph=True)
    with pytest.raises(KernelError, match="forward-mode"):
        torch.func.jvp(lambda y: op([y], [])[0], (torch.ones(2),), (torch.ones(2),))


def test_backward_pass_of_an_op_leaves_autocast():
    op = recomputed_op("kalmix_test::square", lambda tensors, _: [x @ x for x in tensors], double_fake, "square")
    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected, got = op([x], [])[0].sum(), op([x], [])[0].sum()
    (want,) = torch.autograd.grad(expected, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.autograd.grad(got, x)[0], want)


def test_op_is_registered_once_from_functions():
    recomputed_op("kalmix_test::once", double, double_fake, "double")
    for name, given in {
        "name": ("kalmix_test::once", double, double_fake),
        "`name` is 'double'": ("double", double, double_fake),
        "function": ("kalmix_test::a", "double", double_fake),
        "fake": ("kalmix_test::b", double, None),
    }.items():
        with pytest.raises(ArgumentError, match=name):
            recomputed_op(*given, "double")
    op = recomputed_op("kalmix_test::tensor", lambda tensors, _: tensors[0] * 2, double_fake, "double")
    with pytest.raises(ArgumentError, match="returns a Tensor"):
        op([torch.ones(2)], [])
