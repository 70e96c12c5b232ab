"""Small valid and invalid inputs for `additive` and `delta`."""

import torch

from kalmix import DiagonalBelief, PointBelief, Segments

B, T, H, G, K, V = 2, 5, 1, 2, 3, 4


def signals(**changes):
    """Return signals that both ops accept."""
    draw = torch.Generator().manual_seed(0)
    good = {
        "q": torch.randn(B, T, H, K, generator=draw),
        "k": torch.randn(B, T, H, K, generator=draw),
        "v": torch.randn(B, T, G, V, generator=draw),
        "log_decay": -torch.rand(B, T, G, generator=draw),
        "gain": torch.rand(B, T, G, generator=draw),
    }
    return good | changes


def belief(n=B, g=G, k=K, v=V, dtype=torch.float32):
    return PointBelief(torch.ones(n, g, k, v, dtype=dtype))


def one_bad(name, value):
    x = signals()[name].clone()
    x.view(-1)[-1] = value
    return {name: x}


BAD = {
    "q without heads": ({"q": torch.randn(B, T, K)}, "`q` has shape [2, 5, 3]; expected [B, T, H, K]"),
    "k of another width": (
        {"k": torch.randn(B, T, H, K + 1)},
        "`k` has shape [2, 5, 1, 4]; expected [B=2, T=5, H=1, K=3]",
    ),
    "v of another length": ({"v": torch.randn(B, T + 1, G, V)}, "`v` has shape [2, 6, 2, 4]"),
    "heads that do not divide": (
        {"q": torch.randn(B, T, 3, K), "k": torch.randn(B, T, 3, K)},
        "`v` has 2 heads; expected a multiple of 3 (the key heads)",
    ),
    "q of integers": ({"q": torch.ones(B, T, H, K, dtype=torch.int64)}, "`q` has dtype torch.int64"),
    "k of another dtype": ({"k": torch.randn(B, T, H, K, dtype=torch.float64)}, "`k` has dtype torch.float64"),
    "v on another device": ({"v": torch.randn(B, T, G, V, device="meta")}, "`v` is on meta; expected a tensor on cpu"),
    "a list for k": ({"k": [[1.0]]}, "`k` is a list; expected a tensor"),
    "NaN in q": (one_bad("q", float("nan")), "`q` contains NaN or infinity"),
    "infinite v": (one_bad("v", float("inf")), "`v` contains NaN or infinity"),
    "log_decay of other heads": ({"log_decay": -torch.rand(B, T, G + 1)}, "`log_decay` has shape [2, 5, 3]"),
    "log_decay per value": ({"log_decay": -torch.rand(B, T, G, V)}, "`log_decay` has shape [2, 5, 2, 4]"),
    "log_decay without time": ({"log_decay": -torch.rand(G, K)}, "`log_decay` has shape [2, 3]"),
    "half precision log-decay": ({"log_decay": -torch.rand(B, T, G).half()}, "`log_decay` has dtype torch.float16"),
    "log-decay elsewhere": ({"log_decay": torch.zeros(B, T, G, device="meta")}, "`log_decay` is on meta"),
    "positive log-decay": (one_bad("log_decay", 0.5), "`log_decay` has a maximum of 0.5; expected values of at most 0"),
    "a decay without limit": (one_bad("log_decay", -float("inf")), "`log_decay` contains NaN or infinity"),
    "gain of other heads": ({"gain": torch.rand(B, T, 1)}, "`gain` has shape [2, 5, 1]; expected [B=2, T=5, G=2]"),
    "gain of integers": ({"gain": torch.ones(B, T, G, dtype=torch.int32)}, "`gain` has dtype torch.int32"),
    "gain elsewhere": ({"gain": torch.ones(B, T, G, device="meta")}, "`gain` is on meta"),
    "NaN in gain": (one_bad("gain", float("nan")), "`gain` contains NaN or infinity"),
    "a number for gain": ({"gain": 0.5}, "`gain` is a float; expected a tensor"),
    "belief of another batch": ({"belief": belief(n=3)}, "`belief.mean` has shape [3, 2, 3, 4]"),
    "belief of another width": ({"belief": belief(v=V + 1)}, "`belief.mean` has shape [2, 2, 3, 5]"),
    "belief of another dtype": ({"belief": belief(dtype=torch.float64)}, "`belief.mean` has dtype torch.float64"),
    "belief elsewhere": ({"belief": PointBelief(belief().mean.to("meta"))}, "`belief.mean` is on meta"),
    "NaN in the belief": (
        {"belief": PointBelief(belief().mean * float("nan"))},
        "`belief.mean` contains NaN or infinity",
    ),
    "belief of another op": (
        {"belief": DiagonalBelief(belief().mean, belief().mean)},
        "`belief` is a DiagonalBelief; expected a PointBelief",
    ),
    "a tensor for a belief": ({"belief": torch.zeros(B, G, K, V)}, "`belief` is a Tensor"),
    "a mask for segments": ({"segments": torch.ones(B, T)}, "`segments` is a Tensor; expected kalmix.Segments"),
    "segments beyond the batch": ({"segments": Segments(torch.tensor([[2, 0, 3]], dtype=torch.int32))}, "`segments`"),
    "segments beyond the end": ({"segments": Segments(torch.tensor([[0, 0, 6]], dtype=torch.int32))}, "`segments`"),
    "one belief for two segments": (
        {"belief": belief(n=1), "segments": Segments.of(torch.tensor([[0, 0, 2], [1, 0, 5]]))},
        "`belief.mean` has shape [1, 2, 3, 4]; expected [N=2, G=2, K=3, V=4]",
    ),
}


def check_error(error, message):
    """Check that an error is a `ValueError` of one line that contains `message`."""
    assert message in str(error)
    assert isinstance(error, ValueError)
    assert "\n" not in str(error)


def check_zero_tokens(op, kernel):
    """Check that the prior is returned, with its gradient, if there are no tokens, no sequences or only empty ones."""
    none = {name: x[:, :0] for name, x in signals().items()}
    got = op(**none, belief=belief(), kernel=kernel)
    assert got.mean.shape == (B, 0, G, V) and got.variance is None
    assert torch.equal(got.belief.mean, belief().mean)
    empty = Segments.of(torch.tensor([[0, 0, 0], [1, 5, 5], [1, 2, 2]]))
    prior = belief(n=3).mean.requires_grad_()
    got = op(**signals(), belief=PointBelief(prior), segments=empty, kernel=kernel)
    assert not got.mean.any() and torch.equal(got.belief.mean, prior)
    assert torch.equal(torch.autograd.grad(got.belief.mean.sum(), prior)[0], torch.ones_like(prior))
    no_rows = Segments.of(torch.zeros(0, 3, dtype=torch.int32))
    assert op(**signals(), segments=no_rows, kernel=kernel).belief.mean.shape == (0, G, K, V)
