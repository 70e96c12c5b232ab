"""Train a model of each layer for a few hundred steps on the bytes of real text, and check for non-finite values.

    python -m kalmix_bench.perf.train_layers                     # a GPU: 100 million parameters, bfloat16 autocast
    python -m kalmix_bench.perf.train_layers --parameters 1e6 --steps 20 --layers kla   # for a CPU

Prints parameters, first and last loss, and tokens per second. Exit status 1 if a loss, a gradient or a parameter is not
finite, or the loss did not decrease.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from kalmix.errors import NonFiniteError
from kalmix.layers import MIXERS
from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.models.optimizer import optimizer_groups
from kalmix.training import corpus as text

OWN = {"design": {"design": "kda"}}  # required options of a layer


def build(mixer: str, parameters: float, width: int) -> KalmixForCausalLM:
    """Build a model with the fewest layers that have at least this many parameters."""
    entry = {"mixer": mixer, **OWN.get(mixer, {})}

    def sized(layers: int) -> KalmixForCausalLM:
        torch.manual_seed(0)
        return KalmixForCausalLM(KalmixConfig(vocab_size=256, hidden_size=width, layers=[entry] * layers))

    with torch.device("meta"):
        one, two = (sum(p.numel() for p in sized(n).parameters()) for n in (1, 2))
    return sized(max(1, -int(-(parameters - one) // (two - one)) + 1))


def batches(length: int, batch: int, device: str):
    """Yield random windows `[batch, length]` of the text, int64, endlessly."""
    corpus = "\n".join(text.load_corpus().training).encode()
    tokens = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(tokens) - length, (batch,), generator=generator)
        yield torch.stack([tokens[start : start + length] for start in starts]).long().to(device)


def train(mixer: str, arguments: argparse.Namespace) -> bool:
    """Return whether the loss of `mixer` decreased and all values stayed finite."""
    device = arguments.device
    model = build(mixer, arguments.parameters, arguments.hidden_size).to(device)
    optimizer = torch.optim.AdamW(optimizer_groups(model, learning_rate=3e-4, weight_decay=0.1), betas=(0.9, 0.95))
    data = batches(arguments.seq_len, arguments.batch_size, device)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    losses, finite, begin = [], torch.ones((), dtype=torch.bool, device=device), 0.0
    settled = min(10, arguments.steps - 1)  # steps before the clock starts
    for step in range(arguments.steps):
        if step == settled:
            finite.item()  # wait for the device
            begin = time.perf_counter()
        tokens = next(data)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, skip_logits=True).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm.step()
        optimizer.zero_grad()
        finite &= loss.isfinite() & norm.isfinite()
        losses.append(loss.detach())
    first, last = losses[0].item(), torch.stack(losses[-10:]).mean().item()
    speed = arguments.batch_size * arguments.seq_len * (arguments.steps - settled) / (time.perf_counter() - begin)
    good = bool(finite) and all(bool(p.isfinite().all()) for p in model.parameters()) and last < first
    count = sum(p.numel() for p in model.parameters())
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    print(
        f"{'ok ' if good else 'BAD'} {mixer:<17} {count / 1e6:7.1f} M  {len(model.config.layers):>3} layers  "
        f"loss {first:6.3f} -> {last:6.3f}  {speed:9,.0f} tokens/s  {memory:6.1f} GiB",
        flush=True,
    )
    return good


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    good = True
    for mixer in arguments.layers:
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            good &= train(mixer, arguments)
        except NonFiniteError as error:
            good = False
            print(f"BAD {mixer}: {error}")
    sys.exit(not good)


if __name__ == "__main__":
    main()
