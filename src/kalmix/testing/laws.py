"""Laws that every kernel of every op satisfies, for kernels of this library and of others.

Each law takes a `Case` and raises `AssertionError`. Tolerances are computed (`tolerances.budgets`). Where two runs of
one kernel are compared, each may differ by its budget. `laws` returns the laws of a case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kalmix.segments import Segments
from kalmix.testing import derivatives, isolation, measure
from kalmix.testing.cases import Case, outputs, parts, with_prior
from kalmix.testing.measure import Measurement, compare, differentiable, expected_outputs
from kalmix.testing.nan_fill import nan_filled_memory
from kalmix.testing.tolerances import DATA, DRAWS, Tensors
from kalmix.types import Filtered

Law = Callable[[Case], None]

MANY = 3 * DRAWS  # for wide ranges of noise, where the rounding of few tokens can dominate and 3 draws may miss it


def assert_within(found: list[Measurement], what: str) -> None:
    for quantity, error, budget in found:
        assert error <= budget, f"{what}: {quantity} is off by {error:.2e}, allowed {budget:.2e}"


def _against(case: Case, got: Filtered, expected: list[Tensor], allowed: list[float], what: str) -> None:
    assert_within(compare(case.quantities, outputs(got), expected, allowed), what)


def agrees_with_the_oracle(case: Case) -> None:
    assert_within(measure.forward(case, case.inputs()), "against the oracle")


def agrees_over_all_documented_noises(case: Case) -> None:
    """Compare outputs and gradients for all documented noises, and for gates of exactly 0 and 1."""
    for seed in (0,) if case.interpreted else (0, 1):
        inputs = case.with_changes(seed=seed).wide_inputs()
        assert_within(measure.forward_and_gradients(case, inputs, draws=MANY), "wide")


def agrees_at_lengths_around_tiles(case: Case) -> None:
    for length in (15, 16, 17, 64, 65):
        trial = case.with_changes(length=length)
        inputs = trial.inputs()
        compare_with_oracle = measure.forward_and_gradients if length == 17 else measure.forward
        assert_within(compare_with_oracle(trial, inputs), f"{length} tokens")


def any_split_gives_the_same(case: Case) -> None:
    inputs = case.inputs()
    expected, allowed = expected_outputs(case, inputs)
    for cut in (case.length // 2,) if case.interpreted else (1, case.length // 2, case.length - 1):
        head = case.run(case.tokens(inputs, 0, cut))
        tail = case.run(case.tokens(with_prior(inputs, head.belief), cut, case.length))
        _against(case, _join([head, tail]), expected, allowed, f"split after token {cut}")


def one_at_a_time_equals_the_whole(case: Case) -> None:
    case = case.with_changes(length=7) if case.interpreted else case
    inputs = case.inputs()
    expected, allowed = expected_outputs(case, inputs)
    steps: list[Filtered] = []
    for t in range(case.length):
        now = inputs if not steps else with_prior(inputs, steps[-1].belief)
        steps.append(case.run(case.tokens(now, t, t + 1)))
    _against(case, _join(steps), expected, allowed, "token by token")


def _join(pieces: list[Filtered]) -> Filtered:
    variances = [piece.variance for piece in pieces if piece.variance is not None]
    variance = torch.cat(variances, 1) if variances else None
    return Filtered(torch.cat([piece.mean for piece in pieces], 1), variance, pieces[-1].belief)


def packed_equals_separate(case: Case) -> None:
    segments = case.packing()
    inputs = case.inputs(sequences=segments.count)
    expected, allowed = expected_outputs(case, inputs, segments)
    packed_result = case.run(inputs, segments)
    _against(case, packed_result, expected, allowed, "packed, against the oracle")
    for n, (row, start, stop) in enumerate(segments.rows.tolist()):
        separate = case.run(case.one_sequence(inputs, n, row, start, stop))
        part = parts(type(packed_result.belief)(*(leaf[n : n + 1] for leaf in packed_result.belief)))
        part = [x[row : row + 1, start:stop] for x in outputs(packed_result)[: -len(part)]] + part
        doubled = [2 * budget + torch.finfo(case.dtype).eps for budget in allowed]
        assert_within(compare(case.quantities, part, outputs(separate), doubled), f"sequence {n} alone")


def padding_changes_nothing(case: Case) -> None:
    inputs = case.inputs()
    expected, allowed = expected_outputs(case, inputs)
    for num_before, num_after in ((2, 5),) if case.interpreted else ((4, 0), (0, 3), (2, 5)):
        noise = case.with_changes(length=num_before + num_after, seed=1).inputs()
        padded = {
            name: torch.cat([noise[name][:, :num_before], x, noise[name][:, num_before:]], 1)
            if case.is_per_token(name)
            else x
            for name, x in inputs.items()
        }
        mask = torch.zeros(case.batch, num_before + case.length + num_after, dtype=torch.bool, device=case.device)
        mask[:, num_before : num_before + case.length] = True
        got = case.run(padded, Segments.padded(mask))
        reads = [x for x in got[:2] if x is not None]
        inside = [x[:, num_before : num_before + case.length] for x in reads] + parts(got.belief)
        assert_within(compare(case.quantities, inside, expected, allowed), f"padded by {num_before} and {num_after}")
        assert all(float(x[~mask].abs().sum()) == 0 for x in reads), "pads read out 0"


def empty_input_passes_the_belief_through(case: Case) -> None:
    nothing = case.with_changes(length=0).inputs()
    got = case.run(nothing)
    assert got.mean.shape[1] == 0
    _assert_same(got.belief, nothing)
    inputs = case.inputs()
    got = case.run(inputs, case.segments([(0, 3, 3), (1, 0, 0)]))
    assert float(got.mean.abs().sum()) == 0
    _assert_same(got.belief, inputs)
    for trial, segments in ((nothing, None), (case.inputs(sequences=0), case.segments([]))):
        trial = _requiring_grad(trial)
        result = case.run(trial, segments)
        names, leaves = zip(*differentiable(trial).items(), strict=True)
        total = torch.stack([y.float().sum() for y in outputs(result)]).sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
        unused = [name for name, grad in zip(names, grads, strict=True) if grad is None]
        assert not unused, f"without tokens, outputs do not depend on {', '.join(unused)}"


def _assert_same(belief: Any, inputs: Tensors) -> None:
    """Check that the belief equals the prior to the last bit, or is empty if no prior was given."""
    if f"prior.{belief._fields[0]}" not in inputs:
        assert all(part.numel() == 0 for part in parts(belief))
        return
    prior = type(belief)(*(inputs[f"prior.{field}"] for field in belief._fields))
    for field, part, before in zip(belief._fields, parts(belief), parts(prior), strict=True):
        assert torch.equal(part, before), field


def gradients_agree_with_the_oracle(case: Case) -> None:
    """Compare gradients of a random function of mean, variance and belief, for every input and the prior."""
    assert_within(measure.gradients(case, case.inputs()), "whole")
    segments = case.packing()
    assert_within(measure.gradients(case, case.inputs(sequences=segments.count), segments), "packed")


def variances_stay_positive(case: Case) -> None:
    """Check variances for certain and repeated evidence, without noise, and for decays from 1 to nearly 0."""
    inputs = case.with_changes(length=case.length if case.interpreted else 64).inputs()
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"])
    for certain_signals in case.problem.certain_signals:
        inputs |= {name: torch.full_like(inputs[name], value) for name, value in certain_signals.items()}
        got = case.run(inputs)
        assert all(bool(torch.isfinite(x).all()) for x in outputs(got)), certain_signals
        assert got.variance is not None and float(got.variance.min()) >= 0, certain_signals
        if case.problem.evidence_signal is None:  # the belief has no variance
            continue
        spectrum = case.problem.spectrum(got.belief)
        assert float(spectrum.min()) >= -case.problem.slack * float(spectrum.max()), certain_signals
        assert certain_signals.get("process_noise", 0) == 0 or float(spectrum.min()) > 0, certain_signals


def evidence_never_raises_variance(case: Case) -> None:
    inputs = case.inputs()
    fewer, evidence_signal = dict(inputs), case.problem.evidence_signal
    assert evidence_signal is not None
    fewer[evidence_signal] = inputs[evidence_signal].clone()
    fewer[evidence_signal][:, case.length // 2] = 0.0
    more, less = case.run(inputs), case.run(fewer)
    slack = 2 * max(expected_outputs(case, inputs)[1])
    assert more.variance is not None and less.variance is not None
    assert bool((more.variance <= less.variance * (1 + slack)).all())
    spectrum, learned = case.problem.spectrum, case.problem.learned(more.belief, less.belief)
    assert float(spectrum(learned).min()) >= -slack * float(spectrum(less.belief).max())


def idle_tokens_leave_the_belief(case: Case) -> None:
    """Check that tokens without evidence, decay and noise leave the belief unchanged to the last bit."""
    inputs = case.inputs()
    inputs |= {name: torch.full_like(inputs[name], value) for name, value in case.problem.idle.items()}
    _assert_same(case.run(inputs).belief, inputs)


def _requiring_grad(inputs: Tensors) -> Tensors:
    """Return the inputs, with gradients required for the differentiable ones."""
    return inputs | {name: x.requires_grad_() for name, x in differentiable(inputs).items()}


def _gradients(result: Filtered, inputs: Tensors) -> list[Tensor]:
    total = torch.stack([y.float().sum() for y in outputs(result)]).sum()
    return list(torch.autograd.grad(total, list(differentiable(inputs).values())))


def outputs_are_fully_written(case: Case) -> None:
    for segments in (None, case.packing()):
        leaves = _requiring_grad(case.inputs(sequences=segments and segments.count))
        with nan_filled_memory():
            result = case.run(leaves, segments)
            gradients = _gradients(result, leaves)
        assert all(bool(torch.isfinite(x).all()) for x in (*outputs(result), *gradients))


def the_same_call_gives_the_same_bits(case: Case) -> None:
    inputs = _requiring_grad(case.inputs())

    def once() -> list[Tensor]:
        result = case.run(inputs)
        return [*outputs(result), *_gradients(result, inputs)]

    assert all(torch.equal(x, y) for x, y in zip(once(), once(), strict=True))


def compiles_to_one_graph(case: Case) -> None:
    """Compile to one graph per call, and to at most two graphs for all lengths."""
    _assert_compiles(case, "aot_eager")


def compiles_with_inductor(case: Case) -> None:
    """Compile with PyTorch's default backend, which relies on the strides that custom ops promise."""
    from torch._inductor import config

    options: dict[str, Any] = {"cpp.simdlen": 1}  # C++ without vectors compiles in half the time
    # On a GPU, PyTorch 2.11 fails to compile some sums of dynamic sizes (pytorch issue 181563, fixed in 2.12).
    if torch.__version__.startswith("2.11."):
        options["triton.coalesce_tiling_analysis"] = False
    with config.patch(options):
        _assert_compiles(case, "inductor", lengths=(5,))  # packed calls still have dynamic shapes


