"""Arguments of `kalmix.oracle`: wrong ones raise `ArgumentError`, options mean the same as in `filter`."""

import pytest
import torch

import kalmix
from kalmix import ArgumentError, designs, ops

B, T, H, G, K = 2, 5, 1, 2, 4


def arguments(design):
    torch.manual_seed(0)
    shapes = {"log_decay": (B, T, G), "frequency": (H, K // 2), "key_noise": (H,), "query_noise": (H,)}
    if design.op == "attend":
        shapes |= {"log_decay": (H,), "process_noise": (H,)}
    if design.op == "diagonal":
        shapes |= {"log_decay": (G, K, K), "process_noise": (G, K, K), "precision": (B, T, G, K)}
    drawn = {name: 0.1 + torch.rand(shapes.get(name, (B, T, G))) for name in design.signals}
    tokens = {"q": torch.randn(B, T, H, K), "k": torch.randn(B, T, H, K), "v": torch.randn(B, T, G, K)}
    return tokens | {name: -x if name == "log_decay" else x for name, x in drawn.items()}


@pytest.mark.parametrize("name", ["deltanet", "bayesian", "kla", "gated-kalmanet", "afa"])
def test_oracle_checks_its_arguments(name):
    design = designs.CATALOGUE[name]
    given = arguments(design)
    exact = kalmix.oracle(design, **given)
    wrong = {name: [x[..., None], 1.0, x.to("meta"), x + 0j] for name, x in given.items()}
    wrong["belief"] = [torch.zeros(1), exact, 3, exact.belief._replace(**{exact.belief._fields[0]: 3})]
    wrong["belief"] += [type(exact.belief)(*(change(x) for x in exact.belief)) for change in (cut, widen)]
    wrong |= {"variance": [1, "no"], "segments": [torch.zeros(1, 3)]}
    wrong |= {option: ["x", -1] for option in design.options}
    for argument, values in wrong.items():
        for value in values:
            with pytest.raises(ArgumentError):
                kalmix.oracle(design, **given | {argument: value})
    assert kalmix.oracle(design, **given, belief=exact.belief).mean.shape == exact.mean.shape


def cut(x):
    return x[:1]


def widen(x):
    return torch.cat([x, x[:, :, :1] if x.ndim > 2 else x[:, :1]], min(2, x.ndim - 1))


@pytest.mark.parametrize("ridge", [0.5, ops.Adaptive(0.5), ops.Fixed(0.5)])
def test_oracle_uses_the_ridge_of_the_call(ridge):
    given = arguments(designs.GATED_KALMANET)
    exact = kalmix.oracle(designs.GATED_KALMANET, **given, ridge=ridge)
    fast = kalmix.filter(designs.GATED_KALMANET, **given, ridge=ridge, solver=ops.Exact())
    torch.testing.assert_close(exact.mean.float(), fast.mean, rtol=1e-3, atol=1e-4)


def test_oracle_of_no_sequences_returns_an_empty_belief():
    given = {name: x[:0] for name, x in arguments(designs.DELTANET).items()}
    assert kalmix.oracle(designs.DELTANET, **given).belief.mean.shape == (0, G, K, K)
