"""Attention compared with softmax attention in a loop."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kalmix import ArgumentError, Segments, checks
from kalmix.distributed.layout import KeyRuns
from kalmix.layers import Attention, LinearAttention, packed_attention
from kalmix.layers.packed_attention import attend_packed, attend_runs

from .conftest import LAYERS, shake


@pytest.mark.parametrize(("width", "options"), [(16, {}), (12, {"head_dim": 4, "norm_eps": 1e-3, "rotary_base": 1e3})])
def test_against_the_formula(width, options):
    torch.manual_seed(0)
    layer = Attention(width, heads=4, kv_heads=2, **options).double()
    eps, base = options.get("norm_eps", 1e-6), options.get("rotary_base", 1e4)
    shake(layer)
    x = torch.randn(1, 6, width, dtype=torch.float64)
    q, k, v = (x @ layer.in_proj.weight.T)[0].split([16, 8, 8], dim=-1)
    found = []
    for head in range(4):
        rows = []
        for t in range(6):
            turn = lambda u, norm, s: rotate(unit_rms(u, eps) * norm.weight, s, base)  # noqa: E731
            query = turn(q[t, 4 * head : 4 * head + 4], layer.query_norm, t)
            part = slice(4 * (head // 2), 4 * (head // 2) + 4)
            scores = torch.stack([query @ turn(k[s, part], layer.key_norm, s) / math.sqrt(4) for s in range(t + 1)])
            rows.append(scores.softmax(0) @ v[: t + 1, part])
        found.append(torch.stack(rows))
    expected = torch.cat(found, dim=-1) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x)[0][0], expected, rtol=1e-12, atol=1e-12)


def unit_rms(u: torch.Tensor, eps: float) -> torch.Tensor:
    return u / (u.square().mean() + eps).sqrt()


def rotate(u: torch.Tensor, position: int, base: float) -> torch.Tensor:
    z = torch.complex(u[:2], u[2:])
    angle = position * base ** (-torch.arange(2, dtype=torch.float64) / 2)
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag])


@pytest.mark.parametrize(("width", "heads"), [(32, 1), (128, 2), (300, 3), (448, 7), (514, 1)])
def test_default_heads_have_an_even_width(width, heads):
    layer = Attention(width)
    assert (layer.heads, layer.width) == (heads, width // heads)


def test_an_odd_width_needs_the_width_of_a_head():
    with pytest.raises(ArgumentError, match="Or set `head_dim`"):
        Attention(15)
    assert Attention(15, head_dim=8)(torch.randn(1, 3, 15))[0].shape == (1, 3, 15)


def test_unknown_implementations_are_refused():
    layer = Attention(8)
    with pytest.raises(ArgumentError, match="`implementation` is 'flash'; expected 'sdpa' or 'eager'"):
        layer.implementation = "flash"
    assert layer.implementation == "sdpa"


def test_no_posterior():
    assert Attention(8).filter(torch.randn(1, 3, 8), variance=True).variance is None


@pytest.mark.parametrize("name", ["attention", "afa"])
@pytest.mark.parametrize("batch", [1, 2])
def test_packing_stores_keys_once(name, batch):
    """Packed sequences share the keys of the batch without a copy."""
    layer = LAYERS[name]()
    starts = torch.arange(0, 100, 10)
    rows = torch.stack([starts * batch // 100, starts % (100 // batch), starts % (100 // batch) + 10], 1)
    x = torch.randn(batch, 100 // batch, 12)
    _, state = layer(x, None, Segments.of(rows))
    assert state.keys.shape[0] == 10
    assert state.keys.untyped_storage().nbytes() <= 100 * 3 * 12 * 4
    more = torch.randn(10, 3, 12)
    expected = layer(torch.cat([x.reshape(10, 10, 12), more], 1))[0][:, 10:]
    torch.testing.assert_close(layer(more, state)[0], expected, atol=1e-5, rtol=1e-4)


RUNS = [(0, 2, 9), (1, 0, 3), (0, 9, 10), (1, 3, 3), (0, 10, 16), (1, 5, 15)]  # two rows of 16 tokens
PACKED = Segments.of(torch.tensor(RUNS))


def attend_with_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    ids = PACKED.segment_ids(2, 16)
    mask = (ids[:, None, :, None] == ids[:, None, None, :]).tril()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_packed_sequences_attend_to_themselves_only(dtype, size):
    """Rounding errors are those of attention with a mask. `size` scales the scores by its square."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 16, heads, 8, dtype=dtype) for heads in (4, 2, 2)]
    inputs = [size * inputs[0], size * inputs[1], inputs[2]]
    ids = PACKED.segment_ids(2, 16)
    weight = torch.randn(2, 16, 4, 8).masked_fill((ids < 0)[..., None, None], 0)

    def run(function, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        output = function(*leaves).masked_fill((ids < 0)[..., None, None], 0)
        return [x.detach().double() for x in (output, *torch.autograd.grad((output * weight).sum(), leaves))]

    exact, masked = run(attend_with_mask, torch.float64), run(attend_with_mask, dtype)
    packed = run(lambda *x: attend_packed(*x, PACKED, ids), dtype)
    for found, same, expected in zip(packed, masked, exact, strict=True):
        allowed = 2 * (same - expected).norm() + torch.finfo(dtype).eps * expected.norm()
        assert (found - expected).norm() <= allowed


def test_nan_does_not_leave_its_packed_sequence():
    layer = Attention(16, heads=2)
    x = torch.randn(2, 16, 16)
    clean = layer(x, None, PACKED)[0]
    x[0, 4], x[1, 0] = torch.nan, torch.inf
    with checks(False):
        y = layer(x, None, PACKED)[0]
    reached = torch.zeros(2, 16, dtype=torch.bool)
    reached[0, 4:9] = reached[1, :3] = True
    assert torch.equal(y.isnan().any(-1), reached)
    torch.testing.assert_close(y[~reached], clean[~reached])


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest storage that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tensors]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_packed_attention_allocates_no_square_matrix(kv_heads):
    layer, length = Attention(16, heads=2, kv_heads=kv_heads), 512
    x = torch.randn(2, length, 16)
    segments = Segments.of(torch.tensor([[b, s, s + 64] for b in range(2) for s in range(0, length, 64)]))
    with LargestTensor() as largest:
        y, _ = layer(x, None, segments)
        y.square().sum().backward()
    assert largest.elements < length * length / 2


