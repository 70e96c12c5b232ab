"""Checks that a sequence does not depend on other sequences or padding, nor a token on later tokens.

Corrupted tokens and their upstream gradients hold NaN, infinity, or numbers whose products overflow. All other outputs
and gradients must stay equal to the last bit. The checks call the op without value checks, as on a GPU.
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
LONG = 200  # tokens: each sequence of a packing is longer than the largest tile of the torch kernels, 64


@dataclass(frozen=True)
class CallResult:
    """Outputs and gradients of one call, by name."""

    reads: Tensors  # [B, T, ...]
    beliefs: Tensors  # [N, ...]
    grads: Tensors


@dataclass(frozen=True)
class Corruption:
    """Masks of corrupted tokens `[B, T]` and sequences `[N]`, and the kind of numbers that they hold (`FILLS`)."""

    tokens: Tensor
    sequences: Tensor
    fill: str

    def value(self, name: str, x: Tensor) -> Tensor:
        """Return a tensor like `x` that holds the fill; log-decays are at most 0."""
        largest = {"NaN": float("nan"), "infinity": float("inf"), "overflow": torch.finfo(x.dtype).max ** 0.75}
        return torch.full_like(x, -largest[self.fill] if name == "log_decay" else largest[self.fill])

    def apply(self, case: Case, inputs: Tensors) -> Tensors:
        """Return the inputs with the fill in every corrupted token and in the prior of every corrupted sequence."""
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
    """Call the kernel without value checks; upstream gradients are random, with the fill at corrupted entries."""
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
    """Check that nothing but the corrupted tokens and sequences changes, forward and backward.

    Gradients of signals that all sequences share are compared only if no sequence is corrupted. Outputs and gradients
    of padding must be 0.
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


def lengths(case: Case) -> list[Case]:
    """Return the case, and one of `LONG` tokens unless the kernel has no tiles."""
    return [case] if case.kernel == "reference" else [case, case.with_changes(length=LONG)]


def packing(case: Case) -> Segments:
    """Return segments: three adjacent sequences, a gap and a fourth; in the next row one with padding on both sides."""
    cut, end = (case.length - 5) // 3, case.length
    rows = [(0, 0, cut), (0, cut, 2 * cut), (0, 2 * cut, 3 * cut), (0, 3 * cut + 1, end), (1, 2, end - 2)]
    return case.segments(rows)


def tokens_of(segments: Segments, case: Case, corrupted: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return masks of the tokens of some sequences (-1: padding) and of these sequences."""
    segment_ids = segments.segment_ids(case.batch, case.length)
    numbers = torch.arange(segments.count, device=segment_ids.device)
    chosen = torch.tensor(corrupted, device=segment_ids.device)
    return torch.isin(segment_ids, chosen), torch.isin(numbers, chosen)


def assert_packed_isolated(case: Case, fills: tuple[str, ...]) -> None:
    """Check that other sequences do not depend on padding, nor on the second of three adjacent sequences."""
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
    """Check that no batch row depends on another."""
    segments, inputs = Segments.whole(case.batch, case.length, case.device), case.op_inputs(case.inputs())
    reference = run(case, inputs, None, Corruption(*tokens_of(segments, case, ()), "NaN"))
    for fill in fills:
        assert_isolated(case, inputs, None, reference, Corruption(*tokens_of(segments, case, (0,)), fill))


def assert_causal(case: Case) -> None:
    """Check that a token with NaN does not change the outputs of earlier tokens."""
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
