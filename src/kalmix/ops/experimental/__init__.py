"""Forms of ops that no layer, command or paper result of kalmix uses. They may change without notice."""

from kalmix.ops.experimental.attend_channels import attend_channels
from kalmix.ops.experimental.attend_corotating import attend_corotating
from kalmix.ops.experimental.attend_separable import SeparablePrecision, attend_separable
from kalmix.ops.experimental.diagonal_fft import diagonal_fft

__all__ = ["SeparablePrecision", "attend_channels", "attend_corotating", "attend_separable", "diagonal_fft"]
