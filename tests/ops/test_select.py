"""Tests of kernel selection, and of the cache of checked calls."""

import pytest
import torch

import kalmix
from kalmix import ops
from kalmix.errors import ArgumentError
from kalmix.ops import OPS
from kalmix.ops._delta import api
from kalmix.ops._shared import dispatch, gpu
from kalmix.ops._shared.dispatch import select_kernel
from kalmix.ops._shared.kernel import Kernel, KernelRequest


def make_request(tokens: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> KernelRequest:
    return KernelRequest(device, dtype, 16, 16, tokens)


@pytest.mark.parametrize("op", OPS)
def test_long_sequences_run_chunked_and_single_tokens_run_reference(op):
    assert select_kernel(op, OPS[op].kernels, make_request(512)).name == "chunked"
    assert select_kernel(op, OPS[op].kernels, make_request(1)).name == "reference"


def test_requested_kernel_runs_below_its_min_tokens():
    assert select_kernel("delta", OPS["delta"].kernels, make_request(1), "chunked").name == "chunked"


def test_last_kernel_runs_if_none_is_preferred():
    rows = (Kernel("fast", lambda: None, min_tokens=64), Kernel("big", lambda: None, min_tokens=16))  # type: ignore[arg-type]
    assert select_kernel("none", rows, make_request(1)).name == "big"


@pytest.mark.parametrize(("tokens", "name"), [(15, "any"), (16, "big"), (63, "big"), (64, "fast"), (65, "fast")])
def test_kernel_is_preferred_from_min_tokens(tokens, name):
    rows = tuple(
        Kernel(name, lambda: None, min_tokens=min_tokens)  # type: ignore[arg-type]
        for name, min_tokens in (("fast", 64), ("big", 16), ("any", 1))
    )
    assert select_kernel("none", rows, make_request(tokens)).name == name


@pytest.mark.parametrize("op", OPS)
def test_chunked_runs_from_its_min_tokens(op):
    min_tokens = next(kernel.min_tokens for kernel in OPS[op].kernels if kernel.name == "chunked")
    assert min_tokens > 1
    assert select_kernel(op, OPS[op].kernels, make_request(min_tokens)).name == "chunked"
    assert select_kernel(op, OPS[op].kernels, make_request(min_tokens - 1)).name == "reference"


def test_key_width_limit_of_single_precision_exempts_bfloat16():
    row = next(kernel for kernel in OPS["attend"].kernels if kernel.name == "triton")
    reasons = [
        row.unsupported_reason(KernelRequest("cuda", dtype, 192, 192, 64)) for dtype in (torch.float32, torch.bfloat16)
    ]
    assert "at most 128" in str(reasons[0]) and (reasons[1] is None or "Triton" in reasons[1])


@pytest.mark.parametrize("major", [8, 9, 10, 12])
def test_blackwell_is_refused(monkeypatch, major):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (major, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert ("Blackwell" in str(gpu.unsupported_blackwell(0))) == (major == 10)


@pytest.mark.parametrize(("memory", "width"), [(163, 256), (99, 129), (99, 128), (227, 256)])
def test_ridge_refuses_wide_keys_on_gpus_with_little_shared_memory(monkeypatch, memory, width):
    monkeypatch.setattr(gpu, "gpu_shared_memory", lambda index: memory * 1024)
    monkeypatch.setattr("kalmix.ops._shared.environment.HAS_TRITON", True)
    row = next(kernel for kernel in OPS["ridge"].kernels if kernel.name == "triton")
    reason = row.unsupported_reason(KernelRequest("cuda", torch.bfloat16, width, 64, 256))
    assert (f"{memory} KiB" in str(reason)) == (width > 128 and memory < 192)


@pytest.mark.parametrize(("width", "name"), [(7, "any"), (8, "wide"), (64, "wide")])
def test_kernel_is_preferred_from_its_key_width(width, name):
    rows = (Kernel("wide", lambda: None, preferred_min_key_width=8), Kernel("any", lambda: None))  # type: ignore[arg-type]
    request = KernelRequest("cpu", torch.float32, width, 16, 512)
    assert select_kernel("none", rows, request).name == name
    assert select_kernel("none", rows, request, "wide").name == "wide"


def test_checks_are_skipped_for_calls_that_differ_in_values_only(monkeypatch):
    monkeypatch.setattr(dispatch, "_CHECKED_CALLS", {})
    calls = []
    check = api._check
    monkeypatch.setattr(api, "_check", lambda *arguments: calls.append(None) or check(*arguments))
    x, gain = torch.zeros(1, 5, 2, 4), torch.ones(1, 5, 2)
    with kalmix.checks(False):
        for scale in (0.5, 2.0):
            ops.delta(x, x, x, gain=scale * gain, kernel="triton")
        assert len(calls) == 1
        with pytest.raises(ArgumentError, match="gain"):
            ops.delta(x, x, x, gain=gain[:, :4], kernel="triton")
        with pytest.raises(ArgumentError, match="`k` has dtype"):
            ops.delta(x, x.double(), x, gain=gain, kernel="triton")
    with pytest.raises(ArgumentError):
        ops.delta(x, x, x, gain=gain * torch.nan, kernel="triton")


def test_true_is_not_taken_for_one_in_a_checked_call(monkeypatch):
    monkeypatch.setattr(dispatch, "_CHECKED_CALLS", {})
    x = torch.zeros(1, 5, 2, 4)
    with kalmix.checks(False):
        OPS["ridge"].function(x, x, x, variance=True, kernel="triton")
        with pytest.raises(ArgumentError, match="variance"):
            OPS["ridge"].function(x, x, x, variance=1, kernel="triton")
