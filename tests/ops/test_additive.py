"""Closed forms of `additive`, and bad inputs."""

import pytest
import torch
from memories import BAD, B, G, K, T, V, belief, check_error, check_zero_tokens, signals

from kalmix import ArgumentError, KernelError, ops

KERNELS = ["reference", "chunked"]
ONLY_HERE = {
    "a gain per key": ({"gain": torch.rand(B, T, G, K)}, "`gain` has shape [2, 5, 2, 3]; expected [B=2, T=5, G=2]")
}
TABLE = BAD | ONLY_HERE


@pytest.mark.parametrize("kernel", [None, *KERNELS])
@pytest.mark.parametrize("case", TABLE)
def test_bad_signals_raise_argument_error(case, kernel):
    changes, message = TABLE[case]
    with pytest.raises(ArgumentError) as caught:
        ops.additive(**signals(**changes), kernel=kernel)
    check_error(caught.value, message)


def test_unknown_kernel_raises_kernel_error():
    with pytest.raises(KernelError, match=r"`additive` has no kernel 'fast'; it has .*chunked, reference"):
        ops.additive(**signals(), kernel="fast")


@pytest.mark.parametrize("kernel", KERNELS)
def test_zero_tokens_return_the_prior(kernel):
    check_zero_tokens(ops.additive, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_without_decay_equals_causal_linear_attention(kernel):
    x = {name: y.double() for name, y in signals(log_decay=None).items() if y is not None}
    scores = torch.einsum("bthk,bshk->bts", x["q"], x["k"]).tril()
    want = torch.einsum("bts,bsg,bsgv->btgv", scores, x["gain"], x["v"])
    got = ops.additive(**x, kernel=kernel)
    torch.testing.assert_close(got.mean, want, rtol=1e-12, atol=1e-12)
    memory = torch.einsum("bshk,bsg,bsgv->bgkv", x["k"], x["gain"], x["v"])
    torch.testing.assert_close(got.belief.mean, memory, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_absent_decay_and_gain_equal_ones(kernel):
    x = signals()
    prior = belief()
    given = x | {"log_decay": torch.zeros(B, T, G, K), "gain": torch.ones(B, T, G)}
    got = ops.additive(**{name: x[name] for name in "qkv"}, belief=prior, kernel=kernel)
    want = ops.additive(**given, belief=prior, kernel=kernel)
    torch.testing.assert_close(got.mean, want.mean)
    assert got.mean.shape == (B, T, G, V)
