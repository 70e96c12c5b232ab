"""Wrong arguments of a stack of blocks."""

import pytest
import torch

from kalmix import ArgumentError, Segments
from kalmix.models.blocks import Block, layer_specs
from kalmix.models.stack import BlockStack

KLA, ATTENTION = layer_specs(["kla", "attention"], hidden_size=8)


@pytest.mark.parametrize("blocks", [None, 3, ["kla"], [KLA], [torch.nn.Linear(8, 8)], [Block(8, KLA), Block(4, KLA)]])
def test_stacks_hold_blocks_of_one_width(blocks):
    with pytest.raises(ArgumentError, match="`blocks`"):
        BlockStack(blocks)


def test_wrong_calls_of_a_stack_name_the_argument():
    stack, x = BlockStack([Block(8, KLA), Block(8, ATTENTION)]), torch.zeros(1, 3, 8)
    states = stack(x).states
    for wrong in (None, x[0], x[..., :4], x.long(), x.double(), x.bfloat16()):
        with pytest.raises(ArgumentError, match="`x`"):
            stack(wrong)
    for wrong in (states[:1], states * 2, 3, stack(x)):
        with pytest.raises(ArgumentError, match="`states`"):
            stack(x, wrong)
    with pytest.raises(ArgumentError, match="`layout`"):
        stack(x, states, Segments.whole(1, 3))
    with pytest.raises(ArgumentError, match="`layers` is empty"):
        BlockStack([])(x, output_posterior=True)


def test_exhausted_memory_is_not_reported_as_a_wrong_dtype(monkeypatch):
    stack = BlockStack([Block(8, KLA)])

    def exhaust(*_arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(stack.mixers[0], "read", exhaust)
    with pytest.raises(torch.OutOfMemoryError):
        stack(torch.zeros(1, 3, 8, dtype=torch.float64))
