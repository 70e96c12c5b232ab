"""Step of `Attention`: both forms agree with the layer's ordinary call in float64, in place on a pool of histories.

Without a GPU, Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import copy

import pytest
import torch
from forms import DEVICE, form

from kalmix import steps
from kalmix.layers import Attention, attention
from kalmix.layers.attention import AttentionState
from kalmix.models import KalmixConfig, KalmixForCausalLM, capture_decoding

pytest.importorskip("triton")
ROOM = 9  # tokens of a slot
LAYERS = {
    "heads": {"heads": 2},
    "grouped": {"heads": 6, "kv_heads": 2, "head_dim": 6},
    "shared": {"heads": 4, "kv_heads": 1, "head_dim": 18},
}


@pytest.fixture(autouse=True)
def _without_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def launches(monkeypatch):
    """Count steps by the kernels."""
    seen, run = [], attention.attention_step
    monkeypatch.setattr(attention, "attention_step", lambda *given: seen.append(1) or run(*given))
    return seen


def constants(monkeypatch, **values):
    from kalmix.layers.fused.triton import attention_step

    for name, value in values.items():
        monkeypatch.setattr(attention_step, name, value)


def make(name, dtype=torch.float32, width=12):
    layer = Attention(width, **LAYERS[name]).to(DEVICE)
    for parameter in layer.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    return layer.to(dtype)


def filled_pool(layer, lengths, room=ROOM):
    """Return a pool with a slot for each length of a random sequence; contents of slots without a token are NaN."""
    pool = layer.state_pool(len(lengths), tokens=room)
    for slot, length in enumerate(lengths):
        x = torch.randn(1, length, layer.hidden_size, device=DEVICE).to(pool.keys.dtype)
        steps.store(pool, torch.tensor([slot], device=DEVICE), layer(x)[1])
    for x in pool[:2]:
        x[pool.positions < 0] = torch.nan
    return pool


def ordinary(layer, x, pool, slot):
    """Return the read-out of a token `[1, 1, D]` and the token's key and value, after the newest tokens of a slot."""
    positions = pool.positions[slot]
    newest = positions > positions.max() + 1 - len(positions)
    order = positions.argsort()
    order = order[(positions >= 0)[order] & newest[order]]
    state = AttentionState(*(y[slot, order][None].to(y.dtype if y.dtype == torch.int64 else x.dtype) for y in pool))
    (mean, _, final), _ = layer.read(x, state)
    return mean[0, 0], *(y[0, -1] for y in final)


