"""Context parallelism: the tokens of each sequence are divided among ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from kalmix.distributed.exchange import gather, sum_over_ranks
from kalmix.distributed.layout import (
    LAYOUTS,
    KeyRuns,
    Placement,
    Runs,
    find_runs,
    order_spans,
    segments_of,
    shard_tokens,
)
from kalmix.distributed.ring import Ring
from kalmix.errors import ArgumentError
from kalmix.segments import Segments
from kalmix.validation import check_bool, check_choice

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

ATTENTION = ("gather", "ring")


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


class ContextParallel:
    """Context in which the ranks of a device mesh divide the tokens of each sequence among themselves.

    Each rank calls the model with its own tokens, `[B, T / ranks, ...]`, and gets the outputs at these tokens. Inside
    the context, layers of kalmix exchange what they need of earlier tokens. The result equals that of one process.

        with ContextParallel(mesh["cp"]) as cp:
            y, _ = layer(cp.shard(x))
            loss = (y - cp.shard(target)).square().sum()
            loss.backward()
            cp.sum_gradients(layer.parameters())

    - `shard(x, dim=1)` returns the tokens of this rank, from whole sequences that every rank has.
    - `unshard(y, dim=1)` returns whole sequences on every rank, without gradients.
    - `sum_gradients(parameters)` adds up the gradients of all ranks. Each rank has computed the gradient of the sum of
      all ranks' losses with respect to its own use of the parameters. `DistributedDataParallel` and FSDP average them
      instead: with these, multiply the loss by the number of ranks.

    Call `backward` inside the context, and run the same layers in the same order on every rank. A context can be
    entered again, in each step.
    docs/context-parallelism.md has the rules and a whole program.

    Layers whose belief has a constant size exchange one update per layer (`kalmix.updates`), and the last inputs of a
    short convolution. Attention layers exchange keys and values; see `attention`. A layer that cannot take part raises
    `RuntimeError`. A call with a `state` or `segments` raises `ArgumentError`: pass the segments of the whole sequences
    here. A layer returns the state after the last token of each run of tokens that this rank holds; with
    `attention="ring"`, layers of attention return no state.

    Args:
        mesh: one-dimensional device mesh, such as `mesh["cp"]`.
        layout: "contiguous": rank r holds the r-th part of each sequence. "head-tail": sequences are cut into 2 R parts
            for R ranks, and rank r holds parts r and 2 R - 1 - r, one after the other, so that causal attention takes
            as long on each rank.
        segments: `Segments` of the whole sequences, for packing and padding, equal on all ranks. Default: each batch
            row is one sequence.
        attention: "gather": layers of attention gather the keys and values of all ranks, so memory grows with the whole
            sequence. "ring": these travel from rank to rank, and a rank holds those of three ranks at most. Applies to
            `Attention` and to layers of the op `attend`; others gather. In a ring, `attend` has the kernel "chunked"
            only.
        two_phase: whether memories compute gradients in two phases. The updates then store nothing for the backward
            pass and have none, and the ranks exchange gradients of beliefs instead of those of updates. Kernels without
            a backward pass for the belief alone run theirs twice.

    Raises:
        ArgumentError: an argument is not of this kind, or `mesh` has several dimensions; or, in a call, the tokens of a
            rank cannot be cut as the layout asks.
        RuntimeError: a layer cannot take part, or the context is entered inside another.

    Example:
        >>> from torch import distributed
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from kalmix.distributed import ContextParallel
        >>> from kalmix.layers import KLA
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> layer, x = KLA(16), torch.randn(2, 32, 16)
        >>> with ContextParallel(init_device_mesh("cpu", (1,))) as cp:
        ...     y = cp.unshard(layer(cp.shard(x))[0])
        >>> distributed.destroy_process_group()
        >>> torch.allclose(y, layer(x)[0], atol=1e-5)
        True
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        layout: str = "contiguous",
        segments: Segments | None = None,
        attention: str = "gather",
        two_phase: bool = False,
    ) -> None:
        check_choice("layout", layout, LAYOUTS)
        check_choice("attention", attention, ATTENTION)
        check_bool("two_phase", two_phase)
        if not hasattr(mesh, "get_group") or mesh.ndim != 1:
            got = f"{mesh.ndim} dimensions" if hasattr(mesh, "ndim") else f"a {type(mesh).__name__}"
            raise ArgumentError("mesh", got=got, expected="a DeviceMesh of one dimension", hint='Try mesh["cp"]')
        if segments is not None and not isinstance(segments, Segments):
            raise ArgumentError("segments", got=f"a {type(segments).__name__}", expected="kalmix.Segments")
        self.group: ProcessGroup = mesh.get_group()
        self.placement: Placement = Placement(mesh.get_local_rank(), mesh.size(), layout)
        self.documents: list[list[int]] | None = None if segments is None else segments.rows.tolist()
        self.attention: str = attention
        self.two_phase: bool = two_phase
        opted = two_phase or attention == "ring"
        self.uncompiled: Callable[..., Any] = torch.compiler.disable(_call) if opted else _call  # imports the compiler
        self._calls: dict[tuple[int, int, torch.device, int], Call] = {}

    def __enter__(self) -> Self:
        """Make this the active context."""
        if _STATE.context is not None:
            raise RuntimeError("a ContextParallel is entered inside another; leave the first one before")
        _STATE.context = self
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the context."""
        _STATE.context = None

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the tokens of this rank, from whole sequences with tokens along `dim`."""
        return shard_tokens(x, self.placement, dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return whole sequences, from the tokens of each rank; without gradients."""
        spans = torch.stack(x.detach().chunk(self.placement.spans, dim))
        return torch.cat(order_spans(gather([spans], self.group)[0], self.placement), dim)

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace the gradient of each parameter by the sum over all ranks.

        A parameter without a gradient on some ranks counts as 0 there; one without a gradient on every rank keeps none,
        but gets zeros while a CUDA graph is captured. If a gradient is missing on this rank, the host waits for a GPU.
        """
        learned = [x for x in parameters if x.requires_grad]
        if not learned:
            return
        missing = [i for i, x in enumerate(learned) if x.grad is None]
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in learned]  # ranks send the same tensors
        counts = torch.ones(len(learned), device=learned[0].device)  # ranks that have a gradient of each parameter
        for i in missing:
            counts[i] = 0.0
        sum_over_ranks([counts, *grads], self.group)
        if not missing:
            return
        capturing = counts.is_cuda and torch.cuda.is_current_stream_capturing()  # then the host cannot wait
        present = [True] * len(learned) if capturing else counts.bool().tolist()
        for i in missing:
            learned[i].grad = grads[i] if present[i] else None

    def call(self, batch: int, length: int, device: torch.device, spans: int = 0) -> Call:
        """Return the exchange of a call with B rows of `length` tokens on this rank. For `spans`, see `in_rows`."""
        key = (batch, length, device, spans)
        if key not in self._calls:
            self._calls[key] = Call(self, *key)
        return self._calls[key]