class CountingBackend:
    """Compiler backend that counts graphs."""

    def __init__(self, backend: str) -> None:
        self.compile = torch._dynamo.lookup_backend(backend)
        self.graphs = 0

    def __call__(self, *graph_and_inputs: Any) -> Any:
        self.graphs += 1
        return self.compile(*graph_and_inputs)


def _assert_compiles(case: Case, backend: str, lengths: tuple[int, ...] = (5, 7, 66)) -> None:
    """Compare outputs and gradients of compiled and eager calls, whole and packed, of several lengths."""
    packed_lengths = (66, 7)
    if case.interpreted:  # slow
        lengths = packed_lengths = (5,)
    if case.kernel == "reference":  # a loop over tokens, with another graph per length
        lengths = packed_lengths = (2,)
    torch.compiler.reset()
    counting = CountingBackend(backend)
    compiled = torch.compile(lambda x, s: case.run(x, s), fullgraph=True, backend=counting)
    for length in lengths:
        _assert_compiled_equals_eager(case.with_changes(length=length), compiled, None)
    whole_graphs = counting.graphs
    for length in packed_lengths:
        rows = [(0, 0, min(3, length)), (1, min(2, length - 1), length), *[(0, 3, 4)] * (length > 7)]
        segments = case.segments(rows)
        if len(packed_lengths) > 1:  # sizes of other tensors have changed before and are dynamic
            torch._dynamo.maybe_mark_dynamic(segments.rows, 0)
        _assert_compiled_equals_eager(case.with_changes(length=length), compiled, segments)
    packed_graphs = counting.graphs - whole_graphs
    torch.compiler.reset()
    for graphs, tried in ((whole_graphs, lengths), (packed_graphs, packed_lengths)):
        assert graphs <= 2, f"{graphs} graphs for {len(tried)} lengths"


