"""Bad inputs: every one raises an error of one sentence that names the argument."""

import pickle

import pytest
import torch

import kalmix
from kalmix import (
    ArgumentError,
    DesignError,
    DiagonalBelief,
    HistoryBelief,
    KernelError,
    PointBelief,
    Segments,
    designs,
    ops,
)
from kalmix.errors import NonFiniteError

B, T, H, G, K, V = 2, 5, 1, 2, 3, 4


def signals(**changes):
    torch.manual_seed(0)
    good = {
        "q": torch.randn(B, T, H, K),
        "k": torch.randn(B, T, H, K),
        "v": torch.randn(B, T, G, V),
        "precision": torch.rand(B, T, G, V),
        "log_decay": -torch.rand(G, K, V),
        "process_noise": torch.rand(G, K, V),
    }
    return good | changes


def belief(n=B, g=G, k=K, v=V, dtype=torch.float32, variance=1.0):
    return DiagonalBelief(torch.zeros(n, g, k, v, dtype=dtype), torch.full((n, g, k, v), variance, dtype=dtype))


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
    "v of another length": ({"v": torch.randn(B, T + 1, G, V)}, "`v`"),
    "precision of another width": ({"precision": torch.rand(B, T, G, V + 1)}, "`precision`"),
    "log_decay of other heads": ({"log_decay": -torch.rand(G + 1, K, V)}, "`log_decay`"),
    "process_noise transposed": ({"process_noise": torch.rand(G, V, K)}, "`process_noise`"),
    "heads that do not divide": (
        {"q": torch.randn(B, T, 3, K), "k": torch.randn(B, T, 3, K)},
        "`v` has 2 heads; expected a multiple of 3 (the key heads)",
    ),
    "q of integers": ({"q": torch.ones(B, T, H, K, dtype=torch.int64)}, "`q` has dtype torch.int64"),
    "k of another dtype": ({"k": torch.randn(B, T, H, K, dtype=torch.float64)}, "`k` has dtype torch.float64"),
    "half precision noise": ({"process_noise": torch.rand(G, K, V).half()}, "`process_noise` has dtype torch.float16"),
    "v on another device": ({"v": torch.randn(B, T, G, V, device="meta")}, "`v` is on meta; expected a tensor on cpu"),
    "a list for k": ({"k": [[1.0]]}, "`k` is a list; expected a tensor"),
    "negative precision": (
        one_bad("precision", -1e-3),
        "`precision` has a minimum of -0.001; expected values of at least 0",
    ),
    "negative noise": (one_bad("process_noise", -1.0), "`process_noise` has a minimum of -1"),
    "positive log-decay": (one_bad("log_decay", 0.5), "`log_decay` has a maximum of 0.5; expected values of at most 0"),
    "NaN in q": (one_bad("q", float("nan")), "`q` contains NaN or infinity"),
    "infinite v": (one_bad("v", float("inf")), "`v` contains NaN or infinity"),
    "infinite precision": (one_bad("precision", float("inf")), "`precision` contains NaN or infinity"),
    "belief of another batch": ({"belief": belief(n=3)}, "`belief.mean` has shape [3, 2, 3, 4]"),
    "belief of another width": ({"belief": belief(v=V + 1)}, "`belief.mean`"),
    "belief of another dtype": ({"belief": belief(dtype=torch.float64)}, "`belief.mean` has dtype torch.float64"),
    "belief with negative variance": ({"belief": belief(variance=-1.0)}, "`belief.variance`"),
    "a tensor for a belief": ({"belief": torch.zeros(B, G, K, V)}, "`belief` is a Tensor"),
    "a mask for segments": ({"segments": torch.ones(B, T)}, "`segments` is a Tensor; expected kalmix.Segments"),
    "segments beyond the batch": ({"segments": Segments(torch.tensor([[2, 0, 3]], dtype=torch.int32))}, "`segments`"),
    "segments beyond the end": ({"segments": Segments(torch.tensor([[0, 0, 6]], dtype=torch.int32))}, "`segments`"),
    "noise that is neither": ({"process_noise": torch.rand(B, T, G, K)}, "`process_noise`"),
}


