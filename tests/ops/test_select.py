"""Which kernel a call gets."""

import pytest
import torch

from kalmix.kernels.kernel import Call, Kernel
from kalmix.kernels.select import select
from kalmix.ops import OPS


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
