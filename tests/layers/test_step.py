"""Steps of layers: a server's batches over a pool of states agree with calling the layer on each sequence alone."""

from collections import namedtuple
from typing import NamedTuple

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kalmix import ArgumentError, Segments, checks, steps
from kalmix.layers import (
    KLA,
    AdaptiveFilterAttention,
    AFATransformerBlock,
    Attention,
    BayesianLayer,
    ControlledFilter,
    GatedDeltaNet,
    GatedKalmaNet,
    Mamba2,
    RadialTangentialAttention,
)
from kalmix.ops import Chebyshev
from kalmix.ops._attend import visible_slots
from kalmix.testing.scheduler import check_steps, make_workload
from kalmix.types import Filtered

from .conftest import LAYERS, shake

SEQUENCES, TOKENS, WIDTH = 5, 6, 12
ROOM = 2 * TOKENS  # for tokens of a sequence and wrong drafts after them
HEADS = {"heads": 2, "head_dim": 4}
AFA_PARTS = {"iterations": 2, "value_dynamics": True, "confidence": True}
SLOW = {AdaptiveFilterAttention, AFATransformerBlock}  # in Triton's interpreter
TRITON_STEPS = {
    GatedDeltaNet: HEADS,
    Mamba2: HEADS,
    KLA: {},
    BayesianLayer: HEADS,
    GatedKalmaNet: HEADS | {"ridge": 0.1, "solver": Chebyshev(8)},
    AdaptiveFilterAttention: HEADS | AFA_PARTS,
    ControlledFilter: HEADS | {"rank": 2, "window": 4},
    AFATransformerBlock: HEADS | {"window": 4},
}


class Inputs(NamedTuple):
    """Tokens of a workload, as its only signal."""

    v: torch.Tensor


def leaves(state):
    return [state] if isinstance(state, torch.Tensor) else [leaf for x in state for leaf in leaves(x)]


def rebuild(state, tensors):
    """Return a state with the structure of `state`, whose tensors are the next ones of an iterator."""
    if isinstance(state, torch.Tensor):
        return next(tensors)
    return type(state)(*(rebuild(x, tensors) for x in state))


def check_layer(layer, dtype=torch.float64, bound=1e-9, device="cpu"):
    """Check steps of a layer with a scheduler; its state is a flat tuple of tensors there, and histories are rings."""
    layer = layer.to(device, dtype).requires_grad_(False)
    example = layer.state_pool(1, tokens=ROOM)
    names = [f"x{index}" for index, _ in enumerate(leaves(example))]
    flat = type("Flat", (namedtuple("Flat", names),), {"take": lambda self, index: flat(*(x[index] for x in self))})

    def nested(state):
        return rebuild(example, iter(state))

    def step(signals, pool, slots, out=None):
        return Filtered(layer.step(signals.v, nested(pool), slots), None, pool)

    def alone(signals, prior):
        y, state = layer(signals.v, nested(prior))
        final = layer.state_pool(1, tokens=ROOM)
        steps.store(final, torch.zeros(1, dtype=torch.long, device=device), state)
        return Filtered(y, None, flat(*leaves(final)))

    x = torch.randn(SEQUENCES, TOKENS, layer.hidden_size, dtype=dtype, device=device)
    workload = make_workload(Inputs(x), flat(*leaves(layer.state_pool(SEQUENCES, tokens=ROOM))))
    check_steps(step, alone, workload, [bound] * (1 + len(names)), same_bits=False)