@pytest.mark.parametrize("kernel", [None, "reference", "chunked"])
@pytest.mark.parametrize("case", BAD)
def test_bad_signals_raise_argument_error(case, kernel):
    changes, message = BAD[case]
    with pytest.raises(ArgumentError) as caught:
        ops.diagonal(**signals(**changes), kernel=kernel)
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


BAD_SEGMENTS = {
    "floats": lambda: Segments.of(torch.zeros(1, 3)),
    "two columns": lambda: Segments.of(torch.zeros(1, 2, dtype=torch.int32)),
    "negative": lambda: Segments.of(torch.tensor([[0, -1, 3]])),
    "backwards": lambda: Segments.of(torch.tensor([[0, 3, 1]])),
    "overlapping": lambda: Segments.of(torch.tensor([[0, 0, 3], [1, 0, 5], [0, 2, 4]])),
    "lengths for cu_seqlens": lambda: Segments.packed(torch.tensor([3, 2])),
    "made of a list": lambda: Segments([[0, 0, 3]]),
    "made of an array": lambda: Segments(torch.zeros(1, 3, dtype=torch.int32).numpy()),
    "made of int64": lambda: Segments(torch.zeros(1, 3, dtype=torch.int64)),
    "made of floats": lambda: Segments(torch.zeros(1, 3)),
    "made of one run": lambda: Segments(torch.zeros(3, dtype=torch.int32)),
    "made of two columns": lambda: Segments(torch.zeros(1, 2, dtype=torch.int32)),
    "made with a negative start": lambda: Segments(torch.tensor([[0, -1, 3]], dtype=torch.int32)),
    "made with a negative row": lambda: Segments(torch.tensor([[-1, 0, 3]], dtype=torch.int32)),
    "made backwards": lambda: Segments(torch.tensor([[0, 3, 1]], dtype=torch.int32)),
    "made overlapping": lambda: Segments(torch.tensor([[0, 0, 3], [0, 2, 4]], dtype=torch.int32)),
    "made of text": lambda: Segments("rows"),
    "of a list": lambda: Segments.of([[0, 0, 3]]),
    "of 2^32": lambda: Segments.of(torch.tensor([[0, 0, 2**32]])),
    "cu_seqlens of 2^32": lambda: Segments.packed(torch.tensor([0, 2**32])),
    "cu_seqlens a list": lambda: Segments.packed([0, 3]),
    "mask a list": lambda: Segments.padded([[1, 0]]),
    "cu_seqlens decreasing": lambda: Segments.packed(torch.tensor([0, 4, 3])),
    "cu_seqlens 2-D": lambda: Segments.packed(torch.tensor([[0, 4]])),
    "mask with a hole": lambda: Segments.padded(torch.tensor([[1, 1, 0], [1, 0, 1]])),
    "mask 1-D": lambda: Segments.padded(torch.tensor([1, 1, 0])),
}


@pytest.mark.parametrize("case", BAD_SEGMENTS)
def test_bad_segments_raise_argument_error(case):
    with pytest.raises(ArgumentError):
        BAD_SEGMENTS[case]()


@pytest.mark.parametrize("rows", [None, [[0, 0, 3]], torch.zeros(1, 2).int(), torch.tensor([[0, -4, 3]]).int()])
def test_ops_check_segments_made_without_checks(rows):
    with pytest.raises(ArgumentError, match="segments"):
        ops.diagonal(**signals(), segments=Segments._make((rows,)))


def test_segments_can_be_made_in_compiled_and_mapped_code():
    def rows(segments):
        return Segments(segments.rows + 0).rows.sum() + Segments.whole(2, 3).rows.sum()

    good = Segments(torch.tensor([[0, 0, 3]], dtype=torch.int32))
    assert torch.compile(rows, fullgraph=True, backend="eager")(good) == rows(good)
    if not torch.__version__.startswith("2.11"):  # 2.11 skips __init__ under compile; ops check again
        with pytest.raises(ArgumentError, match="int32"):
            torch.compile(lambda s: Segments(s.rows.float()).rows, backend="eager")(good)
    mapped = torch.func.vmap(lambda x, segments: x + segments.rows.sum(), in_dims=(0, None))(torch.zeros(2), good)
    assert mapped.tolist() == [3, 3]
    with torch.device("meta"):
        assert Segments(torch.zeros(2, 3, dtype=torch.int32)).count == 2


