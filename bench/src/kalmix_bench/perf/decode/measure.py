"""Time, launches and memory of the tokens that a model generates."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from kalmix.models import capture_decoding
from kalmix.models.cache_name import cache_of
from kalmix.models.captured_step import CudaGraph
from kalmix_bench.perf.decode.protocol import DecodeCell
from kalmix_bench.perf.host_lock import call_or_repeat_alone, hold
from kalmix_bench.perf.models.build import build
from kalmix_bench.perf.peers import has_fla
from kalmix_bench.perf.row_status import row_or_reason
from kalmix_bench.perf.text_batches import batches, word_tokens
from kalmix_bench.perf.timing import Launches, Recording
from kalmix_bench.runner.generation import Clock, held_bytes

PROFILED = 5  # token of which launches are counted; the profiler starts before it
COPIED = 1 << 30  # bytes that measure the bandwidth of memory


def measure_row(
    cell: DecodeCell, device: torch.device, on_prepared: Callable[[], None], limit: float
) -> dict[str, Any]:
    """Return the measurements of a row; or, as its "status" and "reason", why there are none.

    Args:
        cell: model, cache, batch and prompt.
        device: device of the model.
        on_prepared: called after the first generation, which compiles; may raise `CellStopped`.
        limit: seconds after which the row is given up.
    """
    return row_or_reason(lambda: _measure(cell, device, on_prepared), limit)


def _measure(cell: DecodeCell, device: torch.device, on_prepared: Callable[[], None]) -> dict[str, Any]:
    tuned = cell.model.startswith("fla") and has_fla()
    with hold(alone=tuned):
        model = inference_model(cell, device)
        prompt = next(batches(word_tokens(cell.size.vocab_size), cell.size.seq_len, cell.size.batch_size, str(device)))
    first = call_or_repeat_alone(partial(_seconds, model, prompt, cell), partial(_collect, device), alone=tuned)
    _collect(device)
    on_prepared()
    with hold(alone=True):
        return {
            "status": "ok",
            "layers": model.config.num_hidden_layers,
            "parameters": sum(p.numel() for p in model.parameters()),
            "first_s": first,
            **_tokens(model, prompt, cell),
        }


def _seconds(model: nn.Module, prompt: Tensor, cell: DecodeCell) -> float:
    """Generate tokens; return the seconds."""
    begin = time.perf_counter()
    generate(model, prompt, cell)
    return time.perf_counter() - begin


def inference_model(cell: DecodeCell, device: torch.device) -> nn.Module:
    """Build a model with weights in the dtype of the row, but for those that the model keeps in float32."""
    with device:
        model = build(cell.model, cell.size).eval()
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in model.named_parameters():
        if not kept & set(name.split(".")):
            parameter.data = parameter.data.to(getattr(torch, cell.size.dtype))
    model.config.use_cache = model.generation_config.use_cache = True  # pyright: ignore
    return model


class TimedGraph(CudaGraph):
    """CUDA graph that measures its replays.

    Args:
        replays: list to which each replay adds its events of begin and end.
    """

    def __init__(self, replays: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        super().__init__()
        self.replays = replays

    def replay(self) -> None:
        """Launch the recorded kernels between two events."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        super().replay()
        end.record()
        self.replays.append((begin, end))


def generate(
    model: Any, prompt: Tensor, cell: DecodeCell, clock: Clock | None = None, graph: Callable[[], Any] | None = None
) -> Any:
    """Continue the prompts greedily by `cell.steps` tokens; return transformers' output with its cache.

    Args:
        model: model in evaluation mode.
        prompt: tokens `[B, T]`.
        cell: cache, and number of tokens.
        clock: clock of the tokens.
        graph: maker of the graph of captured steps. Default: CUDA graphs.
    """
    tokens = {"max_new_tokens": cell.steps, "min_new_tokens": cell.steps, "do_sample": False}
    with _captured(model, graph) if cell.mode == "captured" else nullcontext():
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            cache_implementation="static" if cell.mode == "static" else None,
            streamer=clock or Clock(),
            return_dict_in_generate=True,
            pad_token_id=0,
            **tokens,
        )


@contextmanager
def _captured(model: Any, graph: Callable[[], Any] | None) -> Iterator[None]:
    """Capture decoding steps; raise the warning of `capture_decoding` as an error if they cannot be captured."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Decoding steps are not captured")
        with capture_decoding(model, graph):
            yield


def _tokens(model: nn.Module, prompt: Tensor, cell: DecodeCell) -> dict[str, Any]:
    cuda = prompt.is_cuda
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if cuda else 0
    clock, replays = Clock(), []
    output = generate(model, prompt, cell, clock, partial(TimedGraph, replays) if cuda else None)
    peak = torch.cuda.max_memory_allocated() - held if cuda else None
    state = held_bytes(cache_of(output))
    del output
    prefill, *tokens = (1e3 * (after - before) for before, after in pairwise(clock.times))
    ms = statistics.median(tokens)
    found = {
        "ms": ms,
        "times_ms": [round(x, 3) for x in tokens],
        "prefill_ms": prefill,
        "tokens_per_s": 1e3 * cell.size.batch_size / ms,
        "state_bytes": state // cell.size.batch_size,
        "weight_bytes": weights,
        "extra_memory": peak,  # above the weights, in the whole generation
    }
    if not cuda:
        return found
    if replays:
        found["replay_ms"] = statistics.median(begin.elapsed_time(end) for begin, end in replays)
    launches = _profile(model, prompt, cell)
    moved = (weights + 2 * state) / _bandwidth(prompt.device)
    return found | launches._asdict() | {"memory_ms": 1e3 * moved}


def _profile(model: nn.Module, prompt: Tensor, cell: DecodeCell) -> Launches:
    """Return the launches of one token."""
    recording, found = Recording(), []

    def on_token(token: int) -> None:
        if token == PROFILED - 1:
            recording.start()
        elif token == PROFILED:
            found.append(recording.stop())

    generate(model, prompt, cell, Clock(on_token))
    return found[0]


def _bandwidth(device: torch.device) -> float:
    """Return the bytes per second, read and written, of a copy on a GPU."""
    source = torch.empty(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * COPIED / statistics.median(times)


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
