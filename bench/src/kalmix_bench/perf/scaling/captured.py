"""Compare all parameters after equal numbers of training steps in a CUDA graph and of ordinary steps.

    torchrun --nproc-per-node 2 -m kalmix_bench.perf.scaling.captured --models gated-deltanet-340m

Ordinary steps are taken twice. Where the two differ, kernels add in another order each time, and the captured steps may
differ from the first by up to four times as much. Exits with 1 if they differ by more.
"""

from __future__ import annotations

import argparse
import math
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kalmix_bench.perf.scaling.group import Ranks, end_process, process_group
from kalmix_bench.perf.scaling.step import BEFORE_CAPTURE, METHODS, Cell, Run, release, synchronize

AFTER, LIMIT = 5, 300.0  # steps after the capture; seconds of a collective


def train(cell: Cell, ranks: Ranks) -> list[Tensor]:
    """Return the parameters after `1 + BEFORE_CAPTURE + AFTER` steps, on this rank, in host memory."""
    with torch.cuda.stream(torch.cuda.Stream()) if cell.captured else nullcontext():
        run = Run(cell, ranks.device)
        run.step()
        if cell.captured:
            run.capture()
        for _ in range(AFTER if cell.captured else BEFORE_CAPTURE + AFTER):
            run.step()
        synchronize(ranks.device)
        found = [p.to_local() if isinstance(p, DTensor) else p for p in run.model.parameters()]
        copies = [p.detach().to("cpu", copy=True) for p in found]
    del run
    release(ranks.device)
    ranks.wait()
    return copies


def difference(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest relative difference of two tensors of the same parameter; infinite if one is not finite."""
    norms = [(float((x - y).norm()), float(x.norm())) for x, y in zip(first, second, strict=True)]
    if not all(math.isfinite(change) for change, _ in norms):
        return math.inf
    return max(change / max(size, 1e-12) for change, size in norms)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gated-deltanet-340m,kla-340m", help="models, separated by commas")
    parser.add_argument("--method", default="context two-phase", choices=METHODS, help="method of all models")
    parser.add_argument("--length", type=int, default=16384, help="tokens of a sequence")
    parser.add_argument("--compiled", action="store_true", help="compile each block with torch.compile")
    arguments = parser.parse_args()
    wrong = 0
    with process_group(LIMIT) as ranks:
        for name in arguments.models.split(","):
            cell = Cell(name, arguments.method, 1, arguments.length, arguments.compiled)
            ordinary, again = train(cell, ranks), train(cell, ranks)
            captured = train(cell._replace(captured=True), ranks)
            pairs = ranks.collect((difference(ordinary, captured), difference(ordinary, again)))
            change, noise = (max(x) for x in zip(*pairs, strict=True))
            right = change <= 4 * noise < math.inf
            wrong += not right
            if ranks.rank == 0:
                state = "right" if right else "WRONG"
                print(f"{name}, {arguments.method}: captured {change:.2e}, repeated {noise:.2e}: {state}", flush=True)
        return int(wrong > 0)


if __name__ == "__main__":
    end_process(main())
