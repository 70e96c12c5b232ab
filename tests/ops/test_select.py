"""Which kernel a call gets."""

import pytest
import torch

from kalmix.ops import OPS
from kalmix.ops._shared.dispatch import select
from kalmix.ops._shared.kernel import Call, Kernel


def call(tokens: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Call:
    return Call(device, dtype, 16, 16, tokens)


@pytest.mark.parametrize("op", OPS)
def test_long_calls_are_chunked_and_short_ones_stepped(op):
    assert select(op, OPS[op].kernels, call(512)).name == "chunked"
    assert select(op, OPS[op].kernels, call(1)).name == "reference"


def test_a_pinned_kernel_serves_whatever_pays():
    assert select("delta", OPS["delta"].kernels, call(1), "chunked").name == "chunked"


def test_the_last_row_serves_where_none_pays():
    rows = (Kernel("fast", lambda: None, pays_from=64), Kernel("big", lambda: None, pays_from=16))  # type: ignore[arg-type]
    assert select("none", rows, call(1)).name == "big"


@pytest.mark.parametrize(("tokens", "name"), [(15, "any"), (16, "big"), (63, "big"), (64, "fast"), (65, "fast")])
def test_a_row_serves_from_the_length_at_which_it_pays(tokens, name):
    rows = tuple(
        Kernel(name, lambda: None, pays_from=least)  # type: ignore[arg-type]
        for name, least in (("fast", 64), ("big", 16), ("any", 1))
    )
    assert select("none", rows, call(tokens)).name == name


@pytest.mark.parametrize("op", OPS)
def test_chunked_serves_from_the_length_at_which_it_pays(op):
    least = next(kernel.pays_from for kernel in OPS[op].kernels if kernel.name == "chunked")
    assert least > 1
    assert select(op, OPS[op].kernels, call(least)).name == "chunked"
    assert select(op, OPS[op].kernels, call(least - 1)).name == "reference"


def test_wide_keys_are_refused_in_single_precision_only():
    row = next(kernel for kernel in OPS["attend"].kernels if kernel.name == "triton")
    refusals = [row.refuses(Call("cuda", dtype, 192, 192, 64)) for dtype in (torch.float32, torch.bfloat16)]
    assert "at most 128" in str(refusals[0]) and (refusals[1] is None or "Triton" in refusals[1])


@pytest.mark.parametrize(("width", "name"), [(7, "any"), (8, "wide"), (64, "wide")])
def test_a_row_serves_keys_of_the_width_for_which_it_is_preferred(width, name):
    rows = (Kernel("wide", lambda: None, wide_from=8), Kernel("any", lambda: None))  # type: ignore[arg-type]
    asked = Call("cpu", torch.float32, width, 16, 512)
    assert select("none", rows, asked).name == name
    assert select("none", rows, asked, "wide").name == "wide"