class Call:
    """Runs of one shape of tokens, and the exchange of what they need from other ranks.

    Attributes:
        context: the context.
        placement: spans of this rank.
        segments: runs of this rank as segments; `None` if each batch row, or each span as a row, is one run.
        tails: runs that may continue in the next span, one for each span and row, as segments; `None` likewise.
        past: int64 `[N]`, number of tokens of the document before each run.
        document: int64 `[N]`, first token of the document of each run, counted in the whole sequence.
        row: int64 `[N]`, batch row of each run.
        entry: int64 `[N]`, index of the span and row of each run, in `[spans * B]`.
        starts: bool `[spans * B]`, whether the run at the end of each span begins its document.
        tail_start: int64 `[spans * B]`, first token of that run, counted in the span.
        held: int64 `[spans * B]`, index of each span among those of all ranks.
        tail_index: int64, indices in `[spans * B]` of the spans and rows that end with a run.
        tail_run: int64, index of each such run among all runs.
        all_start: whether every run begins its document: `True`, `False` if none does, `None` if some do.
        tails_start: likewise, of the runs at the ends of spans.
        same_runs: whether each span and row is one run, in the same order.
        participants: number of ops that have exchanged something for the layer that is running.
    """

    def __init__(self, context: ContextParallel, batch: int, length: int, device: torch.device, spans: int = 0) -> None:
        placement = Placement(*context.placement[:3], spans_per_part=max(spans, 1))
        _check_documents(context.documents, batch, length * placement.world)
        runs: Runs = find_runs(placement, batch, length, context.documents)
        whole = context.documents is None and (placement.spans == 1 or spans > 0)
        size = placement.span_length(length)
        self.context: ContextParallel = context
        self.placement: Placement = placement
        self.batch: int = batch
        self.length: int = length
        self.runs: Runs = runs
        self.segments: Segments | None = None if whole else segments_of(runs.every, device)
        self.tails: Segments | None = None if whole else segments_of(runs.tails, device)
        self.past: Tensor = torch.tensor([run.past for run in runs.every], device=device)
        self.document: Tensor = torch.tensor([run.document for run in runs.every], device=device)
        self.row: Tensor = torch.tensor([run.row for run in runs.every], device=device)
        self.entry: Tensor = torch.tensor([run.span * batch + run.row for run in runs.every], device=device)
        self.starts: Tensor = torch.tensor([run.past == 0 for run in runs.tails], device=device)
        self.tail_start: Tensor = torch.tensor([run.start - run.span * size for run in runs.tails], device=device)
        self.held: Tensor = torch.tensor(placement.held, device=device).repeat_interleave(batch)
        real = [run.start < run.stop for run in runs.tails]
        index = {run: i for i, run in enumerate(runs.every)}
        last = [index[run] for run, exists in zip(runs.tails, real, strict=True) if exists]
        ends = [i for i, exists in enumerate(real) if exists]
        self.tail_index: Tensor = torch.tensor(ends, dtype=torch.int64, device=device)
        self.tail_run: Tensor = torch.tensor(last, dtype=torch.int64, device=device)
        self.all_start: bool | None = _all_or_none([run.past == 0 for run in runs.every])
        self.tails_start: bool | None = _all_or_none([run.past == 0 for run in runs.tails])
        self.same_runs: bool = runs.every == runs.tails
        self.participants = 0
        self._rings: dict[int | None, Ring] = {}
        self._key_runs: KeyRuns | None = None

    def key_runs(self) -> KeyRuns:
        """Return the runs of this rank with the tokens of their documents, up to their ends, in whole sequences."""
        if self._key_runs is None:
            runs = self.runs.every
            visible = [(x.row, x.document, x.document + x.past + x.stop - x.start) for x in runs]
            self._key_runs = KeyRuns.of([(x.row, x.start, x.stop) for x in runs], visible, self.past.device)
        return self._key_runs

    def ring(self, window: int | None) -> Ring:
        """Return the ring of causal attention, in which a query attends to `window` tokens, or to all."""
        if window not in self._rings:
            context = self.context
            sizes = self.batch, self.length, context.documents, window
            self._rings[window] = Ring.of(context.group, context.placement, *sizes)
        return self._rings[window]

    def in_rows(self, spans: int) -> Call:
        """Return the exchange with so many spans per part, each of which is a batch row; see `cut`."""
        return self.context.call(self.batch, self.length, self.past.device, spans)

    def cut(self, x: Tensor) -> Tensor:
        """Return tokens `[B, T, ...]` of this rank with spans as batch rows, `[spans * B, T / spans, ...]`."""
        return x.unflatten(1, (self.placement.spans, -1)).transpose(0, 1).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """Return tokens `[B, T, ...]`, from `[spans * B, T / spans, ...]`."""
        return x.unflatten(0, (self.placement.spans, -1)).transpose(0, 1).flatten(1, 2)

    def after_parts(self, x: Tensor) -> Tensor:
        """Return the rows of the last span of each part, `[parts * B, ...]`, from `[spans * B, ...]`."""
        return x.unflatten(0, (-1, self.placement.spans_per_part, self.batch))[:, -1].flatten(0, 1)

    @property
    def sequences(self) -> int:
        """Number of runs of this rank."""
        return len(self.runs.every)

    def gather_spans(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        """Return tensors `[spans per rank * B, ...]` of all ranks, as lists over all spans of `[B, ...]`."""
        placement = self.placement
        if placement.spans == 1:
            return [list(x.unbind(0)) for x in gather(tensors, self.context.group)]
        split = [x.unflatten(0, (placement.spans, self.batch)) for x in tensors]
        return [order_spans(x, placement) for x in gather(split, self.context.group)]

    def entries(self, tensors: list[list[Tensor]]) -> list[Tensor]:
        """Return what the span before each run holds `[N, ...]`, from lists over all spans; zeros for new documents."""
        held = self.placement.held
        if self.all_start is False and self.same_runs and len(held) == 1:
            return [x[held[0] - 1] for x in tensors]
        before = [torch.cat([x[max(span - 1, 0)] for span in held])[self.entry] for x in tensors]
        return [torch.where(self._continues(x), x, 0) for x in before]

    def _continues(self, like: Tensor) -> Tensor:
        return (self.past > 0).view(-1, *[1] * (like.ndim - 1))

    def select(self, belief: Any, prior: Any) -> Any:
        """Return the belief before each run: from `[spans * B, ...]` if it continues a document, else the prior."""
        if self.all_start and self.context.two_phase:  # otherwise the backward pass must reach the gathered updates
            return prior
        if self.all_start is False and self.same_runs:
            return type(prior)(*belief)
        pairs = zip(belief, prior, strict=True)
        return type(prior)(*(torch.where(self._continues(y), x[self.entry], y) for x, y in pairs))

    def final_gradient(self, final: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of the final belief `[N, ...]` of all runs, given `[spans * B, ...]` of the last ones."""
        if self.same_runs:
            return grad
        return torch.zeros_like(final).index_add(0, self.tail_run, grad[self.tail_index])


def _check_documents(documents: list[list[int]] | None, batch: int, length: int) -> None:
    """Check that there are batch rows, and that all documents lie in `batch` rows of `length` tokens."""
    if batch == 0:
        raise ArgumentError("x", got="0 batch rows", expected="at least one inside a ContextParallel")
    row = max((row for row, _, _ in documents or ()), default=0)
    stop = max((stop for _, _, stop in documents or ()), default=0)
    if row >= batch or stop > length:
        raise ArgumentError(
            "segments",
            problem=f"extends to batch row {row} and token {stop}",
            expected=f"batch rows below {batch} and at most {length} tokens on all ranks together",
        )


def _all_or_none(flags: list[bool]) -> bool | None:
    return all(flags) if all(flags) or not any(flags) else None


class _State:
    """The active context, and the call of a layer that is running. Backward passes run in other threads."""

    context: ContextParallel | None = None
    call: Call | None = None


_STATE = _State()


def is_active() -> bool:
    """Return whether a context is active."""
    return _STATE.context is not None


def check_no_other_sequence_parallelism() -> None:
    """Check that accelerate does not divide the tokens of each sequence, outside a `ContextParallel`.

    Newer releases of accelerate refuse our models by themselves; with older ones each rank would start again.

    Raises:
        ArgumentError: accelerate's `ParallelismConfig` has `cp_size` or `sp_size` above 1.
    """
    accelerate: Any = sys.modules.get("accelerate.state")
    config = None if accelerate is None else accelerate.AcceleratorState._shared_state.get("parallelism_config")
    for name in ("cp_size", "sp_size"):
        size = 1 if config is None or is_active() else getattr(config, name, 1)
        if size is not None and size > 1:
            hint = "Use `kalmix.distributed.ContextParallel`, whose layers exchange their states"
            raise ArgumentError(name, got=f"{size} in accelerate's ParallelismConfig", expected="1", hint=hint)


def active_call() -> Call | None:
    """Return the exchange of the layer that is running; `None` without an active context.

    Raises:
        RuntimeError: a context is active, but no layer is running.
    """
    if _STATE.context is not None and _STATE.call is None:
        raise RuntimeError("inside a ContextParallel, call a layer; its other methods and ops know its own tokens only")
    return _STATE.call


def read_on_rank(
    read: Callable[..., Any],
    x: Tensor,
    state: object = None,
    segments: Segments | None = None,
    variance: bool = False,
    **timing: Any,
) -> Any:
    """Call `read` of a layer with the tokens `x` `[B, T, D]` of this rank, in an active context.

    Raises:
        ArgumentError: the layer got a state or segments.
        RuntimeError: the layer exchanged nothing.
    """
    context = _STATE.context
    assert context is not None
    if _STATE.call is not None:  # a layer inside another
        return read(x, state, segments, variance, **timing)
    if state is not None:
        raise ArgumentError("state", got=f"a {type(state).__name__}", expected="None inside a ContextParallel")
    if segments is not None:
        hint = "Pass the segments of the whole sequences to the ContextParallel"
        raise ArgumentError("segments", got="segments", expected="None inside a ContextParallel", hint=hint)
    call = context.call(x.shape[0], x.shape[1], x.device)
    call.participants = 0
    _STATE.call = call
    try:
        result = read(x, None, call.segments, variance, **timing)
    finally:
        _STATE.call = None
    if call.participants == 0:
        layer = type(getattr(read, "__self__", read)).__name__
        raise RuntimeError(f"`{layer}` cannot take part in context parallelism; it would start again on each rank")
    return result
