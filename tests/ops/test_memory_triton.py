"""Triton kernels of `additive` and `delta`: tiles, levels of decays, launches, and registration with PyTorch.

Without a GPU, Triton's interpreter runs the kernels, with small inputs.
"""

import math
from functools import partial
from itertools import product

import pytest
import torch
from agreement import check_agreement
from memory_arguments import DEVICE, arguments

pytest.importorskip("triton")

from kalmix import ops
from kalmix.beliefs import PointBelief
from kalmix.errors import KernelError
from kalmix.ops import OPS
from kalmix.ops._additive.signals import AdditiveSignals
from kalmix.ops._delta.signals import DeltaSignals
from kalmix.ops._linear_memory.custom_op import final_memory
from kalmix.ops._linear_memory.triton.vector_decay_pairs import GROUP_KEYS, MODERATE_DECAY
from kalmix.ops._shared.custom_op import PriorSwitch
from kalmix.segments import Segments
from kalmix.testing.heads import draw_weights
from kalmix.testing.nan_fill import nan_filled_memory

FLOAT, HALF = torch.float32, torch.bfloat16
RUNS = Segments.of(torch.tensor([[0, 2, 69], [1, 0, 7], [0, 69, 70], [1, 7, 7], [1, 9, 52]]))


OUTPUTS = {"mean": 2, "last": 1}  # axis of the heads


