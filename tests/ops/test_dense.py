"""Tests of `dense`: argument errors, and properties of kernel "chunked" beyond the laws."""

import pytest
import torch
from torch import Tensor

from kalmix import ArgumentError, DenseBelief, KernelError, Segments, ops
from kalmix.ops._dense import chunked, reference, sequence_batching
from kalmix.ops._dense.signals import DenseSignals
from kalmix.testing.tolerances import relative_error

B, T, H, G, K, V = 2, 5, 1, 2, 4, 3


def signals(**changes):
    torch.manual_seed(0)
    good = {
        "q": torch.randn(B, T, H, K),
        "k": torch.randn(B, T, H, K),
        "v": torch.randn(B, T, G, V),
        "obs_noise": torch.rand(B, T, G) + 0.1,
        "process_noise": torch.rand(B, T, G),
        "log_decay": -torch.rand(B, T, G, K),
    }
    return good | changes


def belief(n=B, g=G, k=K, v=V, dtype=torch.float32):
    return DenseBelief(torch.zeros(n, g, k, v, dtype=dtype), torch.eye(k, dtype=dtype).expand(n, g, k, k))


def with_bad_value(name, value):
    x = signals()[name].clone()
    x.view(-1)[-1] = value
    return {name: x}


def with_key_width(k):
    return {name: torch.randn(B, T, H, k) for name in "qk"}


