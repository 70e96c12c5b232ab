"""`delta`: closed forms, and the table of bad input that was tried."""

import pytest
import torch
from memories import BAD, B, G, H, K, T, V, belief, check_nothing, check_refusal, signals

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
def test_bad_signals(case, kernel):
    changes, message = TABLE[case]
    with pytest.raises(ArgumentError) as caught:
        ops.delta(**signals(**changes), kernel=kernel)
    check_refusal(caught.value, message)


def test_unknown_kernels():
    with pytest.raises(KernelError, match=r"`delta` has no kernel 'fast'; it has .*chunked, reference"):
        ops.delta(**signals(), kernel="fast")


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_passes_the_belief_through(kernel):
    check_nothing(ops.delta, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_gain_along_the_key_is_a_vector(kernel):
    x = signals()
    vector = x["gain"][..., None] * x["k"].expand(B, T, G, K)
    got, want = ops.delta(**x, kernel=kernel), ops.delta(**x | {"gain": vector}, kernel=kernel)
    torch.testing.assert_close(got.mean, want.mean)
    torch.testing.assert_close(got.belief.mean, want.belief.mean)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_gain_of_one_over_the_key_squared_stores_the_value(kernel):
    """Read along the key that was written last, the memory answers with the value, whatever was there before."""
    x = signals()
    gain = (1 / x["k"].square().sum(-1)).expand(B, T, G)
    got = ops.delta(**x | {"q": x["k"], "gain": gain}, belief=belief(), kernel=kernel)
    torch.testing.assert_close(got.mean, x["v"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_columns_with_gains_of_their_own_are_heads_of_width_one(kernel):
    """Longhorn: a value head of width 1 a column, all reading one key head."""
    x = signals()
    columns = {"v": x["v"].flatten(2)[..., None], "gain": x["gain"].repeat_interleave(V, 2)}
    columns["log_decay"] = x["log_decay"].repeat_interleave(V, 2)
    got, want = ops.delta(**x | columns, kernel=kernel), ops.delta(**x, kernel=kernel)
    torch.testing.assert_close(got.mean.view_as(want.mean), want.mean)