def answer(op, kernel, segments, inputs, count=1):
    """Return outputs, and gradients of their weighted sum; `count` problems have joined heads."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    signals = {name: x for name, x in leaves.items() if name != "mean"}
    mean, _, belief = OPS[op].function(**signals, belief=PointBelief(leaves["mean"]), segments=segments, kernel=kernel)
    outputs = [mean, belief.mean]
    weights = draw_weights(outputs, [*OUTPUTS.values()], count)
    return [x.detach() for x in outputs] + list(torch.autograd.grad(outputs, list(leaves.values()), weights))


def check(op, inputs, segments=None):
    """Compare outputs and gradients with the float64 recursion; the tolerance is the effect of rounding its inputs."""
    segments = None if segments is None else Segments(segments.rows.to(DEVICE))
    got, dtype = answer(op, "triton", segments, inputs), inputs["q"].dtype
    axes = {name: 1 if name == "mean" else 2 for name in inputs}
    exactly = partial(answer, op, "reference", segments)
    check_agreement(got, exactly, inputs, axes, OUTPUTS, dtype if dtype != FLOAT else None)


SHAPES = [  # op, gain, decay, batch, tokens, (key heads, value heads), key width, value width, segments, dtype
    ("additive", None, None, 1, 70, (1, 1), 5, 3, None, FLOAT),  # tiles of 32, a shorter last one
    ("additive", "head", "head", 2, 70, (1, 2), 3, 4, RUNS, FLOAT),  # packed, with gaps and an empty sequence
    ("additive", "head", "key", 1, 70, (1, 1), 70, 66, None, HALF),  # tiles of 64, several blocks of columns
    ("delta", "head", None, 1, 1, (1, 1), 2, 3, None, FLOAT),
    ("delta", "head", "head", 1, 70, (2, 2), 17, 130, None, FLOAT),
    ("delta", "vector", "head", 1, 70, (1, 2), 70, 5, None, HALF),
    ("delta", "head", "key", 2, 70, (1, 1), 4, 5, RUNS, FLOAT),
    ("delta", "vector", "key", 1, 70, (1, 2), 5, 4, None, FLOAT),
    ("delta", "head", "key", 1, 67, (1, 1), 3, 4, None, HALF),  # four subtiles per tile
    ("delta", "head", "key", 1, 20, (1, 1), 132, 3, None, HALF),  # gradients of gains from two programs per subtile
]
if DEVICE == "cuda":  # every launch configuration: widths, dtypes, kinds of gain and decay, tiles of each size
    WIDTHS = [(3, 5), (16, 16), (24, 40), (32, 200), (64, 64), (100, 50), (128, 128), (200, 130), (256, 256), (256, 64)]
    GAINS = {"additive": (None, "head"), "delta": ("head", "vector")}
    KINDS = [*product(["additive"], (None, "head"), (None, "head", "key"))]
    KINDS += [*product(["delta"], ("head", "vector"), (None, "head", "key"))]
    SHAPES += [
        (*kind, 2, 150, (1, 2), *widths, RUNS if place % 2 else None, (FLOAT, HALF, torch.float16)[(place + i) % 3])
        for place, widths in enumerate(WIDTHS)
        for i, kind in enumerate(KINDS)
    ]
    SHAPES += [("delta", "vector", None, 2, 150, (1, 2), 5, 16, None, HALF)]  # keys too narrow for prefetching
    SHAPES += [("delta", "head", "head", 40, 140, (4, 4), *widths, None, HALF) for widths in ((64, 64), (128, 128))]


@pytest.mark.parametrize(
    ("op", "gain", "decay", "batch", "length", "heads", "keys", "width", "segments", "dtype"), SHAPES
)
def test_agrees_with_the_recursion(op, gain, decay, batch, length, heads, keys, width, segments, dtype):
    sequences = None if segments is None else segments.count
    check(op, arguments(gain, decay, batch, length, heads, keys, width, sequences, dtype), segments)


@pytest.mark.parametrize(
    ("decay", "length"), [("head", 40), ("key", 66)]
)  # tiles joined from subtiles for decays per key
@pytest.mark.parametrize(("every", "least"), [(1, -30.0), (7, -1e3), (7, -1e38)])
def test_complete_forgetting_loses_no_digits(decay, length, every, least):
    """Weak decays next to a token that forgets everything must stay accurate, and so must all gradients."""
    inputs = arguments("head", decay, 1, length, (1, 1), 3, 4)
    inputs["log_decay"][:, ::every] = least
    check("delta", inputs)


def mixed_decays(case, tokens, keys):
    """Return log-decays `[tokens, keys]` that are moderate in some blocks of 16 tokens, and strong in others."""
    noise = torch.rand(tokens, keys, generator=torch.Generator().manual_seed(1))
    limit, token = math.log(MODERATE_DECAY.value), torch.arange(tokens)[:, None]
    odd_block = token // 16 % 2 == 1
    if case == "limit":
        each = torch.where(odd_block, limit - 0.02, limit + 0.02).expand_as(noise) / 16
    elif case == "tokens":
        each = torch.where(odd_block, -20.0, -0.3) * noise
    elif case == "keys":
        each = torch.where((torch.arange(keys) == 3) & (token < 32), -20.0, -0.5) * noise
    else:  # at the end of a block, and in the middle of the next
        each = -0.01 * noise + torch.where(token == 15, 0.99 * limit, torch.where(token == 24, 1.01 * limit, 0.0))
    return each


@pytest.mark.parametrize("case", ["limit", "tokens", "keys", "one token"])
@pytest.mark.parametrize(("op", "gain"), [("delta", "head"), ("additive", None)])
def test_moderate_and_strong_decays_agree_in_one_sequence(op, gain, case):
    """In bfloat16, blocks of 16 tokens whose decays per key are all moderate need fewer products than others."""
    inputs, log_decay = arguments(gain, "key", 1, 52, (1, 1), 24, 4, None, HALF), mixed_decays(case, 52, 24)
    smallest = torch.stack([x.sum(0).min() for x in log_decay.split(16)])
    assert (smallest > math.log(MODERATE_DECAY.value)).unique().numel() == 2, "both kinds occur"
    inputs["log_decay"] = log_decay[None, :, None].to(DEVICE)
    check(op, inputs)


def test_groups_of_keys_with_moderate_and_strong_decays():
    """The gradient of a gain is a sum over programs of several widths, of which some store zeros."""
    keys = GROUP_KEYS.value + 4
    inputs = arguments("head", "key", 1, 20, (1, 1), keys, 4, None, HALF)
    noise = torch.rand(1, 20, 1, keys, generator=torch.Generator().manual_seed(1))
    inputs["log_decay"] = noise * torch.where(torch.arange(keys) < GROUP_KEYS.value, -20.0, -0.5)
    inputs["log_decay"] = inputs["log_decay"].to(DEVICE)
    with nan_filled_memory():
        check("delta", inputs)


@pytest.mark.parametrize("decay", [None, "key"])  # with decays per key, tiles are joined from inverses of subtiles
def test_repeated_keys_are_stable(decay):
    """If all products of keys are 1, powers of the triangular matrix grow like binomials, its inverse does not."""
    inputs = arguments("head", decay, 1, 70, (1, 1), 3, 4)
    if decay is not None:
        inputs["log_decay"] = torch.zeros_like(inputs["log_decay"])
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"])
    inputs["gain"] = torch.ones_like(inputs["gain"])
    check("delta", inputs)


@pytest.mark.parametrize(("op", "decay"), [("additive", "head"), ("delta", "head"), ("delta", "key")])
def test_training_stores_one_memory_per_tile(op, decay):
    """With decays per key, it also stores the scores of pairs in a tile, and decays and signals of 16 tokens."""
    inputs = {name: x.requires_grad_() for name, x in arguments("head", decay, 1, 70, (1, 1), 4, 6).items()}
    belief, saved = PointBelief(inputs.pop("mean")), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        OPS[op].function(**inputs, belief=belief, kernel="triton")
    owned = {x.data_ptr() for x in inputs.values()}
    kept = sorted(x.numel() for x in saved if x.data_ptr() not in owned and x.numel() > 0)
    expected = [3 * 4 * 6, 70 * 6, 70 * 32] if op == "delta" else [3 * 4 * 6]
    assert kept == sorted(expected + ([70 * 32, 3 * 2 * 4, 3 * 70 * 4] if decay == "key" else []))


@pytest.mark.parametrize("segments", [None, RUNS], ids=["whole", "packed"])
@pytest.mark.parametrize(
    ("op", "gain", "decay"), [("delta", "head", "head"), ("delta", "key", "key"), ("additive", None, "head")]
)
def test_final_memories_are_those_of_the_op(op, gain, decay, segments):
    """They are equal to the last digit: the same kernels run, without storing what the backward pass needs."""
    batch, sequences = (1, None) if segments is None else (2, segments.count)
    inputs = arguments(gain, decay, batch, 70, (1, 2), 16, 24, sequences, HALF)
    prior = inputs.pop("mean")
    segments = None if segments is None else Segments(segments.rows.to(DEVICE))
    expected = OPS[op].function(**inputs, belief=PointBelief(prior), segments=segments, kernel="triton").belief.mean
    signals = (DeltaSignals if op == "delta" else AdditiveSignals)(**inputs)
    assert torch.equal(final_memory(signals, prior, segments, corrects=op == "delta"), expected)


@pytest.mark.parametrize("segments", [None, RUNS], ids=["whole", "packed"])
@pytest.mark.parametrize(
    ("op", "gain", "decay"), [("delta", "head", "head"), ("delta", "key", "key"), ("additive", None, "head")]
)
def test_gradients_of_the_prior_alone_are_those_of_the_whole_backward_pass(op, gain, decay, segments):
    batch, sequences = (1, None) if segments is None else (2, segments.count)
    inputs = arguments(gain, decay, batch, 70, (1, 2), 16, 24, sequences, HALF)
    segments = None if segments is None else Segments(segments.rows.to(DEVICE))
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    prior = leaves.pop("mean")
    switch = PriorSwitch()
    with switch.record():
        mean, _, belief = OPS[op].function(**leaves, belief=PointBelief(prior), segments=segments, kernel="triton")
    outputs = [mean, belief.mean]
    upstream = [torch.ones_like(x) for x in outputs]
    (expected, *_) = torch.autograd.grad(outputs, [prior, *leaves.values()], upstream, retain_graph=True)
    with switch.turned_on():
        (found,) = torch.autograd.grad(outputs, [prior], upstream)
    assert torch.equal(found, expected)


def test_other_calls_have_all_gradients_while_one_computes_that_of_the_prior_alone():
    """The backward pass of another model may run in another thread at the same time."""
    inputs = {name: x.requires_grad_() for name, x in arguments("head", "head", 1, 20, (1, 1), 4, 4).items()}
    prior, switch, means = PointBelief(inputs["mean"]), PriorSwitch(), []
    signals = {name: x for name, x in inputs.items() if name != "mean"}
    with switch.record():
        means.append(ops.delta(**signals, belief=prior, kernel="triton").mean)
    means.append(ops.delta(**signals, belief=prior, kernel="triton").mean)
    with switch.turned_on():
        own, others = (
            torch.autograd.grad(mean.sum(), list(inputs.values()), allow_unused=True, retain_graph=True)
            for mean in means
        )
    assert [name for name, x in zip(inputs, own, strict=True) if x is not None] == ["mean"]
    assert all(x is not None for x in others)
    assert all(x is not None for x in torch.autograd.grad(means[0].sum(), list(inputs.values())))


def test_value_heads_of_width_one_are_unsupported():
    inputs = arguments("head", "head", 1, 4, (1, 1), 3, 1)
    with pytest.raises(KernelError, match="width 1"):
        ops.delta(**{name: x for name, x in inputs.items() if name != "mean"}, kernel="triton")


def test_op_passes_opcheck_on_this_device():
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for gain, decay, corrects, rows in (
        ("head", "key", True, None),
        (None, None, False, torch.tensor([[0, 2, 17]], dtype=torch.int32, device=DEVICE)),
    ):
        inputs = {name: x.requires_grad_() for name, x in arguments(gain, decay, 1, 18, (1, 2), 3, 4).items()}
        signals = [inputs.get(name) for name in ("q", "k", "v", "gain", "log_decay", "mean")]
        op = torch.ops.kalmix.memory_triton.default
        for no_prior in (False,) if rows is None else (False, True):
            torch.library.opcheck(op, (*signals, rows, corrects, True, no_prior), test_utils=checks)