BAD_INDICES = [[0, 1], 0, torch.tensor(1), torch.tensor([[0]]), torch.tensor([True, False]), torch.tensor([0.0])]
BAD_INDICES.append(torch.zeros(1, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("index", BAD_INDICES)
def test_beliefs_take_integer_vectors_only(index):
    with pytest.raises(ArgumentError, match="`index`"):
        PointBelief(torch.zeros(2, 1, 4, 8)).take(index)


@pytest.mark.parametrize("count", [-1, 1.0, "1", None, True])
def test_newest_tokens_of_a_history_are_counted_from_0(count):
    keys = torch.zeros(1, 3, 1, 2)
    history = HistoryBelief(keys, keys, torch.zeros(1, 3).double(), torch.arange(3)[None])
    assert history.newest(0).keys.shape == (1, 0, 1, 2)
    with pytest.raises(ArgumentError, match="`count`"):
        history.newest(count)


@pytest.mark.parametrize("error", [ArgumentError("x", got=1, expected="2"), NonFiniteError("x"), KernelError("no")])
def test_errors_survive_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_bad_kernel_names_raise_kernel_error():
    with pytest.raises(KernelError, match="no kernel 'fast'; it has cuda, triton, chunked, reference"):
        ops.diagonal(**signals(), kernel="fast")
    wide = {"q": torch.randn(B, T, H, 130), "k": torch.randn(B, T, H, 130)}
    wide |= {"log_decay": -torch.rand(G, 130, V), "process_noise": torch.rand(G, 130, V)}
    with pytest.raises(KernelError, match=r"the key width is 130; it supports at most 128; use 'reference'|not on cpu"):
        ops.diagonal(**signals(**wide), kernel="triton")
    per_token = {"log_decay": -torch.rand(B, T, G, K, V)}
    with pytest.raises(KernelError, match="does not support dynamics that differ from token to token; use 'reference'"):
        ops.diagonal(**signals(**per_token), kernel="chunked")
    assert ops.diagonal(**signals(**per_token)).mean.shape == (B, T, G, V)  # by default, the reference kernel runs


def test_bad_designs_raise_design_error():
    with pytest.raises(DesignError, match="lacks precision"):
        kalmix.filter(designs.KLA, *(signals()[x] for x in "qkv"), log_decay=signals()["log_decay"],
                      process_noise=signals()["process_noise"])  # fmt: skip
    with pytest.raises(DesignError, match="does not accept gain"):
        kalmix.filter(designs.KLA, **signals(), gain=signals()["v"])
    with pytest.raises(DesignError, match="is 'token'"):
        designs.Transition(decay="token")  # type: ignore[arg-type]
    with pytest.raises(DesignError):
        kalmix.oracle(designs.KLA, **signals(), angle=signals()["v"])


def test_values_are_not_checked_under_compile():
    compiled = torch.compile(lambda x: ops.diagonal(**x, kernel="reference").mean, fullgraph=True, backend="eager")
    assert compiled(signals(**one_bad("precision", -1e-3))).shape == (B, T, G, V)


def test_zero_tokens_and_empty_segments_return_the_prior():
    prior = belief(variance=2.0)
    none = {name: x[:, :0] if x.ndim == 4 else x for name, x in signals().items()}
    got = ops.diagonal(**none, belief=prior, variance=True)
    assert got.mean.shape == got.variance.shape == (B, 0, G, V)
    assert all(torch.equal(x, y) for x, y in zip(got.belief, prior, strict=True))
    empty = Segments.of(torch.tensor([[0, 0, 0], [1, 5, 5], [1, 2, 2]]))
    got = ops.diagonal(**signals(), belief=belief(n=3, variance=2.0), segments=empty)
    assert float(got.mean.abs().max()) == 0
    assert torch.equal(got.belief.variance, belief(n=3, variance=2.0).variance)
    no_rows = Segments.of(torch.zeros(0, 3, dtype=torch.int32))
    assert ops.diagonal(**signals(), segments=no_rows).belief.mean.shape == (0, G, K, V)


def test_switch_of_value_checks_is_a_boolean():
    with pytest.raises(ArgumentError, match="`enabled` is 'no'; expected True or False"), kalmix.checks("no"):
        pass
