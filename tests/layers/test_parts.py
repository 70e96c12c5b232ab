"""The short convolution against PyTorch's."""

import torch
import torch.nn.functional as F

from kalmix.layers.parts import ShortConvolution, unit


def test_convolution_against_conv1d():
    torch.manual_seed(0)
    conv = ShortConvolution(5, 4)
    x = torch.randn(2, 9, 5)
    y, window = conv(x)
    expected = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), conv.weight[:, None], groups=5).transpose(1, 2)
    torch.testing.assert_close(y, expected)
    assert torch.equal(window, x[:, -3:])


def test_window_shorter_than_a_call_keeps_what_came_before():
    conv = ShortConvolution(1, 4)
    _, window = conv(torch.tensor([[[1.0], [2.0]]]))
    assert window.flatten().tolist() == [0, 1, 2]
    _, window = conv(torch.tensor([[[3.0]]]), window)
    assert window.flatten().tolist() == [1, 2, 3]


def test_unit():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    torch.testing.assert_close(unit(x), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    tiny = torch.zeros(2, requires_grad=True)
    unit(tiny).sum().backward()
    assert torch.isfinite(tiny.grad).all()
