"""Layers of other packages, to compare ours with: Mamba-1, mLSTM and RWKV-7, as those packages have them.

Who imports this file can name them in a model's list of layers. Making one imports its package (the extra `baselines`
brings all). They are for benchmarks: a sequence is read whole, from its beginning.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kalmix.beliefs import detach, take, to
from kalmix.errors import ArgumentError
from kalmix.layers import MIXERS, Mixer
from kalmix.layers.head_sizes import divide_state
from kalmix.segments import Segments
from kalmix.types import Filtered
from kalmix.validation import check_positive_int


class NoState(NamedTuple):
    """The state of a layer that has read a sequence and keeps nothing of it."""

    take = take
    to = to
    detach = detach


class Baseline(Mixer):
    """A mixer around a module of another package, which begins as that package has it.

    It reads whole sequences, one a batch row: no state is taken, and none is left.

    Args:
        hidden_size: D.
        inner: the module; transformers is told not to draw its parameters anew.
        memory: how many numbers it remembers of a sequence while it reads it, without the window of a convolution.
    """

    includes_mlp = True

    def __init__(self, hidden_size: int, inner: nn.Module, memory: int) -> None:
        super().__init__(hidden_size)
        self.inner, self.state_elements = inner, memory
        for part in inner.modules():
            part._is_hf_initialized = True  # pyright: ignore[reportArgumentType]

    def read(
        self, x: Tensor, state: Any = None, segments: Segments | None = None, variance: bool = False
    ) -> tuple[Filtered, None]:
        """The package's output, `[B, T, D]`.

        Raises:
            ArgumentError: a state or segments.
        """
        for name, given in (("state", state), ("segments", segments)):
            if given is not None:
                expected = f"none: {type(self).__name__}, of another package, reads whole sequences, one a row"
                raise ArgumentError(name, got=f"a {type(given).__name__}", expected=expected)
        return Filtered(self.call_inner(x), None, NoState()), None

    def state_size(self, length: int) -> int:
        """Return the number of elements that are kept while a sequence is read, whatever its length."""
        return self.state_elements

    def call_inner(self, x: Tensor) -> Tensor:
        """What the package makes of `x` `[B, T, D]`."""
        return self.inner(x)

    def project_out(self, readout: Tensor, context: None) -> Tensor:
        """As it is."""
        return readout


class Mamba1(Baseline):
    """Mamba (arXiv:2312.00752) of transformers: a parallel scan where mambapy is installed, else a loop over tokens.

    Args:
        hidden_size: D.
        state_dim: N, numbers a channel.  expand: channels = expand * hidden_size.
        conv: taps of the convolution before the scan; 0 for none.
    """

    def __init__(self, hidden_size: int, *, state_dim: int = 16, expand: int = 2, conv: int = 4) -> None:
        _check(hidden_size=hidden_size, state_dim=state_dim, expand=expand, conv=conv or 1)
        super().__init__(hidden_size, _mamba(hidden_size, state_dim, expand, conv), expand * hidden_size * state_dim)

    @classmethod
    def options_for_state_size(cls, width: int, state: int, **given: Any) -> dict[str, Any]:
        """As Table 11 of Kalman Linear Attention: not expanded, and as many numbers a channel as that takes."""
        return {"expand": 1, "state_dim": divide_state(state, width)}


class MLSTM(Baseline):
    """The mLSTM layer (arXiv:2405.04517) of the package xlstm, in its parallel form: O(T^2) work and memory.

    Args:
        hidden_size: D.
        heads: H.  expand: channels = expand * hidden_size, rounded up to a multiple of 64 by the package.
        conv: taps of the convolution over queries and keys; 0 for none.
    """

    def __init__(self, hidden_size: int, *, heads: int = 4, expand: int = 2, conv: int = 4) -> None:
        _check(hidden_size=hidden_size, heads=heads, expand=expand, conv=conv or 1)
        inner = _mlstm(hidden_size, heads, expand, conv)
        width = inner.get_parameter("learnable_skip").shape[0] // heads
        super().__init__(hidden_size, inner, heads * (width * width + width + 1))

    @classmethod
    def options_for_state_size(cls, width: int, state: int, **given: Any) -> dict[str, Any]:
        """Twice as wide inside, in as many heads as that takes. (Table 11 counts otherwise: 16 heads at 128, 2048.)"""
        return {"expand": 2, "heads": divide_state((2 * width) ** 2, state)}


class RWKV7(Baseline):
    """The time mixing of RWKV-7 (arXiv:2503.14456) of flash-linear-attention, in Triton: on a GPU only.

    As that package's first layer, which takes no values over from one before it. The package itself asks that numbers
    be held against the official code's before they are reported. On Hopper it is refused where it was seen to be wrong:
    on an H200 with Triton 3.6.0 first calls agreed with float64 to 1e-3, and most second ones did not agree at all.

    Args:
        hidden_size: D.
        head_dim: K, of hidden_size / head_dim heads.
        shift: whether what a token supplies mixes in the token before, a convolution of two taps.
    """

    includes_mlp = False

    def __init__(self, hidden_size: int, *, head_dim: int = 64, shift: bool = True) -> None:
        _check(hidden_size=hidden_size, head_dim=head_dim)
        super().__init__(hidden_size, _rwkv(hidden_size, head_dim, shift), hidden_size * head_dim)

    @classmethod
    def options_for_state_size(cls, width: int, state: int, **given: Any) -> dict[str, Any]:
        """In heads as wide as that takes."""
        return {"head_dim": divide_state(state, width)}

    def call_inner(self, x: Tensor) -> Tensor:
        """What the package makes of `x` `[B, T, D]`.

        Raises:
            ArgumentError: `x` is not on a GPU, or on one on which the package is wrong.
        """
        if not x.is_cuda:
            raise ArgumentError("device", got=str(x.device), expected="a GPU, as RWKV-7 runs on GPUs only")
        triton = import_module("triton").__version__
        if is_miscompiled(torch.cuda.get_device_capability(x.device), triton):
            got = f"a Hopper GPU with Triton {triton}, where flash-linear-attention's RWKV-7 is wrong"
            raise ArgumentError("device", got=got, expected="another GPU, or Triton 3.7.1 or newer")
        return self.inner(x)[0]


BASELINES: dict[str, type[Baseline]] = {"mamba-1": Mamba1, "mlstm": MLSTM, "rwkv-7": RWKV7}
MIXERS.update(BASELINES)


def is_miscompiled(capability: tuple[int, int], triton: str) -> bool:
    """Whether a GPU is one for which this Triton does not compile flash-linear-attention's RWKV-7 as it is written.

    Seen with 3.6.0; the package itself says of other kernels of its that 3.4 to 3.7.0 are so.
    """
    release = tuple(int(part) for part in triton.split("+")[0].split(".")[:3] if part.isdigit())
    return capability[0] == 9 and (3, 4) <= release < (3, 7, 1)


def _mamba(hidden_size: int, state_dim: int, expand: int, conv: int) -> nn.Module:
    mamba = _module("transformers.models.mamba.modeling_mamba", "transformers")
    config = mamba.MambaConfig(
        hidden_size=hidden_size,
        state_size=state_dim,
        expand=expand,
        conv_kernel=conv or 1,
        use_conv_bias=conv > 0,
        num_hidden_layers=1,
        use_mambapy=True,
    )
    module = mamba.MambaMixer(config, layer_idx=0)
    module.dt_proj.bias._no_reinit = True  # as Mamba's own code marks it, for those who draw models anew
    if not conv:  # one tap, which is 1 and stays so
        nn.init.ones_(module.conv1d.weight.requires_grad_(False))
    return module


def _mlstm(hidden_size: int, heads: int, expand: int, conv: int) -> nn.Module:
    xlstm = _module("xlstm.blocks.mlstm.layer", "xlstm")
    config = xlstm.mLSTMLayerConfig(
        embedding_dim=hidden_size,
        num_heads=heads,
        proj_factor=float(expand),
        conv1d_kernel_size=conv or 1,
        context_length=1,
    )
    module = xlstm.mLSTMLayer(config)
    module.mlstm_cell.causal_mask = None  # then it is made for each length as it comes
    if not conv:
        module.conv1d = nn.Identity()
    return module


def _rwkv(hidden_size: int, head_dim: int, shift: bool) -> nn.Module:
    fla = _module("fla.layers.rwkv7", "flash-linear-attention")
    if hidden_size % head_dim:
        raise ArgumentError("head_dim", got=head_dim, expected=f"a divisor of the width, {hidden_size}")
    # Initial values depend on the layer's place, and are defined from two layers on.
    module = fla.RWKV7Attention(hidden_size=hidden_size, head_dim=head_dim, layer_idx=0, num_hidden_layers=2)
    if not shift:  # how much of the token before is mixed in: nothing, and it stays so
        for name in "rwkvag":
            nn.init.zeros_(module.get_parameter(f"x_{name}").requires_grad_(False))
    return module


def _module(name: str, package: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        got = f"one of the package {package}, which cannot be imported ({error})"
        raise ArgumentError("layer", got=got, expected="installed: pip install 'kalmix[baselines]'") from error


def _check(**sizes: int) -> None:
    for name, value in sizes.items():
        check_positive_int(name, value)
