"""Isolation: what one sequence or padding holds must not change another sequence, nor later tokens earlier ones.

Spoiled tokens hold NaN, infinity or numbers so large that their products overflow, and so do the upstream gradients
of what is read there. Everything else must stay the same, to the last bit. Values are not checked, as on a GPU, and
signals are those of the op, so that a gain may be as large as any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kalmix.segments import Segments
from kalmix.testing.cases import Case, outputs, parts
from kalmix.testing.measure import differentiable
from kalmix.testing.tolerances import DATA, Tensors
from kalmix.validation import checks

FILLS = ("NaN", "infinity", "overflow")


@dataclass(frozen=True)
class CallResult:
    """Outputs and gradients of one call, by name."""

    reads: Tensors  # [B, T, ...]
    beliefs: Tensors  # [N, ...]
    grads: Tensors


@dataclass(frozen=True)
class Corruption:
    """Tokens `[B, T]` and sequences `[N]` that hold numbers that must not reach others; `fill` is one of `FILLS`."""

    tokens: Tensor
    sequences: Tensor
    fill: str

    def value(self, name: str, x: Tensor) -> Tensor:
        """A tensor like `x` that holds the fill; log-decays are at most 0."""
        largest = {"NaN": float("nan"), "infinity": float("inf"), "overflow": torch.finfo(x.dtype).max ** 0.75}
        return torch.full_like(x, -largest[self.fill] if name == "log_decay" else largest[self.fill])

    def apply(self, case: Case, inputs: Tensors) -> Tensors:
        """The inputs with the fill in every spoiled token and in every prior of a spoiled sequence."""
        corrupted = dict(inputs)
        for name, x in inputs.items():
            prior = name.startswith("prior.")
            if x.is_floating_point() and (prior or case.is_per_token(name)):
                corrupted[name] = self.put(name, x, self.sequences if prior else self.tokens)
        return corrupted

    def put(self, name: str, x: Tensor, where: Tensor) -> Tensor:
        return torch.where(_along(where, x), self.value(name, x), x)


def _along(where: Tensor, x: Tensor) -> Tensor:
    return where.view(*where.shape, *[1] * (x.ndim - where.ndim))


def run(case: Case, inputs: Tensors, segments: Segments | None, corrupted: Corruption) -> CallResult:
    """Call the kernel without value checks; upstream gradients are random, and hold the fill where it is spoiled."""
    inputs = corrupted.apply(case, inputs)
    leaves = {name: x.detach().clone().requires_grad_() for name, x in differentiable(inputs).items()}
    with checks(enabled=False):
        result = case.run_op(inputs | leaves, segments)
        found = dict(zip(case.quantities, (x for x in (result.mean, result.variance) if x is not None), strict=False))
        beliefs = dict(zip((f"belief.{x}" for x in result.belief._fields), parts(result.belief), strict=True))
        generator, given = torch.Generator().manual_seed(case.seed + 1), {}
        for name, y in (found | beliefs).items():
            if y.requires_grad:
                upstream = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
                given[name] = corrupted.put(name, upstream, corrupted.tokens if name in found else corrupted.sequences)
        answers = [(found | beliefs)[name] for name in given]
        grads = torch.autograd.grad(answers, list(leaves.values()), list(given.values()))
    return CallResult(found, beliefs, dict(zip(leaves, grads, strict=True)))


def assert_isolated(
    case: Case, inputs: Tensors, segments: Segments | None, reference: CallResult, corrupted: Corruption
) -> None:
    """Check that nothing but the spoiled tokens and sequences changes, forward and backward.

    Gradients of signals that all sequences share are compared only where no sequence is spoiled. What is read at
    padding is 0, and so is the gradient of what padding holds.
    """
    got, alone = run(case, inputs, segments, corrupted), not bool(corrupted.sequences.any())
    what = f"{corrupted.fill} in {'padding' if alone else 'another sequence'} changes"
    for quantity, x in got.reads.items():
        _assert_same(f"{what} {quantity}", x, reference.reads[quantity], ~corrupted.tokens)
    for quantity, x in got.beliefs.items():
        _assert_same(f"{what} {quantity}", x, reference.beliefs[quantity], ~corrupted.sequences)
    for name, x in got.grads.items():
        where = ~corrupted.sequences if name.startswith("prior.") else ~corrupted.tokens
        if name in case.problem.invariant:
            where = torch.full_like(where, alone)[:1, 0]
        _assert_same(f"{what} d {name}", x, reference.grads[name], where)
    if segments is not None:
        padding = segments.segment_ids(*corrupted.tokens.shape) < 0
        grads = {f"d {name}": x for name, x in got.grads.items() if case.is_per_token(name)}
        for name, x in (got.reads | grads).items():
            assert bool((x[padding] == 0).all()), f"{corrupted.fill} in padding: {name} of padding is not 0"


def _assert_same(what: str, got: Tensor, expected: Tensor, where: Tensor) -> None:
    same = (got == expected) | ~_along(where, got)
    worst = (got.detach().double() - expected.detach().double()).abs()[~same]
    assert bool(same.all()), f"{what}: {int((~same).sum())} entries, by up to {float(worst.max()):.1e}"


def packing(case: Case) -> Segments:
    """Three sequences in a row, then a gap and a fourth; in the next row padding on both sides of one."""
    cut, end = (case.length - 5) // 3, case.length
    rows = [(0, 0, cut), (0, cut, 2 * cut), (0, 2 * cut, 3 * cut), (0, 3 * cut + 1, end), (1, 2, end - 2)]
    return case.segments(rows)


def tokens_of(segments: Segments, case: Case, corrupted: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Masks of the tokens of some sequences (-1: of padding) and of these sequences."""
    segment_ids = segments.segment_ids(case.batch, case.length)
    numbers = torch.arange(segments.count, device=segment_ids.device)
    chosen = torch.tensor(corrupted, device=segment_ids.device)
    return torch.isin(segment_ids, chosen), torch.isin(numbers, chosen)


