"""NaN and infinity stay in their own sequence, forward and backward, and do not affect earlier tokens.

The laws test this for every kernel. These tests run the PyTorch kernels as on a GPU, without reading values, and check
which results become NaN.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from kalmix.beliefs import PointBelief
from kalmix.ops._delta.signals import DeltaSignals
from kalmix.ops._shared import isolation as isolation_op
from kalmix.segments import Segments
from kalmix.testing import isolation
from kalmix.testing.cases import Case, cases
from kalmix.validation import checks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = ("additive", "delta", "dense", "diagonal", "ridge")
CASES = [x for x in cases([DEVICE], (torch.float32,)) if x.op in OPS and x.kernel in ("reference", "chunked")]
LENGTH = 83  # two chunks
NEVER_INFINITE = ("log_decay", "precision", "obs_noise")  # infinity is rejected, or leaves the read-out finite


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def test_sequences_are_isolated_without_value_checks(case, monkeypatch):
    monkeypatch.setattr(isolation_op, "_all_finite", lambda signals: False)
    for tried in (case, case.with_changes(length=LENGTH)) if case.kernel == "chunked" else (case,):
        isolation.assert_packed_isolated(tried, isolation.FILLS)
        isolation.assert_rows_isolated(tried, isolation.FILLS)
        isolation.assert_causal(tried)


@pytest.mark.parametrize("reads_values", [True, False], ids=["reads values", "does not read values"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_results_that_depend_on_a_non_finite_value_are_non_finite(case, value, reads_values, monkeypatch):
    """The value is set in one signal at a time, in one value head, in the middle of the second of three sequences."""
    if not reads_values:
        monkeypatch.setattr(isolation_op, "_all_finite", lambda signals: False)
    first, token, end, length = (10, 50, 70, LENGTH) if case.kernel == "chunked" else (2, 5, 8, 10)
    case = case.with_changes(length=length, key_heads=2)
    segments = case.segments([(0, 0, first), (0, first, end), (0, end, length)])
    inputs = case.op_inputs(case.inputs(sequences=3))
    with checks(enabled=False):
        want = case.run_op(inputs, segments)
        for name, x in inputs.items():
            if not case.is_per_token(name) or name in ("q", "mix") or (value > 0 and name in NEVER_INFINITE):
                continue
            bad = x.clone()
            bad[0, token, 1] = value
            got = case.run_op(inputs | {name: bad}, segments)
            assert not bool(got.mean[0, token:end, 1].isfinite().all(-1).any()), name
            assert not bool(got.belief[0][1, 1].isfinite().all()), name
            for a, b in zip((got.mean, *got.belief), (want.mean, *want.belief), strict=True):
                same = a == b
                assert bool(same[:, :, 0].all() if a is got.mean else same[:, 0].all()), name  # the other head
                assert bool(same[0, :token].all() and same[0, end:].all() if a is got.mean else same[::2].all()), name


@pytest.mark.parametrize("module", ["reference", "chunked", "custom_op"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "compiled"])
def test_divergence_of_one_sequence_affects_no_other(module, compiled):
    """Three finite sequences in one row; the memory of the second grows by about 1e4 per token."""
    if compiled and module != "chunked":
        return
    length, width = 20 if module == "custom_op" and DEVICE == "cpu" else 48, 4
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 3 * length, 1, width, generator=generator).to(DEVICE) for _ in range(3))
    gain = torch.full((1, 3 * length, 1), 0.1, device=DEVICE)
    wild = gain.clone()
    wild[:, length : 2 * length] = 1e4
    function: Any = import_module(f"kalmix.ops._delta.{module}").delta
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)
    segments = Segments.packed(torch.tensor([0, length, 2 * length, 3 * length], device=DEVICE))
    prior = PointBelief(torch.zeros(3, 1, width, width, device=DEVICE))
    results: list[list[Tensor]] = []
    for g in (gain, wild):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, g)]
        found = function(DeltaSignals(*leaves, None), prior, segments)
        loss = found.mean[:, 2 * length :].sum() + found.mean[:, :length].sum() + found.belief.mean[[0, 2]].sum()
        results.append([found.mean.detach(), *torch.autograd.grad(loss, leaves)])
        assert bool(found.belief.mean[[0, 2]].isfinite().all())
    assert not bool(results[1][0][:, length : 2 * length].isfinite().all())
    for want, got in zip(*results, strict=True):
        for part in (slice(0, length), slice(2 * length, None)):
            assert bool(want[:, part].isfinite().all())
            torch.testing.assert_close(got[:, part], want[:, part], rtol=0, atol=0)
