"""Wrong arguments of figures."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from kalmix import ArgumentError
from kalmix.analysis import plots


@pytest.mark.parametrize(
    ("weights", "tokens", "names"),
    [
        (torch.ones(1, 3, 3), ["a", "b"], ["kla"]),
        (torch.ones(1, 3, 3), ["a", "b", "c"], ["kla", "gla"]),
        (torch.ones(3, 3), ["a", "b", "c"], ["kla"]),
        (-torch.ones(1, 3, 3), ["a", "b", "c"], ["kla"]),
    ],
)
def test_wrong_attention_maps_are_refused(weights, tokens, names, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="weights"):
        plots.attention_maps(tmp_path / "maps.png", weights, tokens, names)
