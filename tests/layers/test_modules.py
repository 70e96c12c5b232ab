"""The short convolution compared with PyTorch's, and modules that fused parts do not call."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook

from kalmix.layers.modules import RMSNorm, ShortConvolution, apply_linear, is_plain, linear_variance
from kalmix.segments import Segments


def test_convolution_against_conv1d():
    torch.manual_seed(0)
    conv = ShortConvolution(5, 4)
    x = torch.randn(2, 9, 5)
    y, window = conv(x)
    expected = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), conv.weight[:, None], groups=5).transpose(1, 2)
    torch.testing.assert_close(y, expected)
    assert torch.equal(window, x[:, -3:])


def test_short_calls_keep_earlier_inputs_in_the_state():
    conv = ShortConvolution(1, 4)
    _, window = conv(torch.tensor([[[1.0], [2.0]]]))
    assert window.flatten().tolist() == [0, 1, 2]
    _, window = conv(torch.tensor([[[3.0]]]), window)
    assert window.flatten().tolist() == [1, 2, 3]


SPANS = [(0, 6), (6, 8), (8, 8), (8, 9), (9, 15)]  # adjacent; shorter than the taps; one empty


@pytest.mark.parametrize("bias", [False, True])
def test_adjacent_sequences_are_convolved_separately(bias):
    torch.manual_seed(0)
    conv = ShortConvolution(5, 4, bias).double()
    if conv.bias is not None:
        torch.nn.init.normal_(conv.bias)
    x, windows = torch.randn(1, 15, 5).double(), torch.randn(len(SPANS), 3, 5).double()
    segments = Segments.packed(torch.tensor([0, *(stop for _, stop in SPANS)]))
    for before in (None, windows):
        y, after = conv(x, before, segments)
        for n, (start, stop) in enumerate(SPANS):
            history = torch.cat([torch.zeros(3, 5) if before is None else before[n], x[0, start:stop]])
            torch.testing.assert_close(after[n], history[-3:])
            if stop > start:
                alone = F.conv1d(history.mT[None], conv.weight[:, None], conv.bias, groups=5)[0].mT
                torch.testing.assert_close(y[0, start:stop], alone)


def test_sequences_are_isolated():
    """Infinity in one sequence reaches no other, and neither do gradients."""
    torch.manual_seed(0)
    conv = ShortConvolution(3, 4)
    x = torch.randn(1, 12, 3)
    segments = Segments.packed(torch.tensor([0, 5, 9, 12]))
    others = [*range(5), *range(9, 12)]
    spoilt = x.clone()
    spoilt[:, 5:9] = float("inf")
    clean, after = conv(x, None, segments)
    found, kept = conv(spoilt, None, segments)
    assert torch.equal(found[:, others], clean[:, others])
    assert torch.equal(kept[[0, 2]], after[[0, 2]])
    leaf = x.clone().requires_grad_()
    conv(leaf, None, segments)[0][:, 5:9].square().sum().backward()
    assert leaf.grad is not None and leaf.grad[:, 5:9].ne(0).all() and leaf.grad[:, others].eq(0).all()


class Float8Linear(torch.nn.Module):
    """Linear map with a weight in float8 and a scale, as quantized checkpoints store it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.scale, self.bias = weight.abs().max() / 448, bias
        self.weight = (weight / self.scale).to(torch.float8_e4m3fn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.scale * self.weight.to(x.dtype), self.bias)


def test_float8_weights_are_applied_in_the_dtype_of_the_input():
    torch.manual_seed(0)
    linear, x = Float8Linear(torch.randn(3, 4), torch.randn(3)), torch.rand(2, 4)
    weight = linear.scale * linear.weight.float()
    torch.testing.assert_close(apply_linear(linear, x), F.linear(x, weight, linear.bias))
    torch.testing.assert_close(linear_variance(linear, x), F.linear(x, weight.square()))


def test_modules_with_hooks_are_not_plain():
    """Fused parts call such a module: with hooks of its own, and with those of all modules."""
    norm = RMSNorm(4)
    registers = [norm.register_forward_hook, register_module_forward_hook, register_module_full_backward_hook]
    for register in registers:
        assert is_plain(norm, RMSNorm)
        handle = register(lambda *_: None)
        assert not is_plain(norm, RMSNorm)
        handle.remove()
