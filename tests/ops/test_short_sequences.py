"""Packed sequences of few tokens in Triton kernels: sizes of tiles, and results with and without a prior.

Without a GPU, Triton's interpreter runs the kernels, with small inputs.
"""

from functools import partial

import pytest
import torch
from agreement import check_agreement
from memory_arguments import DEVICE, arguments

pytest.importorskip("triton")

from kalmix.beliefs import DiagonalBelief, PointBelief, RidgeBelief
from kalmix.ops import OPS, Chebyshev
from kalmix.ops._linear_memory.custom_op import stored_shapes, tile_size
from kalmix.ops._shared.token_blocks import tokens_per_tile
from kalmix.ops._shared.triton.tiles import make_tile_tables
from kalmix.segments import Segments
from kalmix.testing.heads import draw_weights
from kalmix.testing.nan_fill import nan_filled_memory

FLOAT, HALF = torch.float32, torch.bfloat16
PRIOR = ("prior", "gram", "variance")  # names of the tensors of a prior
LENGTHS = {
    "ones": [1] * 6,
    "mixed": [1, 2, 15, 0, 16, 17, 33, 1],
    "one long": [1, 1, 70, 2, 0, 1, 1],
    "twos": [2] * 40,
    "half a tile": [33, 49, 17, 45],  # tiles of 32 tokens
    "tile": [70, 64],  # of 64 tokens in half precision
}


def packed(lengths, padding=0):
    """Return segments of sequences one after another, each followed by `padding` tokens outside every sequence."""
    start, rows = 0, []
    for length in lengths:
        rows.append((0, start, start + length))
        start += length + padding
    return Segments.of(torch.tensor(rows, device=DEVICE)), start


