"""Independent work of a decoding step, which a CUDA graph runs at the same time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

_IDLE: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)  # side streams not in use
_TAKEN: ContextVar[list[torch.cuda.Stream] | None] = ContextVar("taken", default=None)  # by the outermost call


def run_branches(device: torch.device, *functions: Callable[[], Any]) -> list[Any]:
    """Call functions that do not depend on each other, and return their results.

    While a CUDA graph is captured without gradients, each function becomes a branch of the graph: at batch 64 or less a
    kernel of a decoding step fills only a part of a GPU, so that branches run at the same time. Elsewhere the functions
    run one after another. The kernels and their results are the same. A function may call `run_branches` again.

    Args:
        device: device of the functions' tensors.
        functions: functions without arguments. One must not modify a tensor that another reads or writes.
    """
    if not _captures(device):
        return [function() for function in functions]
    main, streams, outer = torch.cuda.current_stream(device), [], _TAKEN.get()
    taken = [] if outer is None else outer
    token = _TAKEN.set(taken)
    results: list[Any] = [None] * len(functions)
    try:
        # The caching allocator lets a stream reuse memory that it has allocated, as soon as the host frees it. A side
        # stream has waited for all uses of such memory before the fork, but not for the work that the present stream
        # launches after it. So launch the side streams first.
        for index, function in enumerate(functions[1:], 1):
            streams.append(_IDLE[device].pop() if _IDLE[device] else torch.cuda.Stream(device))
            taken.append(streams[-1])
            streams[-1].wait_stream(main)
            with torch.cuda.stream(streams[-1]):
                results[index] = function()
        results[0] = functions[0]()
    finally:  # a capture that fails must not leave open branches
        _TAKEN.reset(token)
        for stream in streams:
            main.wait_stream(stream)
        if outer is None:  # until then, another branch must not take a stream whose memory a branch may still read
            _IDLE[device].extend(reversed(taken))  # later calls take the same ones; cuBLAS has a workspace for each
    return results


def _captures(device: torch.device) -> bool:
    """Return whether the work of this thread is captured in a CUDA graph, without gradients."""
    if device.type != "cuda" or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    return torch.cuda.is_current_stream_capturing()