def _assert_compiled_equals_eager(case: Case, compiled: Callable[..., Filtered], segments: Segments | None) -> None:
    inputs = _requiring_grad(case.inputs(sequences=segments and segments.count))
    got, expected = compiled(inputs, segments), case.run(inputs, segments)
    kinds = [y.dtype if y.is_floating_point() else torch.float64 for y in outputs(expected)]
    allowed = [64 * torch.finfo(kind).eps for kind in kinds]  # same algorithm, reordered operations
    _against(case, got, outputs(expected), allowed, f"compiled, {case.length} tokens")
    d_got, d_want = (_gradients(y, inputs) for y in (got, expected))
    allowed = [64 * torch.finfo(y.dtype).eps * case.length for y in d_want]
    assert_within(compare(list(differentiable(inputs)), d_got, d_want, allowed), "compiled, gradients")


def strides_do_not_matter(case: Case) -> None:
    """Compare inputs that are transposed in memory or expanded (stride 0) with the oracle."""
    inputs = case.inputs()
    transposed = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in inputs.items()}
    expanded = inputs | {"v": inputs["v"][:, :1].expand_as(inputs["v"])}
    for strided in (transposed, expanded):
        assert_within(measure.forward_and_gradients(case, strided), "strided")


def half_precision_inputs_keep_float32_beliefs(case: Case) -> None:
    for dtype in (torch.bfloat16,) if case.interpreted else (torch.bfloat16, torch.float16):
        half = case.with_changes(dtype=dtype)
        got = half.run(half.inputs())
        assert got.mean.dtype == dtype
        carried = {field: part.dtype for field, part in zip(got.belief._fields, got.belief, strict=True)}
        assert all(kind == torch.float32 for field, kind in carried.items() if f"prior.{field}" not in DATA)
        assert_within(measure.forward_and_gradients(half, half.inputs()), str(dtype))


