"""Base class of all layers, and helpers that check their arguments."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any, ClassVar, Self, TypeVar, get_type_hints

import torch
from torch import Tensor, nn

from kalmix.designs import Design
from kalmix.distributed.context import is_active, read_on_rank
from kalmix.errors import ArgumentError, any_of
from kalmix.layers.head_sizes import Heads
from kalmix.layers.step_base import SteppedLayer
from kalmix.ops import OPS
from kalmix.segments import Segments, check_segments
from kalmix.types import Belief, Filtered
from kalmix.validation import (
    FLOATS,
    check_bool,
    check_choice,
    check_dtype_and_device,
    check_positive_int,
    check_shape,
    check_types,
)

State = TypeVar("State", bound=tuple)


class Mixer(SteppedLayer):
    """Base class of sequence layers: a module that mixes tokens along time and returns its output with its state.

        y, state = layer(x)                          # training or prefill: `[B, T, D]` -> `[B, T, D]`
        y, state = layer(x, state)                   # decoding: continue from an earlier call
        y, state = layer(x, state, segments)         # packed or padded sequences

    Every call returns a pair. Splitting a sequence into several calls gives the same result as one call. x and y are in
    the dtype of the parameters; under autocast x may have another and y has that of autocast. `segments` is a
    `kalmix.Segments` of N sequences; without it, each batch row is one, and N = B. The state is an immutable pytree of
    tensors whose first axis is sequences, `[N, ...]`, with the methods `take`, `to` and `detach` of a belief (see
    `kalmix.beliefs`); `None` is the prior. `layer.filter(x, variance=True)` returns `Filtered`: y, the variance of each
    element of y (`None` if the layer has no posterior), and the state.

    Most layers need an MLP after them, as attention does. Layers with `includes_mlp = True` (`KLA`, `Mamba2`,
    `AFATransformerBlock`) contain an MLP or replace one: do not add an MLP.

    `Mixer` is abstract: build a subclass. A subclass calls `super().__init__(hidden_size)`. It implements
    `state_size(length)`, the number of floats in the state of one sequence after `length` tokens, without states of
    convolutions and integers such as positions, and two methods. `read` computes the read-out from x; `project_out`
    computes the output from the read-out:

        (mean, variance, state), context = layer.read(x, state, segments, variance)   # mean, variance: `[B, T, E]`
        y = layer.project_out(mean, context)                                          # y: `[B, T, D]`

    The argument `variance` is a bool; the result `variance` is a tensor or `None`. A layer with a posterior also
    implements `project_out_variance(variance, context)`. `context` contains what `project_out` needs beside the
    read-out, such as a gate. Under the posterior, the E elements of a read-out are independent; `project_out` mixes
    them, so those of the output are not. So to draw M samples of the output, draw samples `[M, B, T, E]` of the
    read-out and pass them to `project_out`, which returns `[M, B, T, D]`.

    Args:
        sizes: `hidden_size` only, D >= 1, the number of columns of input and output; also accepted by name.
        options: keyword arguments of the subclass.

    Raises:
        TypeError: the class is abstract; or an option, or an argument of a call, is missing or has an unknown name.
        ArgumentError: an option has the wrong type or value, or the op has no kernel of that name; or, in a call, x,
            state or segments has the wrong type, shape, dtype or device, or x is not finite (most layers check this,
            on a CPU only). A state of another layer is refused only if its class or shapes differ.
        KernelError: the requested kernel does not support the call. An unknown name is an `ArgumentError`.

    Attributes:
        design: `kalmix.designs.Design`, the specification of the filter that the layer computes; `None` if no design
            describes it.
        has_posterior: whether `filter(..., variance=True)` returns a variance; if not, its variance is `None`.
        includes_mlp: whether the layer contains an MLP or replaces one, so that no MLP should follow it.
        window: largest number of past tokens that the state stores; `None` if it stores all tokens, or no tokens but
            sums over them. Stored tokens come with a field `positions`, int64 `[N, S]` for S of them: the index of the
            token in its sequence, or -1 for an empty slot.
        repr_attributes: tuple of names of attributes that `repr` shows, beside those of every layer.

    Example:
        >>> from kalmix.layers import MIXERS
        >>> layer = MIXERS["gated-deltanet"](64, heads=2)
        >>> x = torch.randn(1, 8, 64)
        >>> y, _ = layer(x)
        >>> first, state = layer(x[:, :5])
        >>> second, _ = layer(x[:, 5:], state)
        >>> torch.allclose(torch.cat([first, second], 1), y, atol=1e-5)
        True
    """

    design: Design | None = None
    has_posterior: bool = False
    includes_mlp: ClassVar[bool] = False
    window: int | None = None
    repr_attributes: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, *sizes: object, **options: object) -> Self:
        """Check the types of options against the annotations of the layer, and the name of the kernel."""
        if missing := [name for name in dir(cls) if getattr(getattr(cls, name), "__isabstractmethod__", False)]:
            raise TypeError(f"{cls.__name__} is an abstract class; a subclass implements {', '.join(missing)}")
        check_types(option_types(cls), options)
        check_kernel(cls.design, options.get("kernel"))
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
        """Check the names and types of options, and the name of the kernel, without building a layer.

        Args:
            name: name of the layer in error messages.
            options: keyword arguments of the layer, without `hidden_size`.

        Raises:
            ArgumentError: an option is unknown, missing or of another type, or the op has no kernel of that name.
        """
        if not isinstance(options, Mapping):
            got = f"an object of type {type(options).__name__}"
            raise ArgumentError("options", got=got, expected=f"a mapping from names of options of {name!r} to values")
        known = {n: option for n, option in inspect.signature(cls).parameters.items() if n != "hidden_size"}
        for option in options:
            if option not in known:
                problem = f"is not an option of {name!r}"
                raise ArgumentError(str(option), problem=problem, expected=any_of(known) if known else "no options")
        for n, option in known.items():
            if option.default is option.empty and n not in options:
                raise ArgumentError(n, problem=f"is missing from the options of {name!r}", expected="a value")
        check_types(option_types(cls), options)
        check_kernel(cls.design, options.get("kernel"))

    @classmethod
    def options_for_state_size(cls, width: int, state: int, **options: Any) -> dict[str, Any]:
        """Return options with which the state of one sequence has `state` floating-point numbers.

        Use it to compare layers at equal memory, as Table 11 of Kalman Linear Attention does.

        Args:
            width: D.
            state: floating-point numbers in the state of one sequence; see `state_size`.
            options: options to keep; the result depends on them. Layers with a memory per head also accept `heads` and
                `values`, the total number of value columns divided by D.

        Returns:
            Further options for the layer. Empty if no option sets the size of the state, or the state grows with the
            sequence.

        Raises:
            ArgumentError: `state` is not a multiple of the number of slots or heads.
        """
        return {}

    @abstractmethod
    def read(
        self, x: Tensor, state: Belief | None = None, segments: Segments | None = None, variance: bool = False
    ) -> tuple[Filtered, Any]:
        """Filter the tokens.

        Args:
            x: tokens `[B, T, D]`.
            state: state to continue from; the prior by default.
            segments: runs of tokens that form sequences; by default each batch row is one sequence.
            variance: also return the variance of the read-out.

        Returns:
            A pair: `Filtered` with mean and variance `[B, T, E]` and the new state, and a context for `project_out`.
        """

    @abstractmethod
    def project_out(self, readout: Tensor, context: Any) -> Tensor:
        """Compute the output `[..., B, T, D]` from a read-out `[..., B, T, E]`: its mean, or a stack of samples."""

    def project_out_variance(self, variance: Tensor, context: Any) -> Tensor:
        """Compute the variance of the output, `[B, T, D]`, from the variance of the read-out, `[B, T, E]`."""
        raise NotImplementedError(f"{type(self).__name__} has no posterior")

    @abstractmethod
    def state_size(self, length: int) -> int:
        """Return the number of floating-point numbers in the state of one sequence after `length` tokens.

        States of convolutions and integers such as positions are not counted.
        """

    def flops_per_token(self, length: int) -> float:
        """Return the forward FLOPs of the recurrence per token: by default four per number of the average state."""
        return 2.0 * (self.state_size(1) + self.state_size(length))

    def write_gain(self, x: Tensor) -> Tensor | None:
        """Return the average gain with which each token is written, starting from the prior.

        The gain of a token is 1 - s' / s, where s is the variance before and s' after it. It is 0 if the filter ignores
        the token and 1 if it trusts the token completely.

        Args:
            x: tokens `[B, T, D]`.

        Returns:
            `[B, T]`, averaged over cells or heads; `None` if the layer's belief has no covariance.
        """
        return None

    def attention_map(self, x: Tensor) -> Tensor | None:
        """Return the weight of each token's value in each read-out, starting from the prior; for figures.

        Args:
            x: tokens `[B, T, D]`.

        Returns:
            `[B, M, T, T]` for M heads or channels, lower triangular, in the dtype of x or in float32: entry (i, j) is
            the weight of token j in the read-out at token i. `None` if the read-out is not linear in values. Memory:
            O(T^2).
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
        """Return the output with its variance and the state.

        Args:
            x: tokens `[B, T, D]`, in the dtype of the parameters: float64, float32, bfloat16 or float16.
            state: state that an earlier call returned, one entry per sequence; the prior by default.
            segments: runs of tokens that form sequences; by default each batch row is one sequence. Tokens outside
                every run give an output of 0 and do not change the state.
            variance: also return the marginal variance of each output, in float32 (float64 for float64 inputs), if the
                layer has a posterior (`has_posterior`).
            timing: `times` and `horizon`, for layers in continuous time; see `TrajectoryLayer.read`.

        Returns:
            `Filtered` with mean `[B, T, D]`, variance `[B, T, D]` or `None`, and the new state as `belief`.

        Raises:
            ArgumentError: an argument has the wrong type, shape, dtype or device.
            KernelError: the requested kernel does not support the call.

        Example:
            >>> from kalmix.layers import KLA
            >>> mean, variance, state = KLA(64).filter(torch.randn(2, 16, 64), variance=True)
            >>> mean.shape, variance.shape
            (torch.Size([2, 16, 64]), torch.Size([2, 16, 64]))
        """
        check_shape("x", x, "B T D", {"D": self.hidden_size})
        check_dtype_and_device("x", x, FLOATS, x.device)
        check_segments(segments, x.shape[0], x.shape[1], x.device)
        check_bool("variance", variance)
        (mean, var, final), context = self.try_read(x, state, segments, variance and self.has_posterior, **timing)
        return Filtered(
            self.project_out(mean, context), None if var is None else self.project_out_variance(var, context), final
        )

    def try_read(self, x: Tensor, *arguments: Any, **timing: Tensor | None) -> tuple[Filtered, Any]:
        """Call `read`; if PyTorch refuses the dtype or device of x, raise an `ArgumentError` about it."""
        read = partial(read_on_rank, self.read) if is_active() else self.read
        if torch.compiler.is_compiling():  # a graph must not break inside `try`
            return read(x, *arguments, **timing)
        if x.device.type == "meta" and (problem := self._misfit(x)):  # PyTorch mixes it with other devices
            raise problem
        try:
            return read(x, *arguments, **timing)
        except RuntimeError as error:
            problem = self._misfit(x)
            if problem is None or isinstance(error, torch.OutOfMemoryError):
                raise
            raise problem from None

    def _misfit(self, x: Tensor) -> ArgumentError | None:
        """Return an error about the dtype or device of x; `None` if they fit those of the layer."""
        weights = [module.weight for module in self.modules() if isinstance(module, nn.Linear)]
        weight = next((weight for weight in weights if weight.dtype in FLOATS), x)  # others are quantized
        autocast = torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)
        if x.device == weight.device and (autocast or x.dtype == weight.dtype):
            return None
        got, expected = (f"{tensor.dtype} on {tensor.device}" for tensor in (x, weight))
        return ArgumentError("x", got=got, expected=f"{expected}, as the layer", hint="Convert either")

    def forward(
        self, x: Tensor, state: Belief | None = None, segments: Segments | None = None, **timing: Tensor | None
    ) -> tuple[Tensor, Belief]:
        """Return the output and the new state.

        Args:
            x: tokens `[B, T, D]`.
            state: state that an earlier call returned; the prior by default.
            segments: runs of tokens that form sequences; by default each batch row is one sequence.
            timing: `times` and `horizon`, for layers in continuous time.

        Returns:
            The output `[B, T, D]`, and the state after the last token of each sequence.

        Raises:
            ArgumentError: an argument has the wrong type, shape, dtype or device.
        """
        mean, _, final = self.filter(x, state, segments, False, **timing)
        return mean, final

    def dynamics_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the latent dynamics (rates, steps, frequencies, noises).

        Train them with a lower learning rate and without weight decay (Kalman Linear Attention, appendix G.6).
        """
        return iter(())


@cache
def option_types(layer: type[Mixer]) -> dict[str, Any]:
    """Return the annotations of a layer's options by name; empty if they cannot be resolved."""
    try:
        return get_type_hints(layer.__init__)
    except NameError:
        return {}


