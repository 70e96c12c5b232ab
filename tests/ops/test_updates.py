"""Updates: laws of combining and applying them, against the oracle and against filtering."""

from functools import reduce
from itertools import pairwise

import pytest
import torch

from kalmix import ArgumentError, DenseBelief, PointBelief, Segments, ops, updates
from kalmix.ops import OPS
from kalmix.testing.cases import PROBLEMS, Case, parts
from kalmix.testing.measure import compare, differentiable, exact, expected_outputs
from kalmix.testing.tolerances import budgets, relative_error

FINITE = [name for name, problem in PROBLEMS.items() if OPS[problem.design.op].update is not None]
SIZES = {"length": 20, "key_heads": 2, "value_heads": 4, "key_width": 4, "value_width": 3}
DTYPES = (torch.float32, torch.float64)
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def case_of(name, dtype=torch.float64, **changes):
    return Case(name, "reference", dtype=dtype, **(SIZES | changes))


def signals_of(case, inputs):
    """Return the arguments of the update: those of the op but for queries, and for options that only read."""
    signals = case.op_inputs(inputs)
    return {name: x for name, x in signals.items() if "." not in name and name not in ("q", "mix")}


def compute(case, signals, segments=None):
    return OPS[case.op].update(**signals, segments=segments)


def compute_spans(case, inputs, *bounds):
    signals = signals_of(case, inputs)
    return [compute(case, case.tokens(signals, start, stop)) for start, stop in pairwise(bounds)]


def prior_of(case, inputs):
    return case.arguments(inputs)["belief"]


def assert_close(got, expected, tolerance=1e-12):
    assert type(got) is type(expected)
    for field, x, y in zip(got._fields, got, expected, strict=True):
        assert x.dtype == y.dtype and x.shape[:2] == y.shape[:2], field
        scale = float(y.abs().max()) or 1.0
        assert float((x - y).abs().max()) <= tolerance * scale, field


def assert_belief(case, belief, expected, allowed, what):
    count = len(parts(belief))
    found = compare(case.quantities[-count:], parts(belief), expected[-count:], allowed[-count:])
    assert all(x.ok for x in found), (what, found)


def test_all_ops_but_attend_have_updates():
    assert {name for name, op in OPS.items() if op.update is None} == {"attend"}
    assert all(getattr(updates, name) is op.update for name, op in OPS.items() if op.update is not None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FINITE)
def test_applying_an_update_is_filtering(name, dtype, device):
    case = case_of(name, dtype, device=device)
    for segments in (None, case.packing()):
        inputs = case.inputs(sequences=segments and segments.count)
        expected, allowed = expected_outputs(case, inputs, segments)
        update, prior = compute(case, signals_of(case, inputs), segments), prior_of(case, inputs)
        assert_belief(case, update.apply(prior), expected, allowed, "one update")
        if segments is None:
            first, second, third = compute_spans(case, inputs, 0, 7, 8, case.length)
            assert_belief(case, first.then(second).then(third).apply(prior), expected, allowed, "folded")
        else:
            second = torch.tensor([1], device=device)  # the empty segment
            assert_close(update.take(second).apply(prior.take(second)), prior.take(second), 0.0)


@pytest.mark.parametrize("name", FINITE)
def test_updates_combine(name):
    case = case_of(name)
    inputs = case.inputs()
    whole = compute(case, signals_of(case, inputs))
    first, second, third = compute_spans(case, inputs, 0, 6, 13, case.length)
    assert_close(first.then(second.then(third)), whole)
    assert_close(first.then(second).then(third), whole)


@pytest.mark.parametrize("name", FINITE)
def test_identity_and_constant_updates(name):
    case = case_of(name)
    inputs = case.inputs()
    prior, update = prior_of(case, inputs), compute(case, signals_of(case, inputs))
    identity, constant = type(update).identity(prior), type(update).constant(prior)
    other = type(prior)(*(x + 0.1 * torch.eye(*x.shape[2:]) for x in prior))
    assert_close(identity.apply(other), other, 1e-15)
    assert_close(constant.apply(other), prior, 1e-15)
    assert_close(identity.then(update).apply(other), update.apply(other))
    assert_close(update.then(identity), update, 1e-15)
    assert_close(update.then(constant).apply(other), prior, 1e-15)
    assert_close(constant.then(update).apply(other), update.apply(prior))
    nothing = compute(case, case.tokens(signals_of(case, inputs), 0, 0))
    assert_close(nothing.apply(other), other, 1e-15)


