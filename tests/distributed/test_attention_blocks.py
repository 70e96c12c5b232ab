"""Attention to blocks of keys, each by a fused kernel of PyTorch."""

import pytest
import torch
import torch.nn.functional as F

from kalmix.distributed import attention_blocks
from kalmix.distributed.attention_blocks import attend_block, attend_block_backward, attend_tiles
from kalmix.distributed.layout import KeyRuns
from kalmix.layers import packed_attention
from kalmix.layers.packed_attention import attend_runs, tiles_of_runs

KERNELS = {"cuDNN": True, "flash": False} if torch.cuda.is_available() else {}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_attention_to_two_blocks_is_attention_to_both(fused, causal, monkeypatch):
    """Blocks: keys that all queries see, and those of the queries themselves."""
    if not fused:
        monkeypatch.setattr(attention_blocks, "_fused_kernel", lambda q, keys: None)
        monkeypatch.setattr(attention_blocks, "QUERY_TILE", 4)
    torch.manual_seed(0)
    q, grad = torch.randn(2, 2, 6, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 11, 2, 8, dtype=torch.float64)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    mask = torch.ones(6, 11, dtype=torch.bool).tril(5) if causal else None
    own = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*own, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    expected.backward(grad)

    with torch.no_grad():
        blocks = [(k[:, :5], v[:, :5], False), (k[:, 5:], v[:, 5:], causal)]
        parts, sums = zip(*(attend_block(q, *block) for block in blocks), strict=True)
        total = torch.stack(sums).logsumexp(0)
        output = sum(part * (x - total).exp()[..., None] for part, x in zip(parts, sums, strict=True))
        torch.testing.assert_close(output, expected)
        grads = [attend_block_backward(grad, q, *block[:2], output, total, block[2]) for block in blocks]
    grad_q, grad_k, grad_v = zip(*grads, strict=True)
    torch.testing.assert_close(sum(grad_q), q.grad)
    torch.testing.assert_close(torch.cat(grad_k, 1), k.grad)
    torch.testing.assert_close(torch.cat(grad_v, 1), v.grad)


@pytest.mark.parametrize("kernel", [attention_blocks._FLASH, attention_blocks._CUDNN])
def test_gpu_kernels_of_a_block_have_the_expected_arguments(kernel):
    """The kernels themselves need a GPU; the meta device checks the calls only."""
    q = torch.empty(2, 4, 32, 16, dtype=torch.bfloat16, device="meta")
    output, log_weight_sum = attention_blocks._fused_forward(kernel, q, q, q, True)
    assert output.shape == q.shape and log_weight_sum.shape == q.shape[:3]
    grads = attention_blocks._fused_backward(kernel, (q, q, q, q, output, log_weight_sum), True)
    assert [x.shape for x in grads] == [q.shape] * 3


def runs_of_rows(size, spans, device, rows=2):
    """Return the runs of a rank that holds these spans of `size` tokens of each row."""
    queries = [(row, i * size, (i + 1) * size) for i in range(len(spans)) for row in range(rows)]
    return KeyRuns.of(
        queries, [(row, 0, (span + 1) * size) for span in spans for row in range(rows)], torch.device(device)
    )


def attend_in_float64(q, k, v, size, spans):
    """Return the attention of the same queries, and tensors whose gradients it can have."""
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    position = torch.cat([torch.arange(size) + span * size for span in spans]).to(q.device)
    mask = torch.arange(k.shape[1], device=q.device) <= position[:, None]
    heads = (x.transpose(1, 2) for x in inputs)
    return F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2), inputs


@pytest.mark.parametrize("spans", [(0,), (2,), (0, 3), (1, 2)])
def test_runs_of_whole_rows_use_few_calls_of_a_kernel(spans, monkeypatch):
    def fail(*_):
        raise AssertionError("attention of one run after the other")

    monkeypatch.setattr(packed_attention, "_attend_to_earlier", fail)
    torch.manual_seed(0)
    size = 5
    q, grad = torch.randn(2, 2, size * len(spans), 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, size * 4, 2, 8, dtype=torch.float64)
    expected, inputs = attend_in_float64(q, k, v, size, spans)
    own = [x.requires_grad_() for x in (q, k, v)]
    output = attend_runs(*own, runs_of_rows(size, spans, "cpu"))
    torch.testing.assert_close(output, expected)
    expected = torch.autograd.grad(expected, inputs, grad)
    torch.testing.assert_close(torch.autograd.grad(output, own, grad), expected)


def test_queries_without_keys_are_zero():
    q, k = torch.randn(1, 6, 2, 8), torch.randn(1, 4, 2, 8)
    tiles = tiles_of_runs(KeyRuns.of([(0, 2, 4)], [(0, 0, 3)], torch.device("cpu")))
    output = attend_tiles(q, k, k, tiles)
    assert not output[:, :2].any() and not output[:, 4:].any() and output[:, 2:4].all()


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("size", [1, 384])
@pytest.mark.parametrize("spans", [(1,), (2,), (0, 3)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_of_gpus_agree_with_float64(kernel, spans, size, width, monkeypatch):
    monkeypatch.setattr(attention_blocks, "_prefers_cudnn", lambda device: KERNELS[kernel])
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    q, grad = torch.randn(2, 2, size * len(spans), 4, width, **options)
    k, v = torch.randn(2, 2, size * 4, 2, width, **options)
    expected, inputs = attend_in_float64(q, k, v, size, spans)
    own = [x.requires_grad_() for x in (q, k, v)]
    output = attend_runs(*own, runs_of_rows(size, spans, "cuda"))
    pairs = [(output, expected)]
    pairs += zip(
        torch.autograd.grad(output, own, grad), torch.autograd.grad(expected, inputs, grad.double()), strict=True
    )
    for x, exact in pairs:  # bfloat16 rounds by 2^-9 of a number; outputs and gradients sum several of them
        assert float((x - exact).norm() / exact.norm()) < 0.01


def test_cudnn_is_not_used_where_pytorch_refuses_it(monkeypatch):
    """Without a GPU: a single key, wide heads, and deterministic algorithms."""
    q = torch.empty(1, 4, 2, 64, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cudnn, flash, choose = attention_blocks._CUDNN, attention_blocks._FLASH, attention_blocks._fused_kernel
    assert choose(q, 2) == cudnn and choose(q, 1) == flash
    assert choose(q.expand(-1, -1, -1, 64).repeat(1, 1, 1, 4), 2) == flash
    torch.use_deterministic_algorithms(True)
    try:
        assert choose(q, 2) == flash
    finally:
        torch.use_deterministic_algorithms(False)
