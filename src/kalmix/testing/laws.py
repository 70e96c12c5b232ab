"""The laws: what any kernel of any op must satisfy. Shipped, so that a third party can test a kernel of its own.

Each law takes a `Case` and raises `AssertionError`. Tolerances are computed (`budgets`); where two runs of one
kernel are compared, each may be wrong by its budget. `LAWS` names them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kalmix.segments import Segments
from kalmix.testing.budgets import budgets, relative_error
from kalmix.testing.cases import PER_TOKEN, Case, Tensors, one_sequence, outputs, tokens, with_prior
from kalmix.testing.poison import poisoned
from kalmix.types import Filtered

Law = Callable[[Case], None]


def exact_inputs(inputs: Tensors) -> Tensors:
    """The very numbers a kernel was given, in float64 on the CPU."""
    return {name: x.detach().double().cpu() for name, x in inputs.items()}


def assert_close(got: Sequence[Tensor], want: Sequence[Tensor], allowed: Sequence[float], what: str) -> None:
    for i, (g, w, budget) in enumerate(zip(got, want, allowed, strict=True)):
        error = relative_error(g.cpu(), w.cpu())
        assert error <= budget, f"{what}: output {i} is off by {error:.2e}, allowed {budget:.2e}"


def _specified(case: Case, inputs: Tensors, segments: Segments | None = None) -> tuple[list[Tensor], list[float]]:
    """What the oracle answers, and how far a kernel may be from it."""
    exact = exact_inputs(inputs)
    on_cpu = None if segments is None else Segments(segments.rows.cpu())

    def specify(x: Tensors) -> list[Tensor]:
        return outputs(case.specify(x, on_cpu))

    dtypes = [case.dtype] + [case.carried] * (len(outputs_of(case)) - 1)
    return specify(exact), budgets(specify, exact, case.carried, dtypes)


def outputs_of(case: Case) -> tuple[str, ...]:
    return ("mean", "variance", *(f"belief.{field}" for field in case.problem.belief._fields))


def _segments(case: Case, rows: list[tuple[int, int, int]]) -> Segments:
    return Segments.of(torch.tensor(rows, dtype=torch.int32, device=case.device))


def _packing(case: Case) -> list[tuple[int, int, int]]:
    """Runs with a gap, an empty one, one that ends early and one that starts late, over two batch rows."""
    third = case.length // 3
    return [(0, 0, third), (0, third, third), (0, third + 1, case.length), (1, 1, case.length - 2)]


def agrees_with_the_oracle(case: Case) -> None:
    inputs = case.inputs()
    want, allowed = _specified(case, inputs)
    assert_close(outputs(case.run(inputs)), want, allowed, "against the oracle")


def any_split_gives_the_same(case: Case) -> None:
    inputs = case.inputs()
    want, allowed = _specified(case, inputs)
    for cut in (1, case.length // 2, case.length - 1):
        head = case.run(tokens(inputs, 0, cut))
        tail = case.run(tokens(with_prior(inputs, head.belief), cut, case.length))
        assert_close(outputs(_join([head, tail])), want, allowed, f"split after token {cut}")


def one_at_a_time_equals_the_whole(case: Case) -> None:
    inputs = case.inputs()
    want, allowed = _specified(case, inputs)
    steps: list[Filtered] = []
    for t in range(case.length):
        now = inputs if not steps else with_prior(inputs, steps[-1].belief)
        steps.append(case.run(tokens(now, t, t + 1)))
    assert_close(outputs(_join(steps)), want, allowed, "token by token")


def _join(pieces: list[Filtered]) -> Filtered:
    variances = [piece.variance for piece in pieces if piece.variance is not None]
    return Filtered(torch.cat([piece.mean for piece in pieces], 1), torch.cat(variances, 1), pieces[-1].belief)


def packed_equals_separate(case: Case) -> None:
    rows = _packing(case)
    inputs = case.inputs(sequences=len(rows))
    want, allowed = _specified(case, inputs, _segments(case, rows))
    together = case.run(inputs, _segments(case, rows))
    assert_close(outputs(together), want, allowed, "packed, against the oracle")
    for n, (row, start, stop) in enumerate(rows):
        alone = case.run(one_sequence(inputs, n, row, start, stop))
        part = [leaf[n : n + 1] for leaf in together.belief]
        part = [x[row : row + 1, start:stop] for x in outputs(together)[: -len(part)]] + part
        assert_close(
            part, outputs(alone), [2 * x + torch.finfo(case.dtype).eps for x in allowed], f"sequence {n} alone"
        )


def padding_changes_nothing(case: Case) -> None:
    inputs = case.inputs()
    want, allowed = _specified(case, inputs)
    for left, right in ((4, 0), (0, 3), (2, 5)):
        rubbish = case.having(length=left + right, seed=1).inputs()
        padded = {
            name: torch.cat([rubbish[name][:, :left], x, rubbish[name][:, left:]], 1) if name in PER_TOKEN else x
            for name, x in inputs.items()
        }
        mask = torch.zeros(case.batch, left + case.length + right, dtype=torch.bool, device=case.device)
        mask[:, left : left + case.length] = True
        got = case.run(padded, Segments.padded(mask))
        inside = Filtered(got.mean[:, left:][:, : case.length], got.variance[:, left:][:, : case.length], got.belief)  # type: ignore[index]
        assert_close(outputs(inside), want, allowed, f"padded by {left} and {right}")
        assert float(got.mean[~mask].abs().sum()) == 0 == float(got.variance[~mask].abs().sum()), "pads read out 0"  # type: ignore[index]


def empty_input_passes_the_belief_through(case: Case) -> None:
    nothing = case.having(length=0).inputs()
    got = case.run(nothing)
    assert got.mean.shape[1] == 0
    for field, part in zip(got.belief._fields, got.belief, strict=True):
        assert torch.equal(part, nothing[f"prior.{field}"])
    inputs = case.inputs()
    got = case.run(inputs, _segments(case, [(0, 3, 3), (1, 0, 0)]))
    assert float(got.mean.abs().sum()) == 0
    for field, part in zip(got.belief._fields, got.belief, strict=True):
        assert torch.equal(part, inputs[f"prior.{field}"])


def gradients_agree_with_the_oracle(case: Case) -> None:
    """Of a random function of the mean, the variance and the final belief, for every input and the prior."""
    rows = _packing(case)
    for segments in (None, _segments(case, rows)):
        inputs = case.inputs(sequences=case.batch if segments is None else len(rows))
        shapes = [x.shape for x in outputs(case.run(inputs, segments))]
        generator = torch.Generator().manual_seed(7)
        weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

        def gradients(run: Callable[[Tensors], Filtered], x: Tensors, weights: list[Tensor] = weights) -> list[Tensor]:
            leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in x.items()}
            result = outputs(run(leaves))
            loss = sum((w.to(y.device, y.dtype) * y).sum() for w, y in zip(weights, result, strict=True))
            return list(torch.autograd.grad(loss, list(leaves.values())))  # type: ignore[arg-type]

        exact = exact_inputs(inputs)
        on_cpu = None if segments is None else Segments(segments.rows.cpu())

        specify = partial(gradients, partial(case.specify, segments=on_cpu))
        # The oracle sees the same upstream gradient: where the mean is in half precision, so are its weights.
        weights[0] = weights[0].to(case.dtype).double()
        allowed = budgets(specify, exact, case.carried, [x.dtype for x in inputs.values()])
        got = gradients(partial(case.run, segments=segments), inputs)
        where = "packed" if segments is not None else "whole"
        for name, g, w, budget in zip(inputs, got, specify(exact), allowed, strict=True):
            assert_close([g], [w], [budget], f"gradient of {name}, {where}")


def variances_stay_positive(case: Case) -> None:
    """Under certain and repeated evidence, without noise, and over decay from none to nearly all."""
    inputs = case.having(length=64).inputs()
    inputs["precision"] = torch.full_like(inputs["precision"], 1e4)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"])
    for decay, noise in ((0.0, 0.0), (0.0, 1.0), (-30.0, 0.0), (-1e-3, 1e3)):
        inputs["log_decay"] = torch.full_like(inputs["log_decay"], decay)
        inputs["process_noise"] = torch.full_like(inputs["process_noise"], noise)
        got = case.run(inputs)
        assert all(bool(torch.isfinite(x).all()) for x in outputs(got)), f"decay {decay}, noise {noise}"
        assert got.variance is not None and float(got.variance.min()) >= 0
        for field in case.problem.variances:
            part = getattr(got.belief, field)
            assert float(part.min()) >= 0
            assert decay == -30.0 or float(part.min()) > 0  # a variance may underflow where nothing is left of it


def evidence_never_raises_variance(case: Case) -> None:
    inputs = case.inputs()
    fewer = dict(inputs)
    fewer["precision"] = inputs["precision"].clone()
    fewer["precision"][:, case.length // 2] = 0.0
    more, less = case.run(inputs), case.run(fewer)
    slack = 1 + 2 * max(_specified(case, inputs)[1])
    assert more.variance is not None and less.variance is not None
    assert bool((more.variance <= less.variance * slack).all())
    for field in case.problem.variances:
        assert bool((getattr(more.belief, field) <= getattr(less.belief, field) * slack).all())


def idle_tokens_leave_the_belief(case: Case) -> None:
    """No evidence, no decay, no noise: the belief is unchanged to the last bit."""
    inputs = case.inputs()
    inputs |= {name: torch.full_like(inputs[name], value) for name, value in case.problem.idle.items()}
    got = case.run(inputs)
    for field, part in zip(got.belief._fields, got.belief, strict=True):
        assert torch.equal(part, inputs[f"prior.{field}"]), field


def outputs_are_fully_written(case: Case) -> None:
    for segments in (None, _segments(case, _packing(case))):
        inputs = case.inputs(sequences=case.batch if segments is None else len(_packing(case)))
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        with poisoned():
            result = outputs(case.run(leaves, segments))
            gradients = torch.autograd.grad(sum(y.float().sum() for y in result), list(leaves.values()))  # type: ignore[arg-type]
        assert all(bool(torch.isfinite(x).all()) for x in (*result, *gradients))


def the_same_call_gives_the_same_bits(case: Case) -> None:
    inputs = {name: x.requires_grad_() for name, x in case.inputs().items()}

    def once() -> list[Tensor]:
        result = outputs(case.run(inputs))
        return [*result, *torch.autograd.grad(sum(y.float().sum() for y in result), list(inputs.values()))]  # type: ignore[arg-type]

    assert all(torch.equal(x, y) for x, y in zip(once(), once(), strict=True))


def compiles_to_one_graph(case: Case) -> None:
    inputs = {name: x.requires_grad_() for name, x in case.having(length=7).inputs().items()}
    for segments in (None, _segments(case, [(0, 0, 4), (1, 2, 7)])):
        compiled = torch.compile(lambda x, s: case.run(x, s), fullgraph=True, backend="aot_eager")
        got, want = outputs(compiled(inputs, segments)), outputs(case.run(inputs, segments))
        allowed = [64 * torch.finfo(y.dtype).eps for y in want]  # one algorithm, its operations in another order
        assert_close(got, want, allowed, "compiled")
        got, want = (torch.autograd.grad(sum(y.float().sum() for y in x), list(inputs.values())) for x in (got, want))  # type: ignore[arg-type]
        assert_close(got, want, [64 * torch.finfo(y.dtype).eps * case.length for y in want], "compiled, gradients")
        torch.compiler.reset()


def strides_do_not_matter(case: Case) -> None:
    inputs = case.inputs()
    want = outputs(case.run(inputs))
    transposed = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in inputs.items()}
    assert all(torch.equal(x, y) for x, y in zip(outputs(case.run(transposed)), want, strict=True))
    constant = inputs | {"v": inputs["v"][:, :1].expand_as(inputs["v"])}
    copied = {name: x.clone() for name, x in constant.items()}
    assert all(torch.equal(x, y) for x, y in zip(outputs(case.run(constant)), outputs(case.run(copied)), strict=True))


def half_precision_inputs_keep_float32_beliefs(case: Case) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        half = case.having(dtype=dtype)
        inputs = half.inputs()
        got = half.run(inputs)
        assert got.mean.dtype == dtype
        assert all(part.dtype == torch.float32 for part in got.belief)
        want, allowed = _specified(half, inputs)
        assert_close(outputs(got), want, allowed, str(dtype))


LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        agrees_with_the_oracle,
        any_split_gives_the_same,
        one_at_a_time_equals_the_whole,
        packed_equals_separate,
        padding_changes_nothing,
        empty_input_passes_the_belief_through,
        gradients_agree_with_the_oracle,
        variances_stay_positive,
        evidence_never_raises_variance,
        idle_tokens_leave_the_belief,
        outputs_are_fully_written,
        the_same_call_gives_the_same_bits,
        compiles_to_one_graph,
        strides_do_not_matter,
        half_precision_inputs_keep_float32_beliefs,
    )
}
