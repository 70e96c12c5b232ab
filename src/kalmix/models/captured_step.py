"""Decoding steps that are captured once, in a CUDA graph, and then replayed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kalmix.errors import ArgumentError
from kalmix.layers.modules import has_global_hooks
from kalmix.models.cache_name import given_cache, with_cache
from kalmix.models.static_cache import StaticBeliefLayer
from kalmix.validation import can_check_values

UNSUPPORTED = ("inputs_embeds", "attention_mask", "labels", "shift_labels", "cu_seq_lens_q", "seq_idx")
OUTPUTS = ("output_hidden_states", "output_attentions", "output_beliefs")


class Graph(Protocol):
    """Recorder of the work of one function, which can repeat it in the same memory."""

    def capture(self, function: Callable[[], Any]) -> Any:
        """Record what a function does, without doing it; return its output, whose tensors `replay` fills."""
        ...

    def replay(self) -> None:
        """Do what was recorded, with the present contents of all tensors."""
        ...


class CudaGraph:
    """CUDA graph of one function."""

    def __init__(self) -> None:
        self.graph: torch.cuda.CUDAGraph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], Any]) -> Any:
        """Record the kernels that a function launches.

        Raises:
            RuntimeError: the function did what a graph cannot hold, such as reading a number back to the host.
        """
        try:
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # other threads may allocate memory
                return function()
        except RuntimeError:
            # A failed capture leaves the generator of random numbers in its state of capturing. Another one ends it.
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                torch.zeros(1, device="cuda")
            raise

    def replay(self) -> None:
        """Launch the recorded kernels."""
        self.graph.replay()


class CapturedStep:
    """Decoding step of a model. See `capture_decoding`, which makes it.

    The first step with a batch size and a cache runs as usual, which compiles its kernels. The second is captured and
    replayed, and later ones are replayed. Another batch size, or another cache, starts again.

    Args:
        forward: `forward` of the model.
        graph: function without arguments that returns a new `Graph`.
        automatic: whether `generate` itself asked for it. It then leaves calls alone for which a static cache or a
            capture would be a surprise or a loss.

    Attributes:
        captures: number of captures.
        replays: number of steps that ran as a replay.
        refusal: why nothing is captured; `None` if it is.
        thread: the thread whose steps are captured.
        cache: cache whose buffers the next call of `generate` uses again; `None` if there is none.
        keep_cache: whether the cache of the present call of `generate` may be used again.
    """

    def __init__(self, forward: Callable[..., Any], graph: Callable[[], Graph], automatic: bool = False) -> None:
        self.forward = forward
        self.make_graph = graph
        self.automatic = automatic
        self.thread: int = threading.get_ident()
        self.captures: int = 0
        self.replays: int = 0
        self.refusal: str | None = None
        self.cache: Cache | None = None
        self.keep_cache: bool = False
        self._key: object = None
        self._buffers: list[Any] = []  # of the cache; a list of buffers is replaced if one of them is
        self._ids: Tensor | None = None
        self._graph: Graph | None = None
        self._output: Any = None

    def refuse(self, reason: str) -> None:
        """Warn once that steps run without a graph, and capture nothing more."""
        if self.refusal is None:
            warnings.warn(f"Decoding steps are not captured: {reason}", stacklevel=3)
        self.refusal = reason
        self._graph = self._output = None

    def reuse(self, batch: int, tokens: int) -> Cache | None:
        """Return the kept cache, emptied, if it has room for `tokens` tokens of `batch` sequences."""
        cache = self.cache
        if cache is None or not _has_room(cache, batch, tokens):
            return None
        cache.reset()
        return cache

    def __call__(self, input_ids: Tensor, cache: Cache, **options: Any) -> Any:
        """Run one step.

        Args:
            input_ids: `[B, 1]`.
            cache: static cache that holds tokens.
            options: further arguments of the model.

        Returns:
            The output of the model. The next step overwrites its logits.
        """
        layers: list[Any] = cache.layers
        key = input_ids.shape, input_ids.dtype, input_ids.device, options
        buffers = [x for layer in layers for x in (layer.tensors, layer.cumulative_length)]
        same = len(buffers) == len(self._buffers) and all(map(is_, buffers, self._buffers))
        if key != self._key or not same or self._ids is None:
            self._key, self._buffers = key, buffers
            self._ids, self._graph, self._output = input_ids.clone(), None, None
            for layer in layers:
                layer.in_place = True
            return self.forward(input_ids=self._ids, **with_cache(cache, options))
        self._ids.copy_(input_ids)
        if self._graph is None:
            graph, ids = self.make_graph(), self._ids
            try:
                self._output = graph.capture(lambda: self.forward(input_ids=ids, **with_cache(cache, options)))
            except RuntimeError as error:
                self.refuse(f"the capture failed with {type(error).__name__}: {error}")
                return self.forward(input_ids=input_ids, **with_cache(cache, options))
            self._graph = graph
            self.captures += 1
        self._graph.replay()
        self.replays += 1
        return type(self._output)(**with_cache(cache, self._output))


@contextmanager
def capture_decoding(
    model: Any, graph: Callable[[], Graph] | None = None, automatic: bool = False
) -> Iterator[CapturedStep]:
    """Let `generate` use static buffers and a decoding step that is captured in a CUDA graph, over several calls.

    On a GPU, `generate` does so by itself, but captures anew in each call. Inside the context, a later call with the
    same batch size, and no more tokens than the buffers have room for, uses buffers and graph again, unless an earlier
    call has returned its cache.

    `model.generate` makes a static cache by itself and does not compile. Each decoding step is a replay of one graph;
    prefill, sampling, beam search and stopping run as usual. Layers whose op has a step (`kalmix.steps`) update the
    buffers in place; others return a state that is copied into them.

    Steps run without a graph, with a warning, if the model is not on one GPU or the process is one of several, and
    without one if a call is not a plain decoding step: with padding or other outputs than logits, and in speculative
    decoding, which removes tokens. Other threads may call the model meanwhile; their steps run as usual. The model must
    not change inside the context: its weights are read at the addresses that were captured.

    Args:
        model: `KalmixForCausalLM` in evaluation mode.
        graph: function without arguments that returns a new graph, with the methods `capture` and `replay`. Default:
            CUDA graphs.
        automatic: leave calls of `generate` alone that ask for a cache, for the returned cache, for
            `disable_compile=True` or for fewer than 8 new tokens.

    Returns:
        Context manager whose value is the `CapturedStep`, which counts captures and replays.

    Raises:
        ArgumentError: `model` has no `generate` of kalmix, or is in a context of this kind already.

    Example:
        >>> from kalmix.models import KalmixConfig, KalmixForCausalLM, capture_decoding
        >>> model = KalmixForCausalLM(KalmixConfig(vocab_size=64, hidden_size=32, layers=["kla"])).eval()
        >>> prompt = torch.randint(64, (2, 10))
        >>> with capture_decoding(model.cuda()) as step:  # doctest: +SKIP
        ...     text = model.generate(prompt.cuda(), max_new_tokens=100)
        >>> step.captures, step.replays  # doctest: +SKIP
        (1, 98)
    """
    if not hasattr(model, "decoding_step"):
        raise ArgumentError("model", got=f"a {type(model).__name__}", expected="a KalmixForCausalLM")
    if model.decoding_step is not None:
        raise ArgumentError("model", problem="is in `capture_decoding` already", expected="one context at a time")
    original, instance = model.forward, vars(model)
    before = {name: instance[name] for name in ("forward",) if name in instance}
    step = CapturedStep(original, CudaGraph if graph is None else graph, automatic)

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = {"input_ids": args[0], **kwargs} if len(args) == 1 else kwargs
        own = threading.get_ident() == step.thread
        arguments = _step_arguments(model, given) if own and len(args) < 2 and step.refusal is None else None
        return original(*args, **kwargs) if arguments is None else step(**arguments)

    if graph is None and (reason := refusal(model)) is not None:
        step.refuse(reason)
    model.forward, model.decoding_step = forward, step
    try:
        yield step
    finally:
        model.decoding_step = None
        del model.forward
        instance.update(before)


def refusal(model: Any) -> str | None:
    """Return why the steps of a model cannot be captured in a CUDA graph; `None` if they can."""
    devices = {x.device for x in model.parameters()}
    if len(devices) > 1 or len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model is on several devices"
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "the model may be divided among several processes"
    if next(iter(devices)).type != "cuda":
        return f"the model is on {next(iter(devices)).type}, and CUDA graphs need a GPU"
    return None


def has_hooks(model: Any) -> bool:
    """Return whether submodules of a model have forward hooks, which replays of a graph do not run.

    Global hooks of modules count: they are hooks of every submodule. Hooks of the model itself run, since it is called.
    Those of `enable_input_require_grads` do not count: they do nothing without gradients.
    """
    if has_global_hooks():
        return True
    ignored = {handle.id for handle in getattr(model, "_require_grads_hooks", ())}
    modules = (module for module in model.modules() if module is not model)
    return any({*module._forward_pre_hooks, *module._forward_hooks} - ignored for module in modules)


def _step_arguments(model: Any, given: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of `CapturedStep.__call__`; `None` if a call is not a plain decoding step."""
    ids, cache = given.get("input_ids"), given_cache(given)
    if not isinstance(ids, Tensor) or ids.shape[1] != 1 or not isinstance(cache, Cache):
        return None
    if model.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if ids.is_cuda and can_check_values(ids):  # inside `kalmix.checks()`
        return None
    if any(given.get(name) is not None for name in UNSUPPORTED) or any(given.get(name) for name in OUTPUTS):
        return None
    if model.config.output_hidden_states or model.config.output_attentions:
        return None
    if not all(isinstance(x, StaticBeliefLayer) and x.is_initialized for x in cache.layers):
        return None
    keep, dictionary = given.get("logits_to_keep", 0), given.get("return_dict")
    if given.get("use_cache") is False or not isinstance(keep, int) or dictionary is False or not cache.layers:
        return None
    return {"input_ids": ids, "cache": cache, "logits_to_keep": keep, "use_cache": True, "return_dict": True}


def _has_room(cache: Cache, batch: int, tokens: int) -> bool:
    """Return whether a static cache has buffers for `batch` sequences and room for `tokens` tokens."""
    layers: list[Any] = cache.layers
    return all(x.tensors and x.tensors[0].shape[0] == batch and x.max_cache_len >= tokens for x in layers)