def assert_packed_isolated(case: Case, fills: tuple[str, ...]) -> None:
    """Check that padding, and then it and the second of three sequences in a row, reach no other sequence."""
    segments = packing(case)
    inputs = case.op_inputs(case.inputs(sequences=segments.count))
    reference = run(case, inputs, segments, Corruption(*tokens_of(segments, case, ()), "NaN"))
    if not case.interpreted:
        padding = Corruption(*tokens_of(segments, case, (-1,)), "NaN")
        assert_isolated(case, inputs, segments, reference, padding)
    for fill in fills:
        neighbour = Corruption(*tokens_of(segments, case, (-1, 1)), fill)
        assert_isolated(case, inputs, segments, reference, neighbour)


def assert_rows_isolated(case: Case, fills: tuple[str, ...]) -> None:
    """Check that no batch row reaches another one."""
    segments, inputs = Segments.whole(case.batch, case.length, case.device), case.op_inputs(case.inputs())
    reference = run(case, inputs, None, Corruption(*tokens_of(segments, case, ()), "NaN"))
    for fill in fills:
        assert_isolated(case, inputs, None, reference, Corruption(*tokens_of(segments, case, (0,)), fill))


def assert_causal(case: Case) -> None:
    """Check that a token that holds NaN changes nothing that is read before it."""
    inputs = case.op_inputs(case.inputs())
    with checks(enabled=False):
        expected = outputs(case.run_op(inputs))[:2]
        for first in (1, case.length // 2, case.length - 1):
            later = {name: x.clone() for name, x in inputs.items()}
            for name in later:
                if case.is_per_token(name) and name not in DATA:
                    later[name][:, first:] = float("nan")
            got = outputs(case.run_op(later))[:2]
            for quantity, x, y in zip(case.quantities[:2], got, expected, strict=True):
                if quantity.startswith("belief"):
                    continue
                assert torch.equal(x[:, :first], y[:, :first]), f"NaN from token {first} on changes {quantity} before"