@pytest.mark.parametrize("name", FINITE)
def test_gradients_of_updates_agree_with_the_oracle(name):
    case = case_of(name, torch.float32, batch=1, length=9)
    inputs, generator = case.inputs(), torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator) for x in prior_of(case, inputs)]

    def gradients(belief_after, inputs):
        leaves = {name: x.detach().requires_grad_() for name, x in differentiable(inputs).items() if name != "q"}
        belief = belief_after(inputs | leaves)
        total = sum((x * weight.to(x.dtype)).sum() for x, weight in zip(belief, weights, strict=True))
        found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
        return [x for name, x in zip(leaves, found, strict=True) if name != "mix"]

    def folded(inputs):
        first, second = compute_spans(case, inputs, 0, 4, case.length)
        return first.then(second).apply(prior_of(case, inputs))

    def oracle_gradients(inputs):
        return gradients(lambda x: case.run_oracle(x).belief, inputs)

    got, given = gradients(folded, inputs), exact(inputs)
    expected = oracle_gradients(given)
    allowed = budgets(oracle_gradients, given, expected, torch.float32, [torch.float32] * len(got))
    for x, y, budget in zip(got, expected, allowed, strict=True):
        assert relative_error(x, y) <= budget


@pytest.mark.parametrize("name", ["diagonal", "dense", "delta", "additive-keys"])
def test_updates_of_many_tiles(name):
    """Combine tiles of `diagonal` and chunks of the others, in packed sequences longer than them."""
    case = case_of(name, torch.float32, length=600, key_heads=1, value_heads=1, key_width=2, value_width=2)
    segments = case.segments([(0, 0, 290), (0, 290, 599), (1, 3, 4), (1, 10, 600)])
    inputs = case.inputs(sequences=4)
    prior = prior_of(case, inputs)
    got = compute(case, signals_of(case, inputs), segments).apply(prior)
    exact_inputs = exact(inputs)
    signals = case.with_changes(dtype=torch.float64).op_inputs(exact_inputs)
    signals = {name: x for name, x in signals.items() if "." not in name}
    expected = OPS[case.op].function(**signals, belief=prior.to(torch.float64), segments=segments).belief
    assert all(relative_error(x, y) < 1e-5 for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("spread", [1.0, 1e-3, 0.0])
def test_dense_updates_are_as_exact_as_filtering_at_the_least_noise(spread):
    """Compare with float64 for keys that are nearly equal: their information must not leak to other directions."""
    torch.manual_seed(0)
    length, width, noise = 256, 32, ops.LEAST_NOISE[torch.float32]
    k = torch.nn.functional.normalize(torch.randn(width) + spread * torch.randn(1, length, 1, width), dim=-1)
    v, prior = torch.randn(1, length, 1, width), torch.randn(1, 1, width, width)
    belief = DenseBelief(prior, torch.eye(width).expand(1, 1, width, width))
    signals = {"obs_noise": torch.full((1, length, 1), noise), "process_noise": torch.zeros(1, length, 1)}

    def errors(got):
        return torch.tensor([relative_error(x, y) for x, y in zip(got, expected, strict=True)])

    wide = {name: x.double() for name, x in signals.items()}
    expected = ops.dense(k.double(), k.double(), v.double(), **wide, belief=belief.to(torch.float64)).belief
    spans = [
        (k[:, t : t + 64], v[:, t : t + 64], {n: x[:, t : t + 64] for n, x in signals.items()})
        for t in (0, 64, 128, 192)
    ]
    folded = reduce(updates.DenseUpdate.then, [updates.dense(k, v, **span) for k, v, span in spans])
    filtered = ops.dense(k, k, v, **signals, belief=belief).belief
    assert bool((errors(folded.apply(belief)) <= torch.maximum(errors(filtered), torch.tensor(1e-6))).all())
    assert float(torch.linalg.eigvalsh(folded.apply(belief).covariance.double()).min()) > 0


def test_dense_updates_refuse_smaller_noise():
    k, v, zero = torch.randn(1, 4, 1, 4), torch.randn(1, 4, 1, 2), torch.zeros(1, 4, 1)
    with pytest.raises(ArgumentError, match="obs_noise"):
        updates.dense(k, v, obs_noise=zero + 1e-6, process_noise=zero)
    updates.dense(k.double(), v.double(), obs_noise=zero.double() + 1e-6, process_noise=zero.double())
    noise = torch.tensor([[[0.1], [1e-6], [0.1], [0.1]]])  # the small one is outside the segment
    updates.dense(k, v, obs_noise=noise, process_noise=zero, segments=Segments.of(torch.tensor([[0, 2, 4]])))


@pytest.mark.parametrize("name", ["additive-keys", "delta", "dense", "diagonal", "ridge"])
def test_half_precision_and_autocast_do_not_round_updates(name):
    case = case_of(name, torch.bfloat16)
    inputs = case.inputs()
    signals, prior = signals_of(case, inputs), prior_of(case, inputs)
    update = compute(case, {name: x.float() for name, x in signals.items()})
    expected = [update.then(update), update.then(update).apply(prior)]
    with torch.autocast("cpu", torch.bfloat16):
        update = compute(case, signals)
        got = [update.then(update), update.then(update).apply(prior)]
    for x, y in zip(got, expected, strict=True):
        assert_close(x, y, 0.0)


@pytest.mark.parametrize("name", ["additive-keys", "delta", "dense", "diagonal", "ridge"])
def test_updates_and_beliefs_of_two_dtypes_give_float64(name):
    case = case_of(name)
    inputs = case.inputs()
    wide, prior = compute(case, signals_of(case, inputs)), prior_of(case, inputs)
    narrow, short = wide.to(torch.float32), prior.to(torch.float32)
    expected, both = wide.apply(prior), wide.then(wide)
    for got in (narrow.then(wide), wide.then(narrow)):
        assert_close(got, both, 1e-5)
    for got in (narrow.apply(prior), wide.apply(short)):
        assert_close(got, expected, 1e-5)
    assert_close(narrow.apply(short), expected.to(torch.float32), 1e-5)


@pytest.mark.parametrize("name", ["additive-keys", "delta", "dense", "diagonal", "ridge"])
def test_gradients_pulled_back_are_those_of_apply(name):
    case = case_of(name)
    inputs = case.inputs()
    update = compute(case, signals_of(case, inputs))
    leaves = [x.detach().requires_grad_() for x in prior_of(case, inputs)]
    prior = type(prior_of(case, inputs))(*leaves)
    after = list(update.apply(prior))
    draw = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=draw).to(x) for x in after]
    expected = torch.autograd.grad(after, leaves, upstream)
    found = update.pull_back(None if update.is_affine else prior, *upstream)
    torch.testing.assert_close(found, expected)


