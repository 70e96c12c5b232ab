"""What every layer is: tokens in, tokens and a belief out."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Self, TypeVar, get_type_hints

import torch
from torch import Tensor, nn

from kalmix.designs import Design
from kalmix.errors import ArgumentError
from kalmix.layers.head_sizes import Heads
from kalmix.segments import Segments, check_segments
from kalmix.types import Belief, Filtered
from kalmix.validation import FLOATS, check_dtype_and_device, check_positive_int, check_shape, check_types

State = TypeVar("State", bound=tuple)


class Mixer(nn.Module):
    """A layer that mixes a sequence through what it remembers of it.

    `y, state = layer(x, state, segments)`: always a pair, so that training, prefill, decoding and packed sequences
    are one call. `state` is an immutable pytree whose leading axis is sequences (with `take`, `to` and `detach`,
    as beliefs have); `None` is the prior.

    A subclass writes `read`, which filters, and `emit`, which turns what was read out of the belief into the output.
    They are apart because a posterior is independent between columns of the read-out, and no longer so behind the
    output projection: a sample of the output is `emit` of a sample of the read-out.
    """

    design: Design | None = None  # design under which the layer filters; `None` if no design describes it
    has_posterior: bool = False  # whether `filter(..., variance=True)` returns a variance
    includes_mlp: ClassVar[bool] = False  # whether the layer gates its output, so that no MLP should follow it
    repr_attributes: ClassVar[tuple[str, ...]] = ()  # attributes that `repr` shows, beside those of every layer

    def __new__(cls, *sizes: object, **options: object) -> Self:
        """Check the types of options against the annotations of the layer before anything is built.

        Raises:
            ArgumentError: an option is of another type.
        """
        check_types(option_types(cls), options)
        return super().__new__(cls)

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        check_positive_int("hidden_size", hidden_size)
        self.hidden_size = hidden_size

    def extra_repr(self) -> str:
        """Return the sizes that `repr` shows: options, heads, and the state of one sequence."""
        shown: dict[str, object] = {"hidden_size": self.hidden_size}
        sizes = getattr(self, "sizes", None)
        if isinstance(sizes, Heads):
            shown |= sizes._asdict()
        names = ("window", *self.repr_attributes)
        shown |= {name: getattr(self, name) for name in names if getattr(self, name, None) is not None}
        size, growth = self.state_size(1), self.state_size(2) - self.state_size(1)
        state = f"state: {growth:,} floats per token" if growth else f"state: {size:,} floats"
        return ", ".join([*(f"{name}={value!r}" for name, value in shown.items()), state])

    @classmethod
    def check_options(cls, name: str, options: Mapping[str, object]) -> None:
        """Check the names and types of options before a layer is built.

        Args:
            name: of the layer, for the error.
            options: all that it is built with, but `hidden_size`.

        Raises:
            ArgumentError: the layer does not have an option, must be given one, or takes one of another type.
        """
        known = {n: option for n, option in inspect.signature(cls).parameters.items() if n != "hidden_size"}
        for option in options:
            if option not in known:
                expected = f"one of {', '.join(map(repr, known))}"
                raise ArgumentError(f"option of {name!r}", got=repr(option), expected=expected)
        for n, option in known.items():
            if option.default is option.empty and n not in options:
                raise ArgumentError(f"option {n!r} of {name!r}", problem="is missing", expected="a value")
        check_types(option_types(cls), options)

    @classmethod
    def options_for_state_size(cls, width: int, state: int, **options: Any) -> dict[str, Any]:
        """Return options with which the belief of one sequence holds about `state` numbers (see `state_size`).

        So layers are compared at equal memory, as in Table 11 of Kalman Linear Attention.

        Args:
            width: D.
            state: how many numbers, whatever the length of the sequence.
            given: options that are to be kept, from which others may follow; also `heads` and `values`, how many
                columns all values have over D, for layers that keep a memory a head.

        Returns:
            Options to build the layer with, beside those given; none where no option sets the size of its belief, or
            where it grows with the sequence.

        Raises:
            ArgumentError: so many numbers cannot be divided over the slots or heads.
        """
        return {}

    @abstractmethod
    def read(
        self, x: Tensor, state: Belief | None = None, segments: Segments | None = None, variance: bool = False
    ) -> tuple[Filtered, Any]:
        """Filter `x` `[B, T, D]`: the read-out (mean and variance `[B, T, E]`, state) and the context `emit` needs."""

    @abstractmethod
    def project_out(self, readout: Tensor, context: Any) -> Tensor:
        """The output `[..., B, T, D]` of a read-out `[..., B, T, E]`: its mean, or samples of it stacked in front."""

    def project_out_variance(self, variance: Tensor, context: Any) -> Tensor:
        """The variance of the output, `[B, T, D]`, given that of the read-out, `[B, T, E]`."""
        raise NotImplementedError(f"{type(self).__name__} has no posterior")

    @abstractmethod
    def state_size(self, length: int) -> int:
        """Return how many floating-point numbers the belief of one sequence holds after `length` tokens.

        The window of a convolution and integers, such as positions, are not counted.
        """

    def write_gain(self, x: Tensor) -> Tensor | None:
        """Return the write gain of each token of `x` `[B, T, D]`, read from the prior: `[B, T]`, or `None`.

        It is the part of the variance that a token takes away of what it observes, 1 - s' / s~ with s~ the variance
        before the token and s' after it, averaged over cells or heads: 0 where the token is ignored, 1 where it is
        taken at its word. `None` where the belief has no covariance that a token could reduce.
        """
        return None

    def attention_map(self, x: Tensor) -> Tensor | None:
        """Return what each value counts for in each read-out of `x` `[B, T, D]`, read from the prior.

        For pictures: memory O(T^2).

        Returns:
            `[B, M, T, T]`, lower triangular, one map for each of M heads or channels: the weight of a token's value
            (column) in what is read at another (row). `None` where a read-out is not linear in values.
        """
        return None

    def filter(
        self,
        x: Tensor,
        state: Belief | None = None,
        segments: Segments | None = None,
        variance: bool = False,
        **timing: Tensor | None,
    ) -> Filtered:
        """All a layer knows, in output space.

        Args:
            x: `[B, T, D]` tokens.
            state: what an earlier call left, one entry a sequence; the prior if absent.
            segments: which tokens form which sequence; each batch row one sequence if absent. Tokens outside every
                sequence change nothing and give 0.
            variance: also give the marginal variance of each output, float32, where the layer has a posterior.
            when: what `read` takes beside, for layers that ask when tokens were seen.

        Returns:
            `Filtered` with mean `[B, T, D]`, variance `[B, T, D]` or `None`, and as belief the layer's state.

        Raises:
            ArgumentError: `x` or the state has another shape or type than the layer takes.
        """
        check_shape("x", x, "B T D", {"D": self.hidden_size})
        check_dtype_and_device("x", x, FLOATS, x.device)
        check_segments(segments, x.shape[0], x.shape[1], x.device)
        (mean, var, final), context = self.read(x, state, segments, variance and self.has_posterior, **timing)
        return Filtered(
            self.project_out(mean, context), None if var is None else self.project_out_variance(var, context), final
        )

    def forward(
        self, x: Tensor, state: Belief | None = None, segments: Segments | None = None, **timing: Tensor | None
    ) -> tuple[Tensor, Belief]:
        """The output `[B, T, D]` and the state after the last token; see `filter`."""
        mean, _, final = self.filter(x, state, segments, False, **timing)
        return mean, final

    def dynamics_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the latent dynamics: train them more slowly and without weight decay (appendix G.6)."""
        return iter(())


