"""Wrong arguments of a stack of blocks, and its steps in place."""

import pytest
import torch

from kalmix import ArgumentError, Segments
from kalmix.models.blocks import Block, layer_specs
from kalmix.models.cache import CacheOfCall
from kalmix.models.segments_from_inputs import InputLayout
from kalmix.models.stack import BlockStack
from kalmix.models.static_cache import StaticBeliefLayer

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


@pytest.mark.parametrize("hook", [False, True])
def test_steps_add_residuals_later_and_count_tokens(hook):
    """Steps in place equal one call, with norms that a step may merge with sums and with norms that it must call."""
    torch.manual_seed(0)
    specs = layer_specs(["gated-deltanet", "kla", "attention", "gated-deltanet"], 16, heads=2)
    stack, x = BlockStack(Block(16, spec) for spec in specs).eval(), torch.randn(2, 9, 16)
    calls = []
    if hook:
        stack[1].norm.register_forward_hook(lambda *_: calls.append(1))
    layers = [StaticBeliefLayer(12) for _ in stack]
    found = []
    with torch.no_grad():
        expected = stack(x).hidden_state
        found.append(stack(x[:, :6], cache=CacheOfCall(layers, InputLayout(), [])).hidden_state)
        for layer in layers:
            layer.in_place = True
        for t in range(6, 9):
            cache = CacheOfCall(layers, InputLayout(), [])
            output = stack(x[:, t : t + 1], cache=cache, output_hidden_states=t == 8)
            found.append(output.hidden_state)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == (5 if hook else 0)  # the whole, the prompt and three steps
    assert [int(layer.get_seq_length()) for layer in layers] == [9] * 4
    assert len(output.hidden_states) == 4


@pytest.mark.parametrize("hook", [False, True])
def test_blocks_leave_additions_to_the_next_block_only_without_hooks(hook):
    """Both ways give the same output and gradients; hooks see whole residual streams."""
    torch.manual_seed(0)
    specs = layer_specs(["gated-deltanet", "kla", "attention"], 16, heads=2)
    stack, x = BlockStack(Block(16, spec) for spec in specs), torch.randn(2, 9, 16, requires_grad=True)
    expected, seen, updates = x, [], []
    for block in stack:
        expected = block(expected).hidden_state
    for block in stack:
        normalize = block._normalize
        block._normalize = lambda x, update, run=normalize: updates.append(update) or run(x, update)
    if hook:
        for block in stack:
            block.register_forward_hook(lambda _block, _inputs, output: seen.append(output.update))
    found = stack(x).hidden_state
    assert [update is None for update in updates] == [True, hook, hook]
    assert seen == [None] * 3 * hook
    weights = torch.randn_like(expected)
    inputs = [x, *stack.parameters()]
    grads = [torch.autograd.grad((y * weights).sum(), inputs) for y in (found, expected)]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*grads)


def test_blocks_that_finish_in_their_own_way_do_so_in_a_stack():
    class Doubled(Block):
        def finish(self, residual, readout, context):
            return 2 * super().finish(residual, readout, context)

    torch.manual_seed(0)
    stack = BlockStack(Doubled(16, spec) for spec in layer_specs(["gated-deltanet", "kla"], 16, heads=2))
    x = torch.randn(2, 9, 16)
    expected = x
    for block in stack:
        read = Block.forward(block, expected)
        assert read.update is None
        expected = read.hidden_state
    plain = BlockStack(Block(16, spec) for spec in layer_specs(["gated-deltanet", "kla"], 16, heads=2))
    plain.load_state_dict(stack.state_dict())
    doubled = 2 * plain[1](2 * plain[0](x).hidden_state).hidden_state
    torch.testing.assert_close(stack(x).hidden_state, doubled)
    torch.testing.assert_close(expected, doubled)