def autocast_changes_nothing(case: Case) -> None:
    """Check that autocast does not change dtypes, since it would round the belief."""
    inputs = case.inputs()
    expected = outputs(case.run(inputs))
    with torch.autocast(case.device, dtype=torch.bfloat16):
        got = outputs(case.run(inputs))
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def nothing_reaches_other_sequences(case: Case) -> None:
    """Check that NaN, infinity or overflow in a sequence or in padding does not change other sequences or gradients."""
    fills = isolation.FILLS[:1] if case.interpreted else isolation.FILLS
    for trial in [case] if case.interpreted else isolation.lengths(case):
        isolation.assert_packed_isolated(trial, fills)
        if not case.interpreted:
            isolation.assert_rows_isolated(trial, fills)


def nothing_later_reaches_earlier_tokens(case: Case) -> None:
    """Check that a token with NaN does not change the outputs of earlier tokens."""
    for trial in isolation.lengths(case):
        isolation.assert_causal(trial)


def _assert_correct_or_refused(case: Case, *ways: derivatives.Derive) -> None:
    case = case.with_changes(length=6)
    for derive in ways:
        if derivatives.supports_transforms(case):
            assert_within(derivatives.measure(case, derive), "against the oracle")
        else:
            derivatives.assert_refused(case, derive, list(differentiable(case.inputs())))


def second_derivatives_are_right_or_refused(case: Case) -> None:
    _assert_correct_or_refused(case, derivatives.hessian_product)


def forward_mode_is_right_or_refused(case: Case) -> None:
    """Check forward mode, also over reverse mode as in `torch.func.hessian`."""
    _assert_correct_or_refused(case, derivatives.forward_mode, derivatives.jvp, derivatives.curvature)


def vmap_is_right_or_refused(case: Case) -> None:
    _assert_correct_or_refused(case, derivatives.batched)


LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        agrees_with_the_oracle,
        agrees_over_all_documented_noises,
        agrees_at_lengths_around_tiles,
        any_split_gives_the_same,
        one_at_a_time_equals_the_whole,
        packed_equals_separate,
        padding_changes_nothing,
        empty_input_passes_the_belief_through,
        gradients_agree_with_the_oracle,
        idle_tokens_leave_the_belief,
        outputs_are_fully_written,
        the_same_call_gives_the_same_bits,
        compiles_to_one_graph,
        compiles_with_inductor,
        strides_do_not_matter,
        half_precision_inputs_keep_float32_beliefs,
        autocast_changes_nothing,
        nothing_reaches_other_sequences,
        nothing_later_reaches_earlier_tokens,
        second_derivatives_are_right_or_refused,
        forward_mode_is_right_or_refused,
        vmap_is_right_or_refused,
    )
}

OF_VARIANCE: dict[str, Law] = {law.__name__: law for law in (variances_stay_positive, evidence_never_raises_variance)}


def laws(case: Case) -> dict[str, Law]:
    """Return the laws of a case by name.

    Laws of variances need a belief with a variance, laws of idle tokens an `evidence_signal`. Laws that compare bits
    are left out where the result is always equal.
    """
    found = LAWS | OF_VARIANCE if case.problem.design.has_variance else dict(LAWS)
    if case.problem.evidence_signal is None:
        del found[idle_tokens_leave_the_belief.__name__], found[evidence_never_raises_variance.__name__]
    if case.row.triton:  # a tile is a matrix product, and NaN times 0 is NaN
        del found[nothing_later_reaches_earlier_tokens.__name__]
    if case.interpreted or case.kernel == "reference":  # slow; plain PyTorch
        del found[compiles_with_inductor.__name__]
    if case.interpreted:  # slow; the default length has more than one tile
        del found[the_same_call_gives_the_same_bits.__name__], found[agrees_at_lengths_around_tiles.__name__]
    return found