def test_compiled_packed_attention():
    ids, inputs = PACKED.segment_ids(2, 16), [torch.randn(2, 16, heads, 8) for heads in (4, 2, 2)]
    torch.compiler.reset()
    compiled = torch.compile(attend_packed, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs, PACKED, ids), attend_packed(*inputs, PACKED, ids))


def test_packed_attention_under_autocast():
    layer, x = Attention(16, heads=2), torch.randn(1, 12, 16)
    with torch.autocast("cpu", torch.bfloat16):
        packed, _ = layer(x, None, Segments.packed(torch.tensor([0, 5, 12])))
        alone = torch.cat([layer(part)[0] for part in x.split([5, 7], 1)], 1)
    assert packed.dtype == alone.dtype == torch.bfloat16
    torch.testing.assert_close(packed, alone, rtol=0.016, atol=float(alone.abs().max()) / 128)  # each rounds by 2^-8


def varlen_attention(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa=False):
    """Compute what `torch.nn.attention.varlen.varlen_attn` computes on a GPU: the last query sees all keys."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and window_size == (-1, 0)
    queries, keys = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert sum(queries) == len(q) and sum(keys) == len(k) and max(queries) <= max_q and max(keys) <= max_k
    split = (x.transpose(0, 1).split(lengths, 1) for x, lengths in ((q, queries), (k, keys), (v, keys)))
    masks = (torch.ones(n, m, dtype=torch.bool).tril(m - n) for n, m in zip(queries, keys, strict=True))
    parts = [
        F.scaled_dot_product_attention(*run, attn_mask=mask, enable_gqa=enable_gqa)
        for *run, mask in zip(*split, masks, strict=True)
    ]
    return torch.cat(parts, 1).transpose(0, 1)


def test_flash_attention_receives_sequences_that_cover_the_batch(monkeypatch):
    ids, inputs = PACKED.segment_ids(2, 16), [torch.randn(2, 16, heads, 8) for heads in (4, 2, 2)]
    expected = attend_packed(*inputs, PACKED, ids)
    monkeypatch.setattr(packed_attention, "_can_use_flash", lambda q: True)
    monkeypatch.setattr(packed_attention, "_FLASH", {"attend": varlen_attention, "shared": {"enable_gqa": True}})
    torch.testing.assert_close(attend_packed(*inputs, PACKED, ids)[ids >= 0], expected[ids >= 0])


CPU = torch.device("cpu")
RUNS = KeyRuns.of([(0, 0, 3), (0, 5, 8), (1, 2, 2), (1, 4, 8)], [(0, 0, 3), (0, 4, 10), (1, 0, 0), (1, 1, 12)], CPU)


@pytest.mark.parametrize("flash", [False, True])
def test_runs_attend_to_earlier_keys_of_their_documents(flash, monkeypatch):
    q, k, v = torch.randn(2, 8, 4, 8), torch.randn(2, 12, 2, 8), torch.randn(2, 12, 2, 8)
    expected = torch.zeros_like(q)
    for (row, start, stop), (_, first, last) in zip(*RUNS[:2], strict=True):
        for t in range(start, stop):
            own = slice(first, last - (stop - 1 - t))
            key, value = (x[row, own].repeat_interleave(2, 1) for x in (k, v))
            scores = torch.einsum("hw,shw->hs", q[row, t], key) / math.sqrt(8)
            expected[row, t] = torch.einsum("hs,shw->hw", scores.softmax(1), value)
    monkeypatch.setattr(packed_attention, "_can_use_flash", lambda q: flash)
    monkeypatch.setattr(packed_attention, "_FLASH", {"attend": varlen_attention, "shared": {"enable_gqa": True}})
    torch.testing.assert_close(attend_runs(q, k, v, RUNS), expected)


def test_runs_have_derivatives_of_torch_func():
    q, k, v = torch.randn(1, 3, 2, 8), torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
    runs = KeyRuns.of([(0, 0, 3)], [(0, 0, 6)], CPU)
    expected = torch.autograd.functional.jacobian(lambda q: attend_runs(q, k, v, runs).square().sum(), q)
    found = torch.func.grad(lambda q: attend_runs(q, k, v, runs).square().sum())(q)
    torch.testing.assert_close(found, expected)


def test_a_rank_without_tokens_still_has_gradients_of_keys():
    q, k, v = (torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3))
    output = attend_runs(q, k, v, KeyRuns.of([(0, 0, 0)], [(0, 0, 0)], CPU))
    output.sum().backward()
    assert float(output.detach().abs().sum()) == 0 and k.grad is not None and v.grad is not None


def test_flash_attention_is_loaded_where_pytorch_has_it(monkeypatch):
    monkeypatch.setattr(packed_attention, "_FLASH", {})
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    Attention(16, heads=2)
    assert packed_attention._FLASH["attend"].__name__ == "varlen_attn"


def test_values_of_linear_attention_are_as_wide_as_keys():
    layer = LinearAttention(16, heads=2, head_dim=4)
    state = layer(torch.randn(1, 3, 16))[1]
    assert torch.utils._pytree.tree_leaves(state)[0].shape == (1, 2, 4, 5)  # and one column for the weights


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("checked", [True, False])
def test_empty_slots_have_no_effect(implementation, checked):
    layer, x = Attention(16, heads=2), torch.randn(1, 8, 16)
    layer.implementation = implementation
    segments = Segments.packed(torch.tensor([0, 3, 8]))
    x[:, 1] = torch.nan  # in a slot of the first sequence; the second shares its tensors, and has an empty slot there
    token = torch.randn(2, 1, 16)
    with checks(checked):
        _, state = layer(x, None, segments)
        y, final = layer(token, state)
        expected, _ = layer(token[1:], layer(x[:, 3:])[1])
    torch.testing.assert_close(y[1:], expected)
    assert y[0].isnan().all() and final.take(torch.tensor([1])).values.isfinite().all()


def test_nan_of_a_new_token_does_not_reach_other_sequences():
    layer, x = Attention(16, heads=2), torch.randn(1, 8, 16)
    _, state = layer(torch.randn(2, 2, 16))
    segments = Segments.packed(torch.tensor([0, 5, 8]))
    expected, _ = layer(x, state, segments)
    x[:, 0] = torch.nan
    y, _ = layer(x, state, segments)
    torch.testing.assert_close(y[:, 5:], expected[:, 5:])


def test_slots_of_a_state():
    layer = Attention(16, heads=2)
    rows = Segments(torch.tensor([[0, 0, 8], [1, 0, 6]], dtype=torch.int32))
    many = Segments(torch.tensor([[0, 0, 3], [0, 3, 8], [1, 0, 8]], dtype=torch.int32))
    x = torch.randn(2, 8, 16)
    states = [layer(x, None, segments)[1] for segments in (None, rows, many)]
    assert [state.keys.shape[1] for state in states] == [8, 8, 16]
    assert layer(x, states[2], many)[1].keys.shape[1] == 16 + 8
    short = Segments(torch.tensor([[0, 0, 3], [0, 3, 8], [1, 0, 2]], dtype=torch.int32))
    assert layer(x, states[2], short)[1].keys.shape[1] == 16 + 5


@pytest.mark.parametrize("case", ["whole", "packed", "state"])
def test_derivatives_of_transforms(case):
    """Forward mode and second derivatives equal differences of the fused implementation and of its gradient."""
    torch.manual_seed(0)
    layer = Attention(16, heads=4, kv_heads=2).double()
    x, direction, weight = (torch.randn(1, 7, 16, dtype=torch.float64) for _ in range(3))
    segments = Segments.packed(torch.tensor([0, 3, 7])) if case == "packed" else None
    state = layer(torch.randn(1, 4, 16, dtype=torch.float64))[1].detach() if case == "state" else None

    def call(x):
        return layer(x, state, segments)[0]

    def loss(x):
        return (call(x) * weight).square().sum()

    def gradient(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(loss(x), x)[0]

    def slope(function):
        return (function(x + 1e-6 * direction) - function(x - 1e-6 * direction)) / 2e-6

    y, tangent = torch.func.jvp(call, (x,), (direction,))
    torch.testing.assert_close(y, call(x))
    torch.testing.assert_close(tangent, slope(call), rtol=1e-5, atol=1e-7)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(call(forward_ad.make_dual(x, direction))).tangent
    torch.testing.assert_close(found, tangent)
    second = torch.func.jvp(torch.func.grad(loss), (x,), (direction,))[1]
    torch.testing.assert_close(second, slope(gradient), rtol=1e-5, atol=1e-7)
    twice = torch.func.grad(lambda x: (torch.func.grad(loss)(x) * direction).sum())(x)
    torch.testing.assert_close(twice, second)