@pytest.mark.parametrize("name", LAYERS)
def test_a_server_agrees_with_each_sequence_alone(name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    shake(layer)
    check_layer(layer)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in SLOW else []) for kind in TRITON_STEPS]
)
def test_triton_steps_agree_with_each_sequence_alone(kind):
    """Without a GPU, Triton's interpreter runs the kernels. The sequence alone is filtered in PyTorch code."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    layer = kind(WIDTH, **TRITON_STEPS[kind])
    shake(layer)
    filtered = layer.forward

    def alone(x, state=None):
        layer.kernel = "reference"
        result = filtered(x, state)
        layer.kernel = "triton"
        return result

    layer.kernel, layer.forward = "triton", alone
    check_layer(layer, torch.float32, 1e-4, "cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["gated-deltanet", "attention-narrow", "afa-transformer", "rt-afa-parts"])
def test_prefilled_states_are_stored_in_a_pool(name):
    """Packed prompts fill slots; one of them, longer than the windows of 4, is decoded twice, from its prefix."""
    torch.manual_seed(0)
    layer, x = LAYERS[name]().double(), torch.randn(1, 9, WIDTH).double()
    pool = layer.state_pool(6, tokens=6)
    steps.store(pool, torch.tensor([4, 1]), layer(x, None, Segments.packed(torch.tensor([0, 5, 9])))[1])
    token = torch.randn(3, 1, WIDTH).double()
    y = layer.step(token, pool, steps.Slots(torch.tensor([4, -1, 4]), torch.tensor([0, -1, 5])))
    assert not y[1].any()
    for row, slot in ((0, 0), (2, 5)):
        alone, state = layer(torch.cat([x[:, :5], token[row : row + 1]], 1))
        torch.testing.assert_close(y[row], alone[0, -1:])
        expected = layer.state_pool(1, tokens=6)
        steps.store(expected, torch.tensor([0]), state)
        for got, want in zip(leaves(pool), leaves(expected), strict=True):
            torch.testing.assert_close(got[slot], want[0])


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["reference", "triton"])
@pytest.mark.parametrize(
    ("kind", "options"), [(AdaptiveFilterAttention, AFA_PARTS), (RadialTangentialAttention, {})], ids=["afa", "rt-afa"]
)
def test_histories_continue_prompts_at_irregular_times(kind, options, kernel):
    """Steps add one unit of time per token; Triton's interpreter runs the kernels."""
    if kernel == "triton":
        pytest.importorskip("triton")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = kind(WIDTH, heads=2, head_dim=3, window=3, **options).to(device)
    shake(layer)
    x, times = torch.randn(2, 9, WIDTH, device=device), torch.rand(2, 9, device=device).cumsum(1)
    times[:, 5:] = times[:, 4:5] + torch.arange(1, 5, device=device)
    expected, final = layer(x, times=times)
    pool, rows = layer.state_pool(4), torch.tensor([3, 1], device=device)
    steps.store(pool, rows, layer(x[:, :5], times=times[:, :5])[1])
    layer.kernel = kernel
    for index in range(5, 9):
        y = layer.step(x[:, index : index + 1], pool, steps.Slots(rows, rows))
        torch.testing.assert_close(y[:, 0], expected[:, index], rtol=1e-4, atol=1e-5)
    stored = layer.state_pool(2)
    steps.store(stored, torch.arange(2, device=device), final)
    for got, want in zip(pool.take(rows), stored, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_reads_nothing_on_the_host(name, monkeypatch):
    """CUDA graphs need this. Fake tensors, which have no data, raise an error instead; they are treated as on a GPU."""
    monkeypatch.setattr(visible_slots, "reads_lengths", lambda x: False)
    with FakeTensorMode(), checks(False):
        layer = LAYERS[name]()
        pool, rows = layer.state_pool(4, tokens=9), torch.zeros(3, dtype=torch.int32)
        assert layer.step(torch.empty(3, 1, layer.hidden_size), pool, steps.Slots(rows, rows)).shape[0] == 3


def test_a_slot_has_room_for_the_tokens_of_a_sequence_or_of_the_window():
    assert AdaptiveFilterAttention(WIDTH, window=4).state_pool(3).positions.shape == (3, 4)
    assert AdaptiveFilterAttention(WIDTH, window=4).state_pool(3, tokens=2).positions.shape == (3, 2)
    assert Attention(WIDTH).state_pool(3, tokens=2).positions.shape == (3, 2)
    with pytest.raises(ArgumentError, match="since Attention stores all of them"):
        Attention(WIDTH).state_pool(3)
    with pytest.raises(ArgumentError, match="`tokens` is 0"):
        KLA(WIDTH).state_pool(3, tokens=0)


@pytest.mark.parametrize("kind", [AdaptiveFilterAttention, Attention])
def test_a_full_slot_is_an_error_where_values_are_checked(kind):
    """Elsewhere the new token replaces the oldest one. The slot of another row, and rows of padding, do not matter."""
    layer, x = kind(WIDTH), torch.randn(1, 5, WIDTH)
    pool, slots = layer.state_pool(3, tokens=4), steps.Slots(*torch.tensor([[2, -1], [2, -1]]))
    for index in range(4):
        layer.step(x[:, index : index + 1].expand(2, 1, WIDTH), pool, slots)
    token = x[:, 4:].expand(2, 1, WIDTH)
    with pytest.raises(ArgumentError, match="no room for another token in slot 2, which stores 4"):
        layer.step(token, pool, slots)
    layer.step(token, pool, steps.Slots(*torch.tensor([[1, 0], [1, 0]])))
    with checks(False):
        layer.step(token, pool, slots)
    assert pool.positions[2].tolist() == [4, 1, 2, 3]