NO_DECAY = {"log_decay": None}
BAD = {
    "q without heads": ({"q": torch.randn(B, T, K)}, "`q` has shape [2, 5, 4]; expected [B, T, H, K]"),
    "k of another width": (
        {"k": torch.randn(B, T, H, K + 1)},
        "`k` has shape [2, 5, 1, 5]; expected [B=2, T=5, H=1, K=4]",
    ),
    "v of another length": ({"v": torch.randn(B, T + 1, G, V)}, "`v`"),
    "heads that do not divide": (
        {"q": torch.randn(B, T, 3, K), "k": torch.randn(B, T, 3, K)},
        "`v` has 2 heads; expected a multiple of 3 (the key heads)",
    ),
    "obs_noise a column": ({"obs_noise": torch.rand(B, T, G, V)}, "`obs_noise` has shape [2, 5, 2, 3]; expected"),
    "process_noise a key": (
        {"process_noise": torch.rand(B, T, G, K)},
        "`process_noise` has shape [2, 5, 2, 4]; expected",
    ),
    "log_decay of other keys": ({"log_decay": -torch.rand(B, T, G, K + 1)}, "`log_decay` has shape [2, 5, 2, 5]"),
    "log_decay of all tokens": ({"log_decay": -torch.rand(G, K)}, "`log_decay`"),
    "log_decay a pair without turns": (
        {"log_decay": -torch.rand(B, T, G, K // 2)},
        "`log_decay` has shape [2, 5, 2, 2]",
    ),
    "log_decay a key with turns": (
        {"angle": torch.rand(B, T, G, K // 2)},
        "`log_decay` has shape [2, 5, 2, 4]; expected",
    ),
    "angle a key": (NO_DECAY | {"angle": torch.rand(B, T, G, K)}, "`angle` has shape [2, 5, 2, 4]; expected"),
    "turns of an odd width": (
        NO_DECAY | with_key_width(3) | {"angle": torch.rand(B, T, G, 1)},
        "`q` has width 3; expected an even width when `angle` is given",
    ),
    "q of integers": ({"q": torch.ones(B, T, H, K, dtype=torch.int64)}, "`q` has dtype torch.int64"),
    "k of another dtype": ({"k": torch.randn(B, T, H, K, dtype=torch.float64)}, "`k` has dtype torch.float64"),
    "half precision noise": ({"obs_noise": torch.rand(B, T, G).half()}, "`obs_noise` has dtype torch.float16"),
    "v on another device": ({"v": torch.randn(B, T, G, V, device="meta")}, "`v` is on meta; expected a tensor on cpu"),
    "no noise": (with_bad_value("obs_noise", 0.0), "`obs_noise` has a minimum of 0; expected values of at least"),
    "negative noise": (
        with_bad_value("process_noise", -1e-3),
        "`process_noise` has a minimum of -0.001; expected values of at least 0",
    ),
    "positive log-decay": (
        with_bad_value("log_decay", 0.5),
        "`log_decay` has a maximum of 0.5; expected values of at most 0",
    ),
    "NaN in q": (with_bad_value("q", float("nan")), "`q` contains NaN or infinity"),
    "infinite obs_noise": (with_bad_value("obs_noise", float("inf")), "`obs_noise` contains NaN or infinity"),
    "infinite angle": (
        NO_DECAY | {"angle": torch.full((B, T, G, K // 2), float("inf"))},
        "`angle` contains NaN or infinity",
    ),
    "belief of another batch": ({"belief": belief(n=3)}, "`belief.mean` has shape [3, 2, 4, 3]"),
    "belief of another dtype": ({"belief": belief(dtype=torch.float64)}, "`belief.mean` has dtype torch.float64"),
    "covariance of other keys": (
        {"belief": DenseBelief(belief().mean, belief(k=K + 1).covariance)},
        "`belief.covariance` has shape [2, 2, 5, 5]; expected [N=2, G=2, K=4, K=4]",
    ),
    "NaN in the covariance": (
        {"belief": DenseBelief(belief().mean, belief().covariance * float("nan"))},
        "`belief.covariance` contains NaN or infinity",
    ),
    "a tensor for a belief": ({"belief": torch.zeros(B, G, K, V)}, "`belief` is a Tensor; expected a DenseBelief"),
    "a mask for segments": ({"segments": torch.ones(B, T)}, "`segments` is a Tensor; expected kalmix.Segments"),
    "segments beyond the end": ({"segments": Segments(torch.tensor([[0, 0, 6]], dtype=torch.int32))}, "`segments`"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_raise_errors_that_name_them(case):
    changes, message = BAD[case]
    for kernel in (None, "reference", "chunked"):
        with pytest.raises(ArgumentError) as caught:
            ops.dense(**signals(**changes), kernel=kernel)
        assert message in str(caught.value)
        assert isinstance(caught.value, ValueError)
        assert "\n" not in str(caught.value)


def test_unknown_kernel_raises_kernel_error():
    with pytest.raises(KernelError, match=r"`dense` has no kernel 'metal'; it has .*chunked, reference"):
        ops.dense(**signals(), kernel="metal")


# Kernel "chunked".

PACKED = Segments.packed(torch.tensor([0, 13, 13, 14, 40, 61]))  # one segment is empty
GAPS = Segments.of(
    torch.tensor([[0, 3, 17], [2, 0, 61], [0, 20, 35], [1, 5, 5], [1, 30, 60]])
)  # out of order, with gaps
PADDED = Segments.padded(torch.arange(61).expand(3, 61) >= torch.tensor([[0], [17], [60]]))
PADDED_RIGHT = Segments.padded(torch.arange(61).expand(3, 61) < torch.tensor([[61], [16], [0]]))
SEGMENTS = {"packed": PACKED, "gaps": GAPS, "left": PADDED, "right": PADDED_RIGHT}


def arguments(batch=1, length=13, heads=(1, 2), width=4, decay="key", sequences=None, dtype=torch.float64, seed=0):
    """Return random signals and a prior, by name; decays are "none", "head", "key", or "pair" with rotations."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    shape, n = (batch, length, heads[1]), batch if sequences is None else sequences
    root = normal(n, heads[1], width, width) / width**0.5
    made = {
        **{name: normal(batch, length, heads[0], width) / width**0.5 for name in "qk"},
        "v": normal(*shape, 3),
        "obs_noise": 0.1 + normal(*shape).exp(),
        "process_noise": 0.1 * normal(*shape).square(),
        "log_decay": -0.1 * normal(*shape, *{"key": (width,), "pair": (width // 2,)}.get(decay, ())).square(),
        "angle": normal(*shape, width // 2),
        "mean": normal(n, heads[1], width, 3),
        "covariance": root @ root.mT,
    }
    absent = {"none": ("log_decay", "angle"), "pair": ()}.get(decay, ("angle",))
    return {name: None if name in absent else x.to(dtype) for name, x in made.items()}


def answer(kernel, args, segments=None, dtype=None):
    """Return outputs and gradients by name, of a random linear function; the covariance is symmetrised first."""
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in args.items() if x is not None}
    *tokens, mean, covariance = (leaves.get(name) for name in args)
    got = kernel.dense(DenseSignals(*tokens), DenseBelief(mean, (covariance + covariance.mT) / 2), segments, True)
    outputs = {"mean": got.mean, "variance": got.variance, "final mean": got.belief.mean}
    outputs["final covariance"] = got.belief.covariance
    draw = torch.Generator().manual_seed(1)
    loss = sum((x.double() * torch.randn(x.shape, generator=draw, dtype=torch.float64)).sum() for x in outputs.values())
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {name: x.detach() for name, x in outputs.items()}, dict(zip(leaves, grads, strict=True))


def check(args, segments=None, tolerance=1e-10):
    got, expected = (answer(kernel, args, segments) for kernel in (chunked, reference))
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, x in theirs.items():
            assert ours[name].dtype == x.dtype and ours[name].shape == x.shape, name
            torch.testing.assert_close(ours[name], x, rtol=0, atol=tolerance * float(1 + x.abs().max()), msg=name)
    return got


@pytest.fixture(params=[(16, 8, 1 << 24), (32, 8, 1 << 24), (4, 3, 1 << 24), (8, 8, 1)], ids=["8", "16", "2", "room"])
def tiling(request, monkeypatch):
    """Set tiles of 8, 16, 2 and 4 tokens (for narrow keys); the last case prepares one step at a time."""
    for name, value in zip(("TILE", "MAX_GROUP_STEPS", "MAX_GROUP_NUMEL"), request.param, strict=True):
        monkeypatch.setattr(sequence_batching, name, value)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "decay"),
    [(1, 1, (1, 1), "key"), (2, 13, (1, 3), "head"), (1, 150, (2, 4), "pair"), (3, 64, (1, 1), "none")],
)
def test_chunked_agrees_with_reference(tiling, batch, length, heads, decay):
    check(arguments(batch, length, heads, decay=decay))


@pytest.mark.parametrize(("name", "decay"), [("packed", "pair"), ("gaps", "key"), ("left", "none"), ("right", "head")])
def test_chunked_agrees_with_reference_on_segments(tiling, name, decay):
    segments, batch = SEGMENTS[name], 1 if name == "packed" else 3
    args = arguments(batch, 61, sequences=segments.count, decay=decay)
    outputs, grads = check(args, segments)
    outside = segments.segment_ids(batch, 61) < 0
    tokens = [grads[x] for x in grads if x not in ("mean", "covariance")]
    assert all((x[outside] == 0).all() for x in (outputs["mean"], outputs["variance"], *tokens))


EXTREMES = [
    {"process_noise": 0.0},
    {"process_noise": 1e3},
    {"log_decay": -30.0},
    {"log_decay": -1e3},
    {"k": 0.0},
    {"covariance": 0.0},
    {"obs_noise": 1e-5},
    {"obs_noise": 1e6},
    {"obs_noise": 1e-5, "process_noise": 0.0, "log_decay": 0.0},
]


@pytest.mark.parametrize("decay", ["key", "pair"])
@pytest.mark.parametrize("extreme", EXTREMES, ids=str)
def test_chunked_agrees_with_reference_at_extreme_signals(extreme, decay):
    args = arguments(2, 40, decay=decay)
    args |= {name: torch.full_like(args[name], value) for name, value in extreme.items()}
    _, grads = check(args, tolerance=1e-9)
    assert all(torch.isfinite(x).all() for x in grads.values())


def test_strong_decay_of_one_token_keeps_precision_of_others():
    """Differences of cumulative log-decays would lose the digits of the weak ones."""
    args = arguments(1, 48, decay="key", dtype=torch.float32)
    args["log_decay"][:, 3] = -1e4
    got, grads = answer(chunked, args)
    exact, exact_grads = answer(reference, args, dtype=torch.float64)
    for name, x in (exact | exact_grads).items():
        assert relative_error((got | grads)[name], x) < 48 * 16 * torch.finfo(torch.float32).eps, name


LONG = [(obs, noise, decay) for obs in (1e-4, 1e-3) for noise, decay in ((0.0, 0.0), (1e-6, 0.0), (1e-6, -1e-3))]


@pytest.mark.slow
@pytest.mark.parametrize("rotates", [False, True], ids=["still", "turning"])
def test_covariance_is_positive_after_100000_tokens(rotates):
    """Repeated and random keys with nearly certain evidence; without process noise, to rounding of the prior."""
    length, piece, width, draw = 100_000, 25_000, 16, torch.Generator().manual_seed(0)
    setting = torch.tensor(LONG).repeat(2, 1)  # repeated keys, then random ones
    obs, noise, decay = (x.expand(piece, 1, -1).permute(2, 0, 1) for x in setting.mT[:, None, None, :])
    shape = (len(setting), piece, 1)
    same = torch.randn(width, generator=draw)
    final = None
    for _ in range(0, length, piece):
        k = torch.randn(*shape, width, generator=draw)
        k[: len(LONG)] = same
        angle = None
        if rotates:
            k[..., width // 2 :] = 0
            angle = torch.randn(*shape, width // 2, generator=draw)
        k = k / k.norm(dim=-1, keepdim=True)
        v = torch.randn(*shape, 1, generator=draw)
        tokens = {"obs_noise": obs, "process_noise": noise, "log_decay": decay, "angle": angle, "belief": final}
        got = ops.dense(k, k, v, **tokens, variance=True, kernel="chunked")
        final = got.belief
        lowest = torch.linalg.eigvalsh(final.covariance.double())[:, 0, 0]
        assert torch.isfinite(got.mean).all() and float(got.variance.min()) >= 0
        noisy = setting[:, 1] > 0
        assert float(lowest[~noisy].min()) >= -1e-7
        assert float(lowest[noisy].min()) > 0


@pytest.mark.parametrize("noise", [1e-9, 1e-12, 1e-30])
def test_tiny_noise_gives_finite_results(noise):
    """C has no Cholesky factor in float32, so the noise is increased."""
    args = arguments(2, 200, width=8, decay="none", dtype=torch.float32)
    args["k"] = args["k"][:, :1].expand_as(args["k"])
    args |= {"obs_noise": torch.full_like(args["obs_noise"], noise), "process_noise": args["process_noise"] * 0}
    args["v"] = args["v"][:, :1].expand_as(args["v"])
    got, grads = answer(chunked, args)
    assert all(bool(torch.isfinite(x).all()) for x in (got | grads).values())
    key, value = args["k"][:, 0].repeat_interleave(2, 1), args["v"][:, 0]
    learned = torch.einsum("bgkv,bgk->bgv", got["final mean"], key)
    assert float((learned - value).abs().max()) < 1e-3  # 200 repetitions determine the value
    assert float(torch.linalg.eigvalsh(got["final covariance"]).min()) > -1e-5


@pytest.mark.parametrize("segments", [None, Segments.packed(torch.tensor([0, 100, 512]))], ids=["whole", "packed"])
@pytest.mark.parametrize(("width", "tile", "interval"), [(16, 8, 1), (32, 16, 8)], ids=["narrow", "wide"])
def test_training_stores_few_beliefs(segments, width, tile, interval):
    """One belief per 128 tokens, one per 8 tokens for narrow keys, and the inputs."""
    args = arguments(1, 512, (1, 1), width, sequences=segments and segments.count)
    leaves = {name: x.requires_grad_() for name, x in args.items() if x is not None}
    saved: dict[int, int] = {}

    def record(x: Tensor) -> Tensor:
        saved[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        *tokens, mean, covariance = (leaves.get(name) for name in args)
        chunked.dense(DenseSignals(*tokens), DenseBelief(mean, covariance), segments, True)
    steps, max_tiles = range(0, 512 // tile, interval), 512 // tile + 2
    # With segments, an upper bound: two more tiles, and two sequences while both can be active.
    beliefs = len(steps) if segments is None else sum(min(2, max_tiles // (step + 1)) for step in steps)
    inputs = sum(x.numel() for x in leaves.values())
    assert sum(saved.values()) <= inputs + beliefs * width * (width + 3) + (0 if segments is None else 6)


def test_compiled_graph_size_does_not_depend_on_length():
    sizes = []

    def count(graph, _):
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    for length in (32, 512):
        torch._dynamo.reset()
        compiled = torch.compile(chunked.dense, fullgraph=True, backend=count, dynamic=False)
        *tokens, mean, covariance = arguments(1, length).values()
        got = compiled(DenseSignals(*tokens), DenseBelief(mean, covariance), None, True)
        want = chunked.dense(DenseSignals(*tokens), DenseBelief(mean, covariance), None, True)
        torch.testing.assert_close(got.mean, want.mean)
    assert len(sizes) == 2 and sizes[0] == sizes[1]


def test_only_symmetric_part_of_covariance_gradient_counts():
    args = arguments(1, 20)
    *tokens, mean, covariance = args.values()
    prior = DenseBelief(mean, covariance.requires_grad_())
    upper = torch.randn(4, 4, dtype=torch.float64).triu(1)
    grads = []
    for weight in (upper, (upper + upper.mT) / 2):
        after = chunked.dense(DenseSignals(*tokens), prior, None, False).belief.covariance
        grads.append(torch.autograd.grad((after * weight).sum(), covariance)[0])
    torch.testing.assert_close(*grads)
    assert torch.equal(grads[0], grads[0].mT)


def test_autocast_does_not_change_results():
    args = arguments(1, 40, dtype=torch.float32)
    want = answer(chunked, args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = answer(chunked, args)
    for ours, theirs in zip(got, want, strict=True):
        assert all(torch.equal(ours[name], x) for name, x in theirs.items())


@pytest.mark.parametrize("kernel", ["reference", "chunked"])
def test_gradients_of_half_precision_angles_are_rounded_once(kernel):
    draw = torch.Generator().manual_seed(0)
    q, k, v, angle = (torch.randn(1, 20, 1, n, generator=draw) for n in (4, 4, 3, 2))
    q, k = (torch.cat([x[..., :2], 0 * x[..., 2:]], -1) for x in (q, k))
    halves, noise = [x.half() for x in (q, k, v)], torch.ones(1, 20, 1)

    def gradient(angle):
        found = ops.dense(*halves, obs_noise=noise, process_noise=noise, angle=angle, kernel=kernel)
        return torch.autograd.grad(found.mean.float().sum(), angle)[0]

    half = angle.half()
    got, want = gradient(half.requires_grad_()), gradient(half.detach().float().requires_grad_())
    assert torch.equal(got, want.half())