def check(layer, pool, rows, bound, width):
    """Run a step and compare it with the ordinary call in float64; `rows` are pairs of slots to read and to write."""
    exact, before = copy.deepcopy(layer).double(), AttentionState(*(y.clone() for y in pool))
    x = torch.randn(len(rows), 1, width, device=DEVICE).to(layer.in_proj.weight.dtype)
    read, write = (torch.tensor(y, dtype=torch.int32, device=DEVICE) for y in zip(*rows, strict=True))
    y, _ = layer.read_step(x, pool, steps.Slots(read, write))
    expected_pool = AttentionState(*(z.clone() for z in before))
    for row, (source, target) in enumerate(rows):
        if source < 0:
            assert not y[row].any()
            continue
        mean, *token = ordinary(exact, x[row : row + 1].double(), before, source)
        torch.testing.assert_close(y[row, 0].double(), mean, rtol=bound, atol=bound, msg=f"row {row}")
        if target >= 0:
            index = int(token[2]) % pool.positions.shape[1]
            for buffer, old, z in zip(expected_pool, before, token, strict=True):
                buffer[target] = old[source]
                buffer[target, index] = z.to(buffer.dtype)
    for found, z in zip(pool, expected_pool, strict=True):
        torch.testing.assert_close(found, z, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize("kind", ["eager", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_steps_agree_with_the_ordinary_call(name, dtype, kind, launches):
    """Slots are empty, partly filled, full, and full after the ring has begun again; some rows are padding or forks."""
    layer = make(name, dtype)
    pool = filled_pool(layer, [0, 1, 5, ROOM - 1, ROOM, 2 * ROOM + 4, 3, 0])
    with form(kind):
        rows = [(5, 5), (-1, -1), (0, 0), (3, 3), (2, 2), (1, -1), (4, 4), (6, 7), (-1, 1)]
        check(layer, pool, rows, 1e-5 if dtype == torch.float32 else 0.03, 12)
    assert len(launches) == (kind == "triton")


@pytest.mark.parametrize("parts", [1, 2, 5, 16])
def test_parts_of_a_history_are_joined(parts, monkeypatch):
    """Some parts have no tokens, and a part has several tiles; with one part, the same kernels run."""
    constants(monkeypatch, PARTS=parts, LEAST=1, PROGRAMS=1000, TILE=128, ELEMENTS_PER_WARP=32)
    layer = make("grouped")
    pool = filled_pool(layer, [37, 0, 90, 8], room=45)
    with form("triton"):
        check(layer, pool, [(2, 1), (0, 0), (3, 3)], 1e-5, 12)


def test_large_batches_and_short_histories_have_fewer_parts(monkeypatch):
    from kalmix.layers.fused.triton.attention_step import count_parts

    constants(monkeypatch, PARTS=32, LEAST=64, PROGRAMS=1024, WARPS=2048)
    sizes = [(1, 16, 10), (1, 16, 512), (1, 16, 9000), (8, 16, 9000), (99, 16, 9000)]
    assert [count_parts(*size, warps=1) for size in sizes] == [1, 8, 32, 8, 1]
    assert [count_parts(8, 16, 9000, warps) for warps in (2, 4, 8)] == [8, 4, 2]


@pytest.mark.parametrize("probes", [None, 8])
@pytest.mark.slow
def test_positions_of_long_histories_are_found(probes, monkeypatch):
    """The position of the next token is found from a part of the ring, in one or several passes."""
    if probes is not None:
        constants(monkeypatch, isqrt=lambda size: probes)  # 32 entries, the fewest
    layer = Attention(4, heads=1).to(DEVICE)
    lengths, room = [1100, 1098, 1, 34, 35, 36, 70, 2199, 2200, 2201, 3000, 0], 1100
    pool = layer.state_pool(len(lengths), tokens=room)
    for slot, length in enumerate(lengths):
        position = torch.arange(max(0, length - room), length, device=DEVICE)
        pool.positions[slot, position % room] = position
    x, slots = torch.randn(len(lengths), 1, 4, device=DEVICE), torch.arange(len(lengths), device=DEVICE)
    with form("triton"):
        layer.read_step(x, pool, steps.Slots(slots, slots))
    assert pool.positions.amax(1).tolist() == lengths


@pytest.mark.parametrize("kind", ["eager", "triton"])
def test_nan_of_a_token_reaches_later_tokens_of_its_sequence_only(kind):
    layer = make("grouped")
    pool = filled_pool(layer, [4, 4, 0])
    slots, x = torch.arange(3, device=DEVICE), torch.randn(3, 1, 12, device=DEVICE)
    x[1] = torch.nan
    with form(kind):
        first, _ = layer.read_step(x, pool, steps.Slots(slots, slots))
        second, _ = layer.read_step(torch.randn_like(first[..., :12]), pool, steps.Slots(slots, slots))
    for y in (first, second):
        assert y[[0, 2]].isfinite().all() and y[1].isnan().all()


def test_other_layers_step_in_pytorch(launches):
    """Float64, the eager implementation, and norms with hooks keep their own code."""
    layer = make("heads")
    layer.implementation = "eager"
    hooked = make("heads")
    hooked.query_norm.register_forward_hook(lambda module, given, y: 2 * y)
    with form("triton"):
        for each in (layer, hooked, make("heads", torch.float64)):
            check(each, filled_pool(each, [3, 0]), [(0, 0), (1, 1)], 1e-5, 12)
    assert not launches


def test_a_batch_without_rows():
    layer, none = make("heads"), torch.zeros(0, dtype=torch.int32, device=DEVICE)
    with form("triton"):
        x, pool = torch.zeros(0, 1, 12, device=DEVICE), filled_pool(layer, [2])
        assert layer.read_step(x, pool, steps.Slots(none, none))[0].shape == (0, 1, 12)


class NoGraph:
    """Graph that cannot be captured, so that steps in place run one by one."""

    def capture(self, function):
        raise RuntimeError("no graph on this machine")


@pytest.mark.filterwarnings("ignore:Decoding steps are not captured")
@pytest.mark.slow
def test_models_generate_the_same_tokens(launches):
    """On a GPU, the steps are CUDA graphs. Prompts have three lengths."""
    layers = [{"mixer": "attention", "heads": 4, "kv_heads": 2}, {"mixer": "attention", "heads": 2}]
    model = (
        KalmixForCausalLM(KalmixConfig(vocab_size=40, hidden_size=16, layers=layers, initializer_range=0.5))
        .eval()
        .to(DEVICE)
    )
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    ids = torch.randint(1, 40, (3, 8), device=DEVICE)
    mask = (torch.arange(8, device=DEVICE) >= torch.tensor([[0], [3], [7]], device=DEVICE)).long()
    options = {"inputs": ids, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**options, use_cache=False)
    with form("triton"), capture_decoding(model, None if DEVICE == "cuda" else NoGraph) as step:
        assert torch.equal(model.generate(**options), expected)
    assert launches and (step.captures == 1 or DEVICE == "cpu")
