"""Stack of blocks: the part that all language models share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kalmix.errors import ArgumentError
from kalmix.layers.base import Mixer
from kalmix.layers.modules import is_plain
from kalmix.models.blocks import Block, BlockOutput, Link, Posterior
from kalmix.models.offload import loaded
from kalmix.models.segments_from_inputs import InputLayout
from kalmix.steps import Slots
from kalmix.types import Belief, Filtered
from kalmix.validation import FLOATS, check_choice, check_dtype_and_device, check_shape

PROPAGATIONS = ("mean", "sample")


class StackOutput(NamedTuple):
    """Output of a call of `BlockStack`, for B rows of T tokens of width D. Fields are not checked here.

    Each tuple has one entry per block. It is `()` if the call did not request it; the argument is given in parentheses.

    Attributes:
        hidden_state: `[B, T, D]`, output of the last block (the residual stream).
        states: state of each block's mixer (its sequence layer) after the last token (`output_states`, the default).
            Pass the tuple to the next call to continue.
        mixer_inputs: normalized input of each mixer, tensors `[B, T, D]` (`output_states`, too).
        hidden_states: input of each block, tensors `[B, T, D]` (`output_hidden_states`). The first is the input of the
            stack; the output of the last block is only in `hidden_state`.
        beliefs: `kalmix.Filtered` of each mixer's output (`output_beliefs`): mean `[B, T, D]` in the dtype of the
            parameters, variance `[B, T, D]` in float32 (float64 if they are), and the mixer's state. The variance is
            `None` if the mixer has no posterior, as "attention".
        posterior: posterior of the last mixer's read-out, its output before gate and projection (`output_posterior`):
            a named tuple with mean and variance `[B, T, E]`, where E is the width of the read-out. `None` if not
            requested.

    Example:
        >>> from kalmix.models.blocks import Block, layer_specs
        >>> from kalmix.models.stack import BlockStack
        >>> specs = layer_specs(["kla", {"mixer": "attention", "heads": 4}], hidden_size=32)
        >>> stack = BlockStack(Block(32, spec) for spec in specs)
        >>> output = stack(torch.randn(2, 10, 32), output_beliefs=True)
        >>> output.hidden_state.shape, [belief.variance is not None for belief in output.beliefs]
        (torch.Size([2, 10, 32]), [True, False])
    """

    hidden_state: Tensor
    states: tuple[Belief, ...]
    mixer_inputs: tuple[Tensor, ...]
    hidden_states: tuple[Tensor, ...]
    beliefs: tuple[Filtered, ...]
    posterior: Posterior | None


class StateCache(Protocol):
    """Protocol of a cache that a stack reads and updates block by block, so that no tensor is kept for longer."""

    def get_state(self, index: int, mixer: Mixer, slots: Slots | None = None) -> Belief | None:
        """Return the state from which the mixer of a block continues, or the pool of `slots`; `None` for its prior."""
        ...

    def slots(self, index: int, mixer: Mixer, x: Tensor) -> Slots | None:
        """Return the slots in which the mixer of a block updates the state in place; `None` if it returns a new one."""
        ...

    def set_state(self, index: int, output: BlockOutput) -> None:
        """Store the state of the mixer after a call of its block."""
        ...

    def finish(self) -> None:
        """Count the tokens of the call, after its last block."""
        ...


class BlockStack(nn.ModuleList):
    """List of blocks that run one after the other; a `torch.nn.ModuleList`.

    Call it as `stack(x, states=None, layout=None, **options)`, where x is `[B, T, D]` in the dtype of the parameters.
    `states` are those of an earlier `StackOutput`, one per block, to continue; `layout` is an `InputLayout`
    (`kalmix.models.segments_from_inputs`) of packed or padded sequences. It returns a `StackOutput`, whose docstring
    names the option that requests each field: `output_states` (True by default), `output_hidden_states`,
    `output_beliefs` and `output_posterior` (False). There is no norm after the last block.

    Args:
        blocks: instances of `Block` of the same width D, from first to last. Without blocks, the output is x.
        propagate: output of a mixer (the block's sequence layer) that the block uses in training: "mean" of its
            posterior, or one "sample", drawn per token and element with reparameterisation (section 5.5 of Kalman
            Linear Attention). The last block, blocks without a posterior, and evaluation always use the mean.

    Raises:
        ArgumentError: `propagate` is unknown, or `blocks` are not blocks of one width; in a call, x or a state has
            another shape or dtype, the number of states is not that of the blocks, or `output_posterior` is set and the
            last mixer has no posterior.

    Example:
        >>> from kalmix.models.blocks import Block, layer_specs
        >>> from kalmix.models.stack import BlockStack
        >>> specs = layer_specs(["kla", {"mixer": "attention", "heads": 4}], hidden_size=32)
        >>> stack = BlockStack(Block(32, spec) for spec in specs)
        >>> x = torch.randn(2, 10, 32)
        >>> first = stack(x[:, :6])
        >>> second = stack(x[:, 6:], first.states)  # continues
        >>> torch.allclose(second.hidden_state, stack(x).hidden_state[:, 6:], atol=1e-5)
        True
    """

    def __init__(self, blocks: Iterable[Block], propagate: str = "mean") -> None:
        check_choice("propagate", propagate, PROPAGATIONS)
        if not isinstance(blocks, Iterable):
            raise ArgumentError("blocks", got=f"a {type(blocks).__name__}", expected="a list of `Block`")
        listed = list(blocks)
        for block in listed:
            if not isinstance(block, Block):
                raise ArgumentError(
                    "blocks", problem=f"contains a {type(block).__name__}", expected="a list of `Block`"
                )
        widths = {block.mixer.hidden_size for block in listed}
        if len(widths) > 1:
            raise ArgumentError("blocks", problem=f"have widths {sorted(widths)}", expected="blocks of one width")
        super().__init__(listed)
        self.propagate = propagate
        self.hidden_size: int | None = widths.pop() if widths else None

    def forward(
        self,
        x: Tensor,
        states: Sequence[Belief | None] | None = None,
        layout: InputLayout | None = None,
        *,
        cache: StateCache | None = None,
        output_states: bool = True,
        output_hidden_states: bool = False,
        output_beliefs: bool = False,
        output_posterior: bool = False,
    ) -> StackOutput:
        """Run all blocks.

        Args:
            x: `[B, T, D]`, embedded tokens.
            states: states of the mixers after the previous tokens, one per block; `None` for the priors.
            layout: sequences in `x`, and the order of its tokens; `None` if each row is one sequence.
            cache: cache to read states from, instead of `states`, and to store them in.
            output_states: return the mixers' states and inputs.
            output_hidden_states: return the input of each block, with its tokens in the order of the model's input.
            output_beliefs: return each mixer's belief about its output.
            output_posterior: return the posterior of the last block's read-out.

        Raises:
            ArgumentError: `x` or a state has another shape, the number of states is not that of the blocks, `layout`
                is not an `InputLayout`, or `output_posterior` is set and the last layer has no posterior.
        """
        check_shape("x", x, "B T D", {} if self.hidden_size is None else {"D": self.hidden_size})
        check_dtype_and_device("x", x, FLOATS, x.device)
        blocks = self.blocks
        if states is not None and (not isinstance(states, list | tuple) or len(states) != len(blocks)):
            got = f"has {len(states)} states" if isinstance(states, list | tuple) else f"is a {type(states).__name__}"
            raise ArgumentError("states", problem=got, expected=f"{len(blocks)} states, one per block")
        if layout is not None and not isinstance(layout, InputLayout):
            raise ArgumentError("layout", got=f"a {type(layout).__name__}", expected="InputLayout(segments)")
        if output_posterior and not (blocks and self.last_block.mixer.has_posterior):
            last = [type(mixer).__name__ for mixer in self.mixers[-1:]]
            problem = f"ends with {last[0]}, which has no posterior" if last else "is empty"
            raise ArgumentError("layers", problem=problem, expected="a last layer with a posterior")
        collected: dict[str, list[Any]] = {"states": [], "mixer_inputs": [], "hidden_states": [], "beliefs": []}
        output, segments = None, None if layout is None else layout.segments
        update = None  # still to be added to x
        for index, block in enumerate(blocks):
            last = index == len(blocks) - 1
            if output_hidden_states:
                # The next block reads what is returned, so that gradients reach it.
                shown = x if layout is None else layout.restore(x)
                collected["hidden_states"].append(shown)
                x = x if layout is None else layout.compact(shown)
            mixer: Any = block.mixer
            state, slots = None if states is None else states[index], None
            if cache is not None:
                plain = not (output_beliefs or output_posterior)
                slots = cache.slots(index, mixer, x) if plain else None
                state = cache.get_state(index, mixer, slots)
            fuses = slots is not None or _is_bare(block)
            if update is not None and not fuses:
                x, update = x + update, None
            output = block(
                *(x, state, segments),
                link=Link(slots, update, defer=fuses and not (last or output_hidden_states)),
                sample=self.propagate == "sample" and self.training and not last,
                output_state=output_states or cache is not None,
                output_belief=output_beliefs,
                output_posterior=output_posterior and last,
            )
            x, update = output.hidden_state, output.update
            if cache is not None:
                cache.set_state(index, output)
            if output_states:
                collected["states"].append(output.state)
                collected["mixer_inputs"].append(output.mixer_input)
            if output_beliefs:
                collected["beliefs"].append(output.belief)
        if cache is not None:
            cache.finish()
        posterior = None if output is None else output.posterior
        return StackOutput(x, **{name: tuple(values) for name, values in collected.items()}, posterior=posterior)

    @property
    def blocks(self) -> list[Any]:
        """Blocks in order; under pipeline parallelism of transformers those of this rank, and no others."""
        return self.of_this_rank(self)

    def of_this_rank(self, values: Iterable[Any]) -> list[Any]:
        """Return those of the values, one for each block of the model, whose blocks this rank has.

        Pipeline parallelism of transformers puts identities in place of the other blocks.
        """
        return [value for value, block in zip(values, self, strict=True) if not isinstance(block, nn.Identity)]

    @property
    def mixers(self) -> list[Mixer]:
        """Mixers of `blocks`."""
        return [block.mixer for block in self if isinstance(block, Block)]

    @property
    def last_block(self) -> Block:
        """Last block. The marginal likelihood integrates over the posterior of its read-out."""
        block = self[-1]
        assert isinstance(block, Block)
        return block

    def finish(self, posterior: Posterior, readout: Tensor) -> Tensor:
        """Compute the last block's output from samples of its read-out.

        Args:
            posterior: as `forward` returns it.
            readout: `[S, B, T, E]`, samples of the read-out.

        Returns:
            `[S, B, T, D]`, residual stream after the last block.
        """
        block = self.last_block
        with loaded(block):
            return block.finish(posterior.residual, readout, posterior.context)


def _is_bare(block: Any) -> bool:
    """Return whether a call of the block runs its `forward` only, in eager code.

    Only then may blocks leave an addition to the next block: hooks must see whole residual streams, checkpoints must
    not store two tensors instead of one, and compiled blocks must not differ in their arguments.
    """
    return (
        not torch.compiler.is_compiling()
        and isinstance(block, Block)
        and type(block).forward is Block.forward
        and is_plain(block, type(block))
        and block._compiled_call_impl is None
        and not getattr(block, "gradient_checkpointing", False)
    )


def attention_maps(mixers: Sequence[Mixer], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the attention map of each mixer, in the dtype of its input.

    Raises:
        ArgumentError: a mixer has none.
    """
    maps = []
    for mixer, x in zip(mixers, inputs, strict=True):
        with loaded(mixer):
            attention_map = mixer.attention_map(x)
        if attention_map is None:
            problem = f"is set, but {type(mixer).__name__} has no attention map"
            raise ArgumentError("output_attentions", problem=problem, expected="layers linear in their values")
        maps.append(attention_map.to(x.dtype))
    return tuple(maps)
