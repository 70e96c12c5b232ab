"""Steps of layers: a server's batches over a pool of states agree with calling the layer on each sequence alone."""

from collections import namedtuple
from typing import NamedTuple

import pytest
import torch

from kalmix import ArgumentError, Segments, steps
from kalmix.layers import KLA, AdaptiveFilterAttention, BayesianLayer, GatedDeltaNet, GatedKalmaNet, Mamba2
from kalmix.ops import Chebyshev
from kalmix.testing.scheduler import check_steps, make_workload
from kalmix.types import Filtered

from .conftest import LAYERS, shake

SEQUENCES, TOKENS, WIDTH = 5, 6, 12
HISTORIES = [name for name in LAYERS if name.startswith(("afa", "rt-afa", "attention", "controlled"))]


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
    """Check steps of a layer with a scheduler; its state is a flat tuple of tensors there."""
    layer = layer.to(device, dtype).requires_grad_(False)
    example = layer.state_pool(1)
    names = [f"x{index}" for index, _ in enumerate(leaves(example))]
    flat = type("Flat", (namedtuple("Flat", names),), {"take": lambda self, index: flat(*(x[index] for x in self))})

    def nested(state):
        return rebuild(example, iter(state))

    def step(signals, pool, slots, out=None):
        return Filtered(layer.step(signals.v, nested(pool), slots), None, pool)

    def alone(signals, prior):
        y, state = layer(signals.v, nested(prior))
        return Filtered(y, None, flat(*leaves(state)))

    x = torch.randn(SEQUENCES, TOKENS, WIDTH, dtype=dtype, device=device)
    workload = make_workload(Inputs(x), flat(*leaves(layer.state_pool(SEQUENCES))))
    check_steps(step, alone, workload, [bound] * (1 + len(names)), same_bits=False)


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in HISTORIES and name != "attention-grouped"])
def test_a_server_agrees_with_each_sequence_alone(name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    shake(layer)
    check_layer(layer)


@pytest.mark.parametrize("kind", [GatedDeltaNet, Mamba2, KLA, BayesianLayer, GatedKalmaNet])
def test_triton_steps_agree_with_each_sequence_alone(kind):
    """Without a GPU, Triton's interpreter runs the kernels. The sequence alone is filtered in PyTorch code."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    options = {"ridge": 0.1, "solver": Chebyshev(8)} if kind is GatedKalmaNet else {}
    layer = kind(WIDTH, **options) if kind is KLA else kind(WIDTH, heads=2, head_dim=4, **options)
    shake(layer)
    filtered = layer.forward

    def alone(x, state=None):
        layer.kernel = "reference"
        result = filtered(x, state)
        layer.kernel = "triton"
        return result

    layer.kernel, layer.forward = "triton", alone
    check_layer(layer, torch.float32, 1e-4, "cuda" if torch.cuda.is_available() else "cpu")


def test_prefilled_states_are_stored_in_a_pool():
    """Packed prompts fill slots; one of them is decoded twice, from its prefix."""
    torch.manual_seed(0)
    layer, x = GatedDeltaNet(WIDTH, heads=2, head_dim=4).double(), torch.randn(1, 9, WIDTH).double()
    pool = layer.state_pool(6)
    steps.store(pool, torch.tensor([4, 1]), layer(x, None, Segments.packed(torch.tensor([0, 5, 9])))[1])
    token = torch.randn(3, 1, WIDTH).double()
    y = layer.step(token, pool, steps.Slots(torch.tensor([4, -1, 4]), torch.tensor([0, -1, 5])))
    assert not y[1].any()
    for row in (0, 2):
        alone, state = layer(torch.cat([x[:, :5], token[row : row + 1]], 1))
        torch.testing.assert_close(y[row], alone[0, -1:])
        torch.testing.assert_close(pool.belief.mean[(0, None, 5)[row]], state.belief.mean[0])


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["reference", "triton"])
@pytest.mark.parametrize("window", [None, 3])
def test_histories_are_filtered_in_place(kernel, window):
    """Steps continue prompts at irregular times, one unit of time per token; Triton's interpreter runs the kernels."""
    if kernel == "triton":
        pytest.importorskip("triton")
    torch.manual_seed(0)
    options = {"iterations": 2, "value_dynamics": True, "confidence": True} if window else {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = AdaptiveFilterAttention(WIDTH, heads=2, head_dim=3, window=window, **options).to(device)
    shake(layer)
    x, times = torch.randn(2, 9, WIDTH, device=device), torch.rand(2, 9, device=device).cumsum(1)
    times[:, 5:] = times[:, 4:5] + torch.arange(1, 5, device=device)
    expected, final = layer(x, times=times)
    prefix = layer(x[:, :5], times=times[:, :5])[1]
    pool = steps.history_pool(4, window or 9, prefix.keys, prefix.values)
    rows = torch.tensor([3, 1], device=device)
    steps.store(pool, rows, prefix)
    layer.kernel = kernel
    for index in range(5, 9):
        y = layer.project_out(*layer.read_step(x[:, index : index + 1], pool, steps.Slots(rows, rows)))
        torch.testing.assert_close(y[:, 0], expected[:, index], rtol=1e-4, atol=1e-5)
    for stored, state in zip(pool.take(rows), final, strict=True):
        order = pool.positions[rows].argsort(1)
        ordered = torch.stack([row[index] for row, index in zip(stored, order, strict=True)])
        torch.testing.assert_close(ordered, state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HISTORIES)
def test_layers_that_store_tokens_have_no_pool(name):
    layer = LAYERS[name]()
    with pytest.raises(ArgumentError, match="stores past tokens"):
        layer.state_pool(2)
    with pytest.raises(ArgumentError, match="stores past tokens"):
        layer.step(torch.zeros(1, 1, layer.hidden_size), None, steps.Slots(*torch.zeros(2, 1, dtype=torch.long)))
