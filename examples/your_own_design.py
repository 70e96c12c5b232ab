"""Write a new design, check it against its definition, and train it next to Gated DeltaNet.

    python examples/your_own_design.py            # about two minutes on two CPU cores
    python examples/your_own_design.py --steps 20

Gated DeltaNet's memory decays by one factor per head, and its covariance is reset at every token. This design decays
the same way, diffuses a little, and keeps its covariance, so that it writes where the memory is uncertain. The design
has these three parts; the op, its update and its kernels follow.
"""

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from transformers.utils import logging

import kalmix
from kalmix.designs import Covariance, Design, Evidence, Transition
from kalmix.training.evaluation import bits_per_byte
from kalmix.training.recipe import Recipe
from kalmix.training.run import train

FADING = Design(
    name="fading-memory",
    transition=Transition(decay="head", diffusion=True),
    evidence=Evidence(kind="memory"),
    covariance=Covariance(kind="dense"),
)


def check(design: Design, tokens: int = 12) -> float:
    """Return the largest difference between the design's op and its defining recursion on random signals."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, tokens, 2, width, generator=draw) for width in (4, 4, 6))
    positive = {name: torch.rand(2, tokens, 2, generator=draw) + 0.1 for name in design.signals}
    signals = {name: -x if name == "log_decay" else x for name, x in positive.items()}
    found = kalmix.filter(design, q, k, v, variance=True, **signals)
    exact = kalmix.oracle(design, q, k, v, variance=True, **signals)
    return max(float((a - b).abs().max()) for a, b in zip(found[:2], exact[:2], strict=True))


def learn(name: str, layer: dict, steps: int, text: str | None) -> None:
    """Train a language model of two such layers and print its bits per byte of held-out text."""
    recipe = Recipe(text=text, layers=(layer,) * 2, hidden_size=96, seq_len=128, steps=steps, vocab_size=512)
    with tempfile.TemporaryDirectory() as folder:
        run = train(recipe, Path(folder) / "run")
    weights = sum(weight.numel() for weight in run.model.parameters())
    tokens = steps * recipe.batch_size * recipe.seq_len
    bits = bits_per_byte(run.model, run.tokenizer, run.corpus.held_out, window=recipe.seq_len)
    print(
        f"{name:>16}  {weights / 1e6:5.2f} M weights  {tokens / run.seconds:7,.0f} tokens/s  {bits:.3f} bits per byte"
    )
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=250, help="training steps of each model")
    parser.add_argument("--text", help="a UTF-8 file or folder; this Python installation's documentation if absent")
    given = parser.parse_args()
    logging.disable_progress_bar()
    print(f"{FADING.name}: {FADING.transition.statement};  {FADING.evidence.statement}")
    print(f"op: {FADING.op}; update: {FADING.update}")
    print(f"difference from its definition: at most {check(FADING):.1e}\n")
    sizes = {"heads": 3, "head_dim": 32, "expand_v": 1.0}
    learn("gated-deltanet", {"mixer": "gated-deltanet", **sizes}, given.steps, given.text)
    learn(FADING.name, {"mixer": "design", "design": asdict(FADING), **sizes}, given.steps, given.text)


if __name__ == "__main__":
    main()
