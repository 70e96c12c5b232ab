"""Closed forms of `delta`, and bad inputs."""

import pytest
import torch
from memories import BAD, B, G, H, K, T, V, belief, check_error, check_zero_tokens, signals

from kalmix import ArgumentError, KernelError, ops

KERNELS = ["reference", "chunked"]
ONLY_HERE = {
    "no gain": ({"gain": None}, "`gain` is None; expected a tensor"),
    "a gain per value": (
        {"gain": torch.rand(B, T, G, V)},
        "`gain` has shape [2, 5, 2, 4]; expected [B=2, T=5, G=2, K=3]",
    ),
    "a gain for the key heads": ({"gain": torch.rand(B, T, H, K)}, "`gain` has shape [2, 5, 1, 3]"),
}
TABLE = BAD | ONLY_HERE


@pytest.mark.parametrize("kernel", [None, *KERNELS])
@pytest.mark.parametrize("case", TABLE)
def test_bad_signals_raise_argument_error(case, kernel):
    changes, message = TABLE[case]
    with pytest.raises(ArgumentError) as caught:
        ops.delta(**signals(**changes), kernel=kernel)
    check_error(caught.value, message)


def test_unknown_kernel_raises_kernel_error():
    with pytest.raises(KernelError, match=r"`delta` has no kernel 'fast'; it has .*chunked, reference"):
        ops.delta(**signals(), kernel="fast")


@pytest.mark.parametrize("kernel", KERNELS)
def test_zero_tokens_return_the_prior(kernel):
    check_zero_tokens(ops.delta, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scalar_gain_equals_vector_gain_along_the_key(kernel):
    x = signals()
    vector = x["gain"][..., None] * x["k"].expand(B, T, G, K)
    got, want = ops.delta(**x, kernel=kernel), ops.delta(**x | {"gain": vector}, kernel=kernel)
    torch.testing.assert_close(got.mean, want.mean)
    torch.testing.assert_close(got.belief.mean, want.belief.mean)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gain_of_inverse_squared_key_norm_stores_the_value(kernel):
    """A query equal to the last key must return the last value for any earlier memory."""
    x = signals()
    gain = (1 / x["k"].square().sum(-1)).expand(B, T, G)
    got = ops.delta(**x | {"q": x["k"], "gain": gain}, belief=belief(), kernel=kernel)
    torch.testing.assert_close(got.mean, x["v"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gains_per_column_equal_value_heads_of_width_one(kernel):
    """Longhorn: one value head of width 1 per column; all share a key head."""
    x = signals()
    columns = {"v": x["v"].flatten(2)[..., None], "gain": x["gain"].repeat_interleave(V, 2)}
    columns["log_decay"] = x["log_decay"].repeat_interleave(V, 2)
    got, want = ops.delta(**x | columns, kernel=kernel), ops.delta(**x, kernel=kernel)
    torch.testing.assert_close(got.mean.view_as(want.mean), want.mean)
