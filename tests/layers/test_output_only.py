"""`OutputOnly`: layers inside `nn.Sequential`."""

import pytest
import torch
from torch import nn

from kalmix.errors import ArgumentError
from kalmix.layers import KLA, Attention, FilterConv2d, OutputOnly


def test_layers_run_inside_sequential():
    torch.manual_seed(0)
    first, second = KLA(8, slots=2), Attention(8, heads=2)
    model = nn.Sequential(nn.LayerNorm(8), OutputOnly(first), OutputOnly(second), nn.Linear(8, 3))
    x = torch.randn(2, 5, 8)
    assert model(x).shape == (2, 5, 3)
    torch.testing.assert_close(model(x), model[3](second(first(model[0](x))[0])[0]))


def test_parameters_of_the_layer_are_trained_and_saved():
    model = OutputOnly(KLA(8, slots=2))
    model(torch.randn(1, 4, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert list(model.state_dict()) == [f"layer.{name}" for name in model.layer.state_dict()]


def test_modules_that_return_one_tensor_are_refused():
    for module in (FilterConv2d(3, 8, 5), nn.Linear(8, 8)):
        with pytest.raises(ArgumentError, match="returns"):
            OutputOnly(module)
