"""Time and memory of a loss under a large vocabulary: with all logits, and with those of a chunk of tokens.

    python -m kalmix_bench.perf.head_loss                       # 8 x 4,096 tokens and 50,257 words, on a GPU
    python -m kalmix_bench.perf.head_loss --batch 1 --tokens 256 --vocab-size 1000 --device cpu

Prints a row for each way, and writes all rows to <output>/<date>-<hardware>-head-loss.json. A step is the loss and its
gradients of the hidden states and the head, under bfloat16 autocast on a GPU. Wall times are medians. `peak` is memory
beyond hidden states and head; `error` is the largest difference of a gradient from that with all logits in float64, on
the first 512 tokens, as a fraction of its largest element.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix.layers.fused import linear_cross_entropy, linear_nll
from kalmix.models.losses import cap_logits
from kalmix_bench.perf.layer_steps import measure
from kalmix_bench.perf.result_file import write_rows

CAP = 15.0
CHECKED = 512  # tokens compared with float64
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def all_logits(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None = None) -> Tensor:
    """Compute the mean loss as transformers does: float32 logits of all tokens."""
    logits = cap_logits(F.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32)), cap)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def mean_nll(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None = None) -> Tensor:
    """Compute the mean of `linear_nll`."""
    return linear_nll(hidden, weight, targets, cap=cap).mean()


WAYS: dict[str, tuple[Loss, Loss]] = {  # the loss, and the one with all logits that it is compared with
    "all logits": (all_logits, all_logits),
    "linear_cross_entropy": (linear_cross_entropy, all_logits),
    "linear_nll": (mean_nll, all_logits),
    "all logits, cap": (partial(all_logits, cap=CAP), partial(all_logits, cap=CAP)),
    "linear_nll, cap": (partial(mean_nll, cap=CAP), partial(all_logits, cap=CAP)),
}


def gradients(loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of hidden states and head."""
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    return torch.autograd.grad(loss(leaves[0], leaves[1], targets), leaves)


def error(way: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> float:
    """Return the error of a way's gradients on the first tokens."""
    few, few_targets = hidden.detach().flatten(0, 1)[None, :CHECKED], targets.flatten()[None, :CHECKED]
    loss, exact = WAYS[way]
    with torch.autocast(few.device.type, torch.bfloat16, enabled=few.is_cuda):
        found = gradients(loss, few, weight, few_targets)
    expected = gradients(exact, few.double(), weight.double(), few_targets)
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=50_257)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--commit", help="commit for the rows, where git is absent")
    arguments = parser.parse_args()
    device, rows = torch.device(arguments.device), []
    torch.manual_seed(0)
    size = (arguments.batch, arguments.tokens)
    hidden = torch.randn(*size, arguments.hidden_size, device=device, requires_grad=True)
    weight = torch.nn.Parameter(0.02 * torch.randn(arguments.vocab_size, arguments.hidden_size, device=device))
    targets = torch.randint(arguments.vocab_size, size, device=device)
    for way, (loss, _) in WAYS.items():

        def step(loss: Loss = loss) -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                value = loss(hidden, weight, targets)
            value.backward()
            hidden.grad = weight.grad = None

        found = measure(step, device, arguments.repeats)
        rows.append({"way": way} | found | {"error": error(way, hidden, weight, targets)})
        print(rows[-1], flush=True)
    write_rows(rows, device, "head-loss", arguments)


if __name__ == "__main__":
    main()