def test_updates_as_filtered_round_as_the_op():
    draw = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(1, 70, 1, 16, generator=draw), dim=-1).bfloat16()
    v, gain = torch.randn(1, 70, 2, 24, generator=draw).bfloat16(), torch.rand(1, 70, 2, generator=draw)
    for name, signals in (
        ("delta", {"gain": gain, "log_decay": -0.01 * gain}),
        ("additive", {"log_decay": -0.01 * gain}),
    ):
        final = OPS[name].function(k, k, v, **signals).belief
        update = OPS[name].update_as_filtered(k, v, **signals)
        zero = type(final)(torch.zeros_like(final.mean))
        torch.testing.assert_close(update.apply(zero).mean, final.mean, rtol=1e-5, atol=1e-6)
        exact = OPS[name].update(k, v, **signals)
        assert_close(update, exact, 0.05)


@pytest.mark.parametrize("name", ["additive", "delta", "dense", "diagonal", "ridge"])
def test_wrong_arguments_of_updates_are_named(name):
    case = case_of(name)
    signals = signals_of(case, case.inputs())
    for argument, wrong in (("k", signals["k"][0]), ("k", signals["k"].int()), ("v", signals["v"][..., :3, :])):
        with pytest.raises(ArgumentError, match=f"`{argument}`"):
            compute(case, signals | {argument: wrong})
    others = [x for x in signals if x not in ("k", "v") and signals[x] is not None]
    for argument in others:
        with pytest.raises(ArgumentError, match=f"`{argument}`"):
            compute(case, signals | {argument: signals[argument][..., None, None]})
    with pytest.raises(ArgumentError, match="segments"):
        compute(case, signals, "all")


