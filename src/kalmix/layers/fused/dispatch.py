"""Choice between the eager form and the Triton form of a part."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.ops._shared.environment import HAS_TRITON
from kalmix.validation import FLOAT32_STATE_DTYPES, in_transform

DEVICES = ("cuda",)  # tests add "cpu", where Triton's interpreter runs the kernels
# These parts run in Triton under torch.compile, too. The compiler fuses the other parts itself.
TRACED = frozenset({"short_convolution", "recurrent_afa", "head_signals", "step_decay", "gated_rms_norm"})
KNEE = 8.0  # where `positive` changes from exponential to power
MAX_COLUMNS = 16384  # columns that one program normalises together
LEAST_ROWS = 8  # tokens of a history that a step of attention reads at once, at least
STEP_ROWS = 64  # largest number of tokens of the kernels of projections for decoding
HALF = (torch.bfloat16, torch.float16)


def uses_triton(part: str, x: Tensor, columns: int = 1) -> bool:
    """Return whether a part runs its Triton form; otherwise it runs its eager form.

    The eager form serves other devices, float64, transforms of `torch.func` and forward-mode derivatives.

    Args:
        part: name of the part.
        x: its input.
        columns: columns that one program must hold.
    """
    return (
        (part in TRACED or not torch.compiler.is_compiling())
        and x.device.type in DEVICES
        and HAS_TRITON
        and x.dtype in FLOAT32_STATE_DTYPES
        and columns <= MAX_COLUMNS
        and not in_transform()
        and x.numel() > 0
    )


def output_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a norm stores its output: that of autocast if it is active, otherwise `dtype`.

    Linear layers follow a norm. Under autocast each of them would convert and store a float32 input again.
    """
    if device.type == "meta" or dtype == torch.float64 or not torch.is_autocast_enabled(device.type):
        return dtype
    return torch.get_autocast_dtype(device.type)
