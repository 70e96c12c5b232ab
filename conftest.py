"""Settings and fixtures for the tests of both packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

if not torch.cuda.is_available():  # Triton's interpreter stands in for a GPU; Triton reads this when it is imported
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)  # the suite runs one process a core


class Told(NamedTuple):
    """What a command line returned and printed."""

    status: int
    output: str
    errors: str


@pytest.fixture
def kalmix(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    """Run a command line in this process."""
    from kalmix.cli import main

    def run(*arguments: object, columns: int = 200) -> Told:
        monkeypatch.setattr(sys, "argv", ["kalmix", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", str(columns))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Told(int(ended.value.code or 0), *capsys.readouterr())

    return run