def test_updates_are_pytrees_that_can_be_saved(tmp_path):
    update = updates.delta(torch.randn(2, 5, 1, 4), torch.randn(2, 5, 1, 3), gain=torch.ones(2, 5, 1))
    torch.save(update, tmp_path / "update.pt")
    loaded = torch.load(tmp_path / "update.pt", weights_only=True)
    assert_close(loaded, update, 0.0)
    assert update.take(torch.tensor([1, 1, 0])).mean.shape == (3, 1, 4, 3)
    assert update.to(torch.float64).transition.dtype == torch.float64


def test_combining_and_applying_compile():
    belief = PointBelief(torch.randn(2, 1, 4, 3))
    update = updates.delta(torch.randn(2, 5, 1, 4), torch.randn(2, 5, 1, 3), gain=torch.ones(2, 5, 1))
    compiled = torch.compile(lambda x, b: x.then(x).apply(b), backend="eager", fullgraph=True)
    assert_close(compiled(update, belief), update.then(update).apply(belief), 1e-6)


@pytest.mark.parametrize("name", FINITE)
def test_filtering_in_spans_is_filtering(name):
    case = case_of(name)
    prior = prior_of(case, case.inputs())
    results = []
    for spans in (1, 5):
        inputs = {x: y.requires_grad_(y.is_floating_point()) for x, y in case.inputs().items()}
        arguments = case.arguments(inputs)
        signals = {x: y for x, y in case.op_inputs(inputs).items() if "." not in x}
        q, k, v = (signals.pop(x) for x in "qkv")
        options = {"variance": True} if OPS[case.op].has_variance else {}
        given = arguments["belief"] if prior is not None else None
        if spans == 1:
            found = OPS[case.op].function(q, k, v, belief=given, kernel="reference", **signals, **options)
        else:
            found = updates.filter_in_spans(case.op, q, k, v, spans=spans, belief=given, **signals, **options)
        outputs = [x for x in (found.mean, found.variance, *found.belief) if x is not None]
        sum((x * torch.arange(x.numel()).view(x.shape).cos()).sum() for x in outputs).backward()
        results.append((outputs, {x: y.grad for x, y in inputs.items() if y.grad is not None}))
    (expected, expected_grads), (got, grads) = results
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
    assert grads.keys() == expected_grads.keys()
    for field, x in grads.items():
        assert relative_error(x, expected_grads[field]) < 1e-8, field


def test_filtering_in_spans_refuses_wrong_arguments():
    k, v, gain = torch.randn(1, 6, 1, 4), torch.randn(1, 6, 1, 4), torch.rand(1, 6, 1)
    with pytest.raises(ArgumentError, match="op"):
        updates.filter_in_spans("attend", k, k, v, spans=2)
    with pytest.raises(ArgumentError, match="a multiple of 4"):
        updates.filter_in_spans("delta", k, k, v, gain=gain, spans=4)
    with pytest.raises(ArgumentError, match="spans"):
        updates.filter_in_spans("delta", k, k, v, gain=gain, spans=0)
    with pytest.raises(ArgumentError, match="segments"):
        updates.filter_in_spans("delta", k, k, v, gain=gain, spans=2, segments=Segments.whole(1, 6))