@cache
def option_types(layer: type[Mixer]) -> dict[str, Any]:
    """Return the annotations of a layer's options, by name; none where they cannot be resolved."""
    try:
        return get_type_hints(layer.__init__)
    except NameError:
        return {}


def check_state(state: Belief | None, kind: type[State], x: Tensor, segments: Segments | None) -> State | None:
    """Check that a state, if there is one, is of the layer's own kind with one entry a sequence, and return it.

    Args:
        state: what the layer was given.
        kind: its class.
        x, segments: the tokens, and which of them form which sequence; each batch row one if absent.

    Raises:
        ArgumentError: it is of another class, or for another number of sequences.
    """
    if state is None:
        return None
    sequences = x.shape[0] if segments is None else segments.count
    if not isinstance(state, kind):
        raise ArgumentError("state", got=f"a {type(state).__name__}", expected=f"a {kind.__name__}")
    leaf: Any = state
    while not isinstance(leaf, Tensor):
        leaf = leaf[-1]
    if leaf.shape[0] != sequences:
        raise ArgumentError("state", problem=f"has {leaf.shape[0]} sequences", expected=f"{sequences}, as the input")
    return state


def mask_outside(x: Tensor, segment_ids: Tensor | None) -> Tensor:
    """`x` `[B, T, D]` with 0 at tokens that belong to no sequence (`owner` `[B, T]` below 0), whatever was there."""
    return x if segment_ids is None else torch.where((segment_ids >= 0)[..., None], x, 0)
