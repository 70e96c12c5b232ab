"""pytest plugin that gives the laws the cases of a GPU, in float32 and bfloat16."""

from __future__ import annotations

import functools


def pytest_configure() -> None:
    import torch  # after conftest.py, which chooses Triton's interpreter where no GPU is

    from kalmix.testing import cases as module

    original, device = module.cases, "cuda" if torch.cuda.is_available() else "cpu"

    @functools.wraps(original)
    def cases(devices: list[str], dtypes: tuple[torch.dtype, ...], **sizes: int) -> list[module.Case]:
        return original([device], (torch.float32, torch.bfloat16), **sizes)

    module.cases = cases
