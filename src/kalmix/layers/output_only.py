"""Wrapper for `nn.Sequential`: layers return a pair of output and state, modules in a sequence one tensor."""

from __future__ import annotations

from torch import Tensor, nn

from kalmix.errors import ArgumentError
from kalmix.layers.base import Mixer


class OutputOnly(nn.Module):
    """Layer that returns its output only, so that it fits into `nn.Sequential`.

    A layer returns `(y, state)`. `nn.Sequential` passes the whole pair to the next module, which fails. This wrapper
    drops the state; each call starts from the prior. It accepts x only: call `wrapper.layer` itself to continue a
    sequence or to pass `segments` or `times`, and `wrapper.layer.filter(x, variance=True)` to get a variance.

    Args:
        layer: instance of a sequence layer, a `Mixer`. `FilterConv2d` is not a `Mixer`; it returns one tensor already.

    Raises:
        ArgumentError: `layer` is not a `Mixer`; or, in a call, `layer` refuses x.
        TypeError: a call has another argument than x.

    Shape:
        Input and output: `[B, T, D]`; the output is the y of `layer`.

    Example:
        >>> from torch import nn
        >>> from kalmix.layers import KLA, OutputOnly
        >>> model = nn.Sequential(nn.Linear(8, 64), OutputOnly(KLA(64)), nn.Linear(64, 10))
        >>> model(torch.randn(2, 16, 8)).shape
        torch.Size([2, 16, 10])
    """

    def __init__(self, layer: Mixer) -> None:
        super().__init__()
        if not isinstance(layer, Mixer):
            raise ArgumentError("layer", got=f"a {type(layer).__name__}", expected="a layer that returns (y, state)")
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the output `[B, T, D]` of the layer for tokens `x` `[B, T, D]`."""
        return self.layer(x)[0]
