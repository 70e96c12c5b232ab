"""Saved states load with `weights_only=True` and continue their sequences."""

import io
import pickle
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from kalmix import Segments

from .conftest import LAYERS


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_saved_state_continues_its_sequence(name):
    torch.manual_seed(0)
    layer = LAYERS[name]().eval()
    x = torch.randn(2, 7, layer.hidden_size)
    _, state = layer(x[:, :4], None, Segments.of(torch.tensor([[0, 0, 4], [1, 1, 4]])))
    loaded = through_a_file(state)
    assert type(loaded) is type(state)
    for old, new in zip(tree_leaves(state), tree_leaves(loaded), strict=True):
        assert torch.equal(old, new)
    assert torch.equal(layer(x[:, 4:], loaded)[0], layer(x[:, 4:], state)[0])


def test_inputs_and_outputs_of_ops_load_again():
    value = (Segments.of(torch.tensor([[0, 0, 4]])), LAYERS["kla"]().filter(torch.randn(1, 4, 12)))
    segments, filtered = through_a_file(value)
    assert torch.equal(segments.rows, value[0].rows)
    assert torch.equal(filtered.mean, value[1].mean)


class Attack:
    """Object that creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_a_saved_state_cannot_run_code(tmp_path):
    with pytest.raises(pickle.UnpicklingError):
        through_a_file(Attack(tmp_path / "ATTACKED"))
    assert not (tmp_path / "ATTACKED").exists()
