"""Table of the kernels of the op `attend`, in order of preference.

Each kernel is a module with the function

    attend(signals, belief, segments, variance) -> Filtered

and imports no other kernel. The op checks the arguments first. `belief` is never `None`; its tensors may be expanded.
"""

import torch

from kalmix.ops._attend import chunked, custom_op, reference
from kalmix.ops._shared.kernel import TRANSFORMS, Kernel
from kalmix.validation import FLOAT32_STATE_DTYPES

BLACKWELL = 10  # compute capability of B200 and GB200; GeForce GPUs of that generation have 12


def unsupported_gpu(index: int | None) -> str | None:
    """Return why GPU `index` (the current one if `None`) cannot run kernel "triton", or `None` if it can."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(index)
    if major == BLACKWELL and torch.version.cuda is not None:
        return f"Triton 3.6 does not compile it for GPUs of compute capability {major}.{minor} (Blackwell)"
    return None


# Equivalent to `torch.compiler.assume_constant_result`, which imports the compiler and takes two seconds.
unsupported_gpu._dynamo_marked_constant = True  # type: ignore[attr-defined]

KERNELS = (
    Kernel(
        "triton",
        custom_op.attend,
        devices=("cuda",),
        dtypes=FLOAT32_STATE_DTYPES,
        min_tokens=16,
        max_key_width=256,
        max_single_precision_key_width=128,
        triton=True,
        unsupported_gpu=unsupported_gpu,
        low_precision_products=True,
    ),
    Kernel("chunked", chunked.attend, min_tokens=16),
    Kernel("reference", reference.attend, features=frozenset({TRANSFORMS})),
)