@pytest.mark.parametrize("large", [32, 64])
@pytest.mark.parametrize("lengths", [*LENGTHS.values(), [1] * 500, [16] * 64, [64] * 16, [1024], [1000, *[1] * 24]])
def test_tiles_follow_the_tokens(lengths, large):
    """Tiles have room for at most twice the tokens, and for 16 more per sequence."""
    segments, total = packed(lengths)
    size = tokens_per_tile(1, total, segments.count, large)
    tile_table, _ = make_tile_tables(segments.rows, 1, total, size)
    assert len(tile_table) * size <= 2 * total + 16 * segments.count
    assert int(tile_table[:, 1].sum()) == total
    assert size == large or size <= max(16, total // segments.count)


def test_rows_without_segments_keep_their_tiles():
    sizes = [tokens_per_tile(4, length, None, 64) for length in (1, 64, 65, 4096)]
    assert sizes == [16, 16, 64, 64]
    assert [tokens_per_tile(4, length, 4, 64) for length in (1, 64, 65, 4096)] == sizes


@pytest.mark.parametrize(("length", "states"), [(1, 4096 // 16), (16, 4096 // 16), (64, 4096 // 64)])
def test_memories_before_the_first_tokens_are_not_stored(length, states):
    """Training without a prior stores memories for tokens, not for sequences."""
    segments, total = packed([length] * (4096 // length))
    v = torch.empty(1, total, 8, 128, dtype=HALF, device="meta")
    (shape, *_) = stored_shapes(v, v, segments.rows, True, True, no_prior=True)
    assert shape == ((states + 1) * 8 * 128 * 128,)
    assert tile_size(v, segments.rows) == (64 if length == 64 else 16)


def packed_arguments(gain, decay, tokens, sequences, heads, keys, width, dtype, gram=None):
    """Return the arguments of one row of packed sequences, with the prior's mean as "prior", and a prior "gram"."""
    inputs = arguments(gain, decay, 1, tokens, heads, keys, width, sequences, dtype)
    inputs["prior"] = inputs.pop("mean")
    if gram is not None:
        inputs["gram"] = 0.1 * torch.eye(keys, device=DEVICE).repeat(sequences, heads[1], 1, 1)
    return inputs


def diagonal_arguments(tokens, sequences, slots, channels, dtype):
    """Return random signals of `diagonal` and a prior by name."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=draw)

    cells = (1, slots, channels)
    inputs = {
        "q": torch.nn.functional.normalize(normal(1, tokens, 1, slots), dim=-1).to(dtype),
        "k": torch.nn.functional.normalize(normal(1, tokens, 1, slots), dim=-1).to(dtype),
        "v": normal(1, tokens, 1, channels).to(dtype),
        "precision": normal(1, tokens, 1, channels).exp(),
        "log_decay": -0.1 * normal(*cells).exp(),
        "process_noise": 0.1 * normal(*cells).exp(),
        "prior": normal(sequences, *cells),
        "variance": normal(sequences, *cells).exp(),
    }
    return {name: x.to(DEVICE) for name, x in inputs.items()}


def answer(op, kernel, segments, prior, final, inputs, count=1):
    """Return outputs, and gradients of a weighted sum of the mean and, if `final`, the final belief.

    `count` problems have joined heads.
    """
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if prior or name not in PRIOR}
    signals = {name: x for name, x in leaves.items() if name not in PRIOR}
    belief = None
    if prior and op == "ridge":
        belief = RidgeBelief(leaves["prior"], (leaves["gram"] + leaves["gram"].mT) / 2)
    elif prior and op == "diagonal":
        belief = DiagonalBelief(leaves["prior"], leaves["variance"])
    elif prior:
        belief = PointBelief(leaves["prior"])
    options = {"belief": belief, "segments": segments, "kernel": kernel}
    if op == "ridge":  # iterations until convergence
        options |= {"ridge": 0.5, "solver": Chebyshev(14)}
    with nan_filled_memory():
        mean, _, last = OPS[op].function(**signals, **options)
        outputs = [mean, *last]
        weights = draw_weights(outputs, [2] + [1] * len(last), count)
        used = len(outputs) if final else 1
        grads = torch.autograd.grad(outputs[:used], list(leaves.values()), weights[:used])
    return [x.detach() for x in outputs] + list(grads)


def check(op, inputs, segments, prior, final):
    """Compare outputs and gradients with the float64 recursion; the tolerance is the effect of rounding its inputs.

    Args:
        op: name of the op.
        inputs: result of `arguments`.
        segments: packed sequences.
        prior: whether to pass the prior.
        final: whether the final belief has a gradient.
    """
    inputs = {name: x for name, x in inputs.items() if prior or name not in PRIOR}
    cells = ("log_decay", "process_noise") if op == "diagonal" else ()
    axes = {name: 1 if name in PRIOR else 0 if name in cells else 2 for name in inputs}
    got, dtype = answer(op, "triton", segments, prior, final, inputs), inputs["q"].dtype
    outputs = {"mean": 2} | {f"last {name}": 1 for name in OPS[op].belief._fields}
    exactly = partial(answer, op, "reference", segments, prior, final)
    check_agreement(got, exactly, inputs, axes, outputs, dtype if dtype != FLOAT else None)


BELIEFS = [(False, False), (False, True), (True, False), (True, True)]
CASES = [  # op, gain, decay, (key heads, value heads), key width, value width, dtype, sequences
    ("additive", None, None, (1, 1), 5, 3, FLOAT, "ones"),
    ("additive", "head", "head", (1, 2), 5, 3, HALF, "mixed"),
    ("additive", "head", "key", (1, 1), 4, 6, FLOAT, "one long"),
    ("additive", None, "head", (1, 1), 66, 5, HALF, "half a tile"),
    ("delta", "head", "head", (1, 2), 5, 3, FLOAT, "mixed"),
    ("delta", "head", None, (1, 1), 3, 70, HALF, "half a tile"),
    ("delta", "vector", "key", (1, 1), 5, 3, HALF, "mixed"),
    ("delta", "head", "key", (1, 1), 4, 5, HALF, "half a tile"),
    ("delta", "vector", "head", (1, 1), 5, 4, FLOAT, "twos"),
    ("delta", "head", "key", (1, 1), 3, 4, HALF, "tile"),
    ("ridge", "head", "head", (1, 2), 5, 3, FLOAT, "mixed"),
    ("ridge", None, None, (1, 1), 3, 4, FLOAT, "ones"),
    ("ridge", "head", "head", (1, 1), 34, 5, HALF, "half a tile"),
    ("ridge", None, "head", (1, 1), 5, 4, FLOAT, "one long"),
]
if DEVICE == "cuda":  # every launch configuration
    WIDTHS = [(64, 64), (128, 128), (256, 256), (128, 64), (100, 200)]
    KINDS = [("additive", x, y) for x in (None, "head") for y in (None, "head", "key")]
    KINDS += [("delta", x, y) for x in ("head", "vector") for y in (None, "head", "key")]
    KINDS += [("ridge", x, x) for x in (None, "head")]
    CASES += [
        (*kind, (1, 2), *widths, dtype, name)
        for kind in KINDS
        for widths in WIDTHS
        for dtype in (FLOAT, HALF)
        for name in ("ones", "mixed", "one long", "half a tile", "tile")
    ]


# Without a GPU, a third of the combinations, and all of two cases. Second combinations of other cases are slow tests.
TRIED = [
    pytest.param(*case, *belief, marks=pytest.mark.slow if DEVICE != "cuda" and i % 3 == 0 and j == 3 else [])
    for i, case in enumerate(CASES)
    for j, belief in enumerate(BELIEFS)
    if DEVICE == "cuda" or i in (1, 4) or (i + j) % 3 == 0
]


@pytest.mark.parametrize(("op", "gain", "decay", "heads", "keys", "width", "dtype", "name", "prior", "final"), TRIED)
@pytest.mark.slow
def test_agrees_with_the_recursion(op, gain, decay, heads, keys, width, dtype, name, prior, final):
    segments, tokens = packed(LENGTHS[name], padding=int(name == "mixed"))
    gram = "identity" if op == "ridge" else None
    inputs = packed_arguments(gain, decay, tokens, segments.count, heads, keys, width, dtype, gram)
    check(op, inputs, segments, prior, final)


@pytest.mark.parametrize(
    ("prior", "final"),
    [pytest.param(*x, marks=pytest.mark.slow if DEVICE != "cuda" and x[0] != x[1] else []) for x in BELIEFS],
)
@pytest.mark.parametrize(("dtype", "name"), [(FLOAT, "mixed"), (HALF, "one long"), (FLOAT, "tile")])
@pytest.mark.slow
def test_diagonal_agrees_with_the_recursion(dtype, name, prior, final, monkeypatch):
    monkeypatch.setattr("kalmix.ops._diagonal.triton.plan.tile_size", lambda *_: 32)
    monkeypatch.setattr("kalmix.ops._shared.triton.compile_and_launch._LAUNCH_CACHE", {})
    segments, tokens = packed(LENGTHS[name], padding=int(name == "mixed"))
    check("diagonal", diagonal_arguments(tokens, segments.count, 5, 6, dtype), segments, prior, final)
