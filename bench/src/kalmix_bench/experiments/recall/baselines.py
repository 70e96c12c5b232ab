"""Layers of other packages for comparison: Mamba-1, mLSTM and RWKV-7.

Importing this module makes their names available in a model's list of layers. Constructing one imports its package (the
extra `baselines` installs all). They only process whole sequences from the beginning.
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
    """Empty state of a layer that stores nothing of a sequence."""

    take = take
    to = to
    detach = detach


class Baseline(Mixer):
    """Mixer that wraps a module of another package, with that package's initial values.

    It processes whole sequences, one per batch row. It accepts no state and returns an empty one.

    Args:
        hidden_size: D.
        inner: the module; transformers is prevented from initializing it again.
        memory: number of state elements during a sequence, without the window of a convolution.
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
        """Return the module's output, `[B, T, D]`.

        Raises:
            ArgumentError: a state or segments are given.
        """
        for name, value in (("state", state), ("segments", segments)):
            if value is not None:
                hint = f"{type(self).__name__} is of another package and reads whole sequences, one per row"
                raise ArgumentError(name, got=f"a {type(value).__name__}", expected="None", hint=hint)
        return Filtered(self.call_inner(x), None, NoState()), None

    def state_size(self, length: int) -> int:
        """Return the number of state elements, which does not depend on the length."""
        return self.state_elements

    def call_inner(self, x: Tensor) -> Tensor:
        """Return the module's output for `x` `[B, T, D]`."""
        return self.inner(x)

    def project_out(self, readout: Tensor, context: None) -> Tensor:
        """Return the module's output unchanged."""
        return readout


class Mamba1(Baseline):
    """Mamba (arXiv:2312.00752) of transformers: a parallel scan if mambapy is installed, otherwise a loop over tokens.

    Args:
        hidden_size: D.
        state_dim: N, state elements per channel.
        expand: channels = expand * hidden_size.
        conv: width of the convolution before the scan; 0 for none.
    """

    def __init__(self, hidden_size: int, *, state_dim: int = 16, expand: int = 2, conv: int = 4) -> None:
        _check(hidden_size=hidden_size, state_dim=state_dim, expand=expand, conv=conv or 1)
        super().__init__(hidden_size, _mamba(hidden_size, state_dim, expand, conv), expand * hidden_size * state_dim)

    @classmethod
    def options_for_state_size(cls, width: int, state: int, **options: Any) -> dict[str, Any]:
        """Return the options of Table 11 of Kalman Linear Attention: no expansion, and the state size that remains per
        channel.
        """
        return {"expand": 1, "state_dim": divide_state(state, width)}


class MLSTM(Baseline):
    """The mLSTM layer (arXiv:2405.04517) of the package xlstm in its parallel form, with O(T^2) time and memory.

    Args:
        hidden_size: D.
        heads: H.
        expand: channels = expand * hidden_size, rounded up by the package to a multiple of 64.
        conv: width of the convolution over queries and keys; 0 for none.
    """

    def __init__(self, hidden_size: int, *, heads: int = 4, expand: int = 2, conv: int = 4) -> None:
        _check(hidden_size=hidden_size, heads=heads, expand=expand, conv=conv or 1)
        inner = _mlstm(hidden_size, heads, expand, conv)
        width = inner.get_parameter("learnable_skip").shape[0] // heads
        super().__init__(hidden_size, inner, heads * (width * width + width + 1))

    @classmethod
    def options_for_state_size(cls, width: int, state: int, **options: Any) -> dict[str, Any]:
        """Return an expansion of 2 with the number of heads that gives the state size.

        Table 11 of Kalman Linear Attention counts differently: 16 heads at a width of 128 and a state of 2048.
        """
        return {"expand": 2, "heads": divide_state((2 * width) ** 2, state)}


class RWKV7(Baseline):
    """Time mixing of RWKV-7 (arXiv:2503.14456) of flash-linear-attention, in Triton, for GPUs only.

    It is the first layer of that package's model, which receives no values from a layer before. The package recommends
    checking results against the official code before publication. On Hopper GPUs with Triton versions that compile it
    incorrectly (see `is_miscompiled`) it raises an error.

    Args:
        hidden_size: D.
        head_dim: K; there are hidden_size / head_dim heads.
        shift: whether to mix each token's inputs with those of the token before, a convolution of width 2.
    """

    includes_mlp = False

    def __init__(self, hidden_size: int, *, head_dim: int = 64, shift: bool = True) -> None:
        _check(hidden_size=hidden_size, head_dim=head_dim)
        super().__init__(hidden_size, _rwkv(hidden_size, head_dim, shift), hidden_size * head_dim)

    @classmethod
    def options_for_state_size(cls, width: int, state: int, **options: Any) -> dict[str, Any]:
        """Return the head dimension that gives the state size."""
        return {"head_dim": divide_state(state, width)}

    def call_inner(self, x: Tensor) -> Tensor:
        """Return the module's output for `x` `[B, T, D]`.

        Raises:
            ArgumentError: `x` is not on a GPU, or on a GPU for which the package is compiled incorrectly.
        """
        if not x.is_cuda:
            raise ArgumentError("x", problem=f"is on {x.device}", expected="a tensor on a GPU, where RWKV-7 runs")
        triton = import_module("triton").__version__
        if is_miscompiled(torch.cuda.get_device_capability(x.device), triton):
            problem = f"is on a Hopper GPU with Triton {triton}, where flash-linear-attention's RWKV-7 is wrong"
            raise ArgumentError("x", problem=problem, expected="another GPU, or Triton 3.7.1 or newer")
        return self.inner(x)[0]


BASELINES: dict[str, type[Baseline]] = {"mamba-1": Mamba1, "mlstm": MLSTM, "rwkv-7": RWKV7}
MIXERS.update(BASELINES)


def is_miscompiled(capability: tuple[int, int], triton: str) -> bool:
    """Return whether this Triton version compiles flash-linear-attention's RWKV-7 incorrectly for this GPU.

    The errors were observed with Triton 3.6.0. The package states the same of its other kernels for 3.4 to 3.7.0.

    Args:
        capability: compute capability of the GPU.
        triton: version of Triton.
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
    module.dt_proj.bias._no_reinit = True  # as in Mamba's code: models must not initialize it again
    if not conv:  # a fixed tap of 1
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
    module.mlstm_cell.causal_mask = None  # the module then makes a mask for each length
    if not conv:
        module.conv1d = nn.Identity()
    return module


def _rwkv(hidden_size: int, head_dim: int, shift: bool) -> nn.Module:
    fla = _module("fla.layers.rwkv7", "flash-linear-attention")
    if hidden_size % head_dim:
        raise ArgumentError("head_dim", got=head_dim, expected=f"a divisor of {hidden_size} (the hidden size)")
    # Initial values depend on the layer's index and are defined for two layers or more.
    module = fla.RWKV7Attention(hidden_size=hidden_size, head_dim=head_dim, layer_idx=0, num_hidden_layers=2)
    if not shift:  # fixed share of 0 of the token before
        for name in "rwkvag":
            nn.init.zeros_(module.get_parameter(f"x_{name}").requires_grad_(False))
    return module


def _module(name: str, package: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        problem = f"needs {package}, which cannot be imported ({error})"
        hint = "Install it with `pip install './bench[baselines]'` in a clone of the kalmix repository"
        raise ArgumentError("layer", problem=problem, expected="an installed package", hint=hint) from error


def _check(**sizes: int) -> None:
    for name, value in sizes.items():
        check_positive_int(name, value)
