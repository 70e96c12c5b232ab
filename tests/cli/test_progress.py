"""The first line of a run: the size of the model and the data, and the device."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers")

from kalmix.cli.progress import ProgressBar


@pytest.mark.parametrize(
    ("gpus", "processes", "more"), [(4, 1, ", 1 of 4 GPUs (for more, use torchrun)"), (4, 4, ""), (1, 1, "")]
)
def test_first_line_says_how_many_gpus_are_not_used(
    gpus: int, processes: int, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    printed = StringIO()
    loader = SimpleNamespace(dataset=[{"input_ids": [1, 2, 3]}] * 2)
    bar = ProgressBar(Console(file=printed))
    bar.on_train_begin(
        SimpleNamespace(device="cuda:0", world_size=processes),  # pyright: ignore[reportArgumentType]
        SimpleNamespace(is_world_process_zero=True),  # pyright: ignore[reportArgumentType]
        SimpleNamespace(),  # pyright: ignore[reportArgumentType]
        model=torch.nn.Linear(2, 3),
        train_dataloader=loader,
    )
    assert printed.getvalue() == f"9 parameters, 6 training tokens, on cuda:0{more}\n"