def check_kernel(design: Design | None, kernel: object) -> None:
    """Check that the op of a design has a kernel of this name; `None` means that the op chooses one.

    Raises:
        ArgumentError: it has none.
    """
    if design is not None and kernel is not None:
        check_choice("kernel", kernel, [row.name for row in OPS[design.op].kernels])


def check_state(state: Belief | None, kind: type[State], x: Tensor, segments: Segments | None) -> State | None:
    """Check that a state has the class and the number of sequences that a layer expects, and return it.

    Ops check the shapes of their beliefs; a layer checks its other tensors with `check_state_tensor`.

    Args:
        state: the state passed to the layer, or `None`.
        kind: the class of its states.
        x: tokens `[B, T, D]`.
        segments: runs of tokens that form sequences, or `None`.

    Raises:
        ArgumentError: the state has another class or another number of sequences, or lacks a field.
    """
    if state is None:
        return None
    sequences = x.shape[0] if segments is None else segments.count
    if not isinstance(state, kind):
        raise ArgumentError("state", got=f"a {type(state).__name__}", expected=f"a {kind.__name__}")
    if missing := [name for name, part in zip(kind._fields, state, strict=True) if part is None]:  # pyright: ignore[reportAttributeAccessIssue]
        raise ArgumentError("state", problem=f"lacks {missing[0]}", expected=f"all fields of {kind.__name__}")
    leaf: Any = state
    while isinstance(leaf, tuple) and leaf:
        leaf = leaf[-1]
    if not isinstance(leaf, Tensor):
        raise ArgumentError("state", problem=f"contains {leaf!r}", expected="tensors")
    if leaf.ndim and leaf.shape[0] != sequences:
        raise ArgumentError("state", problem=f"has {leaf.shape[0]} sequences", expected=f"{sequences}, as the input")
    return state


def check_state_tensor(
    name: str, tensor: Tensor, layout: str, sizes: dict[str, int], dtypes: tuple[torch.dtype, ...], x: Tensor
) -> None:
    """Check one tensor of a state: its shape, its dtype, and that it is on the device of the tokens.

    Args:
        name: field of the state.
        tensor: its value.
        layout: one letter a dimension, such as "N S H K".
        sizes: sizes of the letters so far; see `check_shape`.
        dtypes: accepted dtypes.
        x: a tensor on the expected device.

    Raises:
        ArgumentError: shape, dtype or device differ.
    """
    check_shape(f"state.{name}", tensor, layout, sizes)
    check_dtype_and_device(f"state.{name}", tensor, dtypes, x.device)
