"""Evaluation of a finished run: bits per byte of held-out text, and of the same text under common compressors."""

from __future__ import annotations

import gzip
import json
import lzma
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kalmix._extras import optional_imports

with optional_imports():
    from transformers import PreTrainedTokenizerFast

from kalmix.errors import ArgumentError
from kalmix.files import write_text
from kalmix.models import KalmixForCausalLM
from kalmix.training import corpus as text
from kalmix.training.data import encode_documents
from kalmix.training.provenance import provenance
from kalmix.training.recipe import Recipe
from kalmix.training.run import Run
from kalmix.training.sampling import generate
from kalmix.validation import check_positive_int

RESULT_FILE = "result.json"
EXCERPT_CHARS = 200  # held-out text in figures
ProgressFn = Callable[[str, float], None]  # name of the current stage, and the fraction of it that is done


@dataclass(frozen=True)
class EvaluationResult:
    """Evaluation of a finished run, as result.json stores it.

    Attributes:
        bits_per_byte: bits per byte of the held-out text under the model.
        warning: reason why these numbers are not meaningful; `None` if they are.
        bytes: length of the held-out text in UTF-8.
        compressors: bits per byte of the same text, by name of the compressor.
        steps: training steps.
        tokens: training tokens seen.
        prompt: beginning of a held-out document.
        sample: continuation of the prompt by the model.
        provenance: versions, device and commit that evaluated the run.
    """

    bits_per_byte: float
    warning: str | None
    bytes: int
    compressors: dict[str, float]
    steps: int
    tokens: int
    prompt: str
    sample: str
    provenance: dict[str, Any]

    def save(self, folder: Path) -> Path:
        """Write result.json into `folder`, replacing an older one atomically; return its path."""
        write_text(folder / RESULT_FILE, json.dumps(asdict(self), indent=2) + "\n")
        return folder / RESULT_FILE


def evaluate(run: Run, progress: ProgressFn = lambda stage, done: None) -> EvaluationResult:
    """Evaluate the model of a run on its held-out text, as `kalmix report` does.

    The held-out text is `run.corpus.held_out`: documents that neither the tokenizer nor the model has seen. The result
    contains the bits per byte of the model and of the compressors gzip and xz, and a text that the model generates. It
    is the same at each call on one machine; `provenance` may differ. A model that was trained under bfloat16 autocast
    is evaluated under it.

    Args:
        run: run that has ended, as `train` returns it. A run that was interrupted is evaluated as it is.
        progress: called as `progress(stage, fraction)` with the name of the current stage, a string, and the fraction
            of it that is done, 0 to 1. Default: does nothing.

    Returns:
        The result, see `EvaluationResult`. It is not saved to disk; `EvaluationResult.save` does that.

    Raises:
        ArgumentError: `run` is not a `Run`, or `progress` cannot be called.

    Example:
        >>> from pathlib import Path
        >>> from kalmix.training import Recipe
        >>> from kalmix.training.evaluation import evaluate
        >>> from kalmix.training.run import train
        >>> Path("corpus").mkdir()
        >>> for n in range(20):
        ...     _ = Path(f"corpus/{n}.txt").write_text(f"Document {n}: " + "a filter is a recurrence. " * 9)
        >>> sizes = {"vocab_size": 260, "hidden_size": 8, "seq_len": 16, "batch_size": 2}
        >>> result = evaluate(train(Recipe(text="corpus", layers=("kla",), steps=2, **sizes), Path("run")))
        >>> result.steps, result.bits_per_byte > 3  # 2 steps teach it nothing
        (2, True)
    """
    if not isinstance(run, Run):
        raise ArgumentError("run", got=f"a {type(run).__name__}", expected="a Run, as `train` returns it")
    if not callable(progress):
        raise ArgumentError("progress", got=f"a {type(progress).__name__}", expected="a function of stage and fraction")
    recipe, device, documents = run.recipe, run.model.device, run.corpus.held_out
    with torch.autocast(device.type, torch.bfloat16, enabled=recipe.bf16):
        score = bits_per_byte(
            run.model,
            run.tokenizer,
            documents,
            window=recipe.seq_len,
            batch_size=recipe.batch_size,
            progress=lambda done: progress("reading the held-out text", done),
        )
        progress("compressing the held-out text", 0)
        compressed = compressor_bits_per_byte(documents)
        progress("writing a sample", 0)
        prompt = excerpt(documents).split("\n")[0][:60]
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            sample = generate(run.model, run.tokenizer, prompt, max_new_tokens=160, temperature=0.7)
    return EvaluationResult(
        bits_per_byte=score,
        warning=short_run_warning(recipe, run.steps),
        bytes=len(run.corpus.held_out_text.encode()),
        compressors=compressed,
        steps=run.steps,
        tokens=int(run.history[-1]["tokens"]),
        prompt=prompt,
        sample=sample,
        provenance=provenance(device),
    )


def short_run_warning(recipe: Recipe, steps: int) -> str | None:
    """Return a warning if a run was too short to be meaningful, otherwise `None`.

    A run that its time limit ends must have taken at least the steps of its warm-up: the fraction `warmup` of
    `recipe.steps`, and at least 1 / `warmup` steps.

    Args:
        recipe: recipe of the run.
        steps: training steps it has taken.
    """
    if recipe.minutes is None or (recipe.steps is not None and steps >= recipe.steps):
        return None
    planned = recipe.warmup * (recipe.steps or 0)
    needed = math.ceil(max(planned, 1 / recipe.warmup if recipe.warmup else 1))
    if steps >= needed:
        return None
    return (
        f"the time budget of {recipe.minutes:g} minutes allowed {steps} training steps, fewer than the {needed} that a "
        f"warm-up of {100 * recipe.warmup:g}% of the run needs: the result is not meaningful. Train for longer."
    )


def excerpt(documents: Sequence[str]) -> str:
    """Return the beginning of the longest document."""
    return max(documents, key=len).strip()[:EXCERPT_CHARS]


def bits_per_byte(
    model: KalmixForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    documents: Sequence[str],
    *,
    window: int,
    batch_size: int = 8,
    progress: Callable[[float], None] = lambda done: None,
) -> float:
    """Return the bits per byte of documents under a model: the length of a lossless code, divided by their bytes.

    The length is the sum of -log2 p over all tokens. Each document is preceded by an end-of-text token, so the model
    predicts the first token of a document as well; all tokens count but the first end-of-text token. The bytes are the
    UTF-8 bytes of the documents joined by two newlines. So values of different tokenizers are comparable; smaller is
    better.

    Args:
        model: model to evaluate, in evaluation mode; its own mode is restored.
        tokenizer: its tokenizer, with the token `<|endoftext|>`, such as `Run.tokenizer`.
        documents: texts, a list or tuple of strings.
        window: tokens per window, >= 1. Windows overlap by half, so each token is predicted from at least half a window
            of earlier tokens, or from all there are.
        batch_size: windows per forward pass, >= 1.
        progress: called with the fraction that is done, 0 to 1. Default: does nothing.

    Returns:
        A number >= 0.

    Raises:
        ArgumentError: an argument has another type, `documents` contains no text, `window` or `batch_size` is not a
            positive integer, or the tokenizer has no end-of-text token or more tokens than the model.

    Example:
        >>> from kalmix.models import KalmixConfig, KalmixForCausalLM
        >>> from kalmix.training.corpus import train_tokenizer
        >>> from kalmix.training.data import wrap_tokenizer
        >>> from kalmix.training.evaluation import bits_per_byte
        >>> tokenizer = wrap_tokenizer(train_tokenizer(["a filter"], "bytes"))
        >>> model = KalmixForCausalLM(KalmixConfig(vocab_size=257, hidden_size=8, layers=["kla"])).eval()
        >>> bits = bits_per_byte(model, tokenizer, ["a filter predicts"], window=8)
        >>> 7 < bits < 10  # an untrained model needs about log2(257) bits for each byte
        True
    """
    if not isinstance(model, KalmixForCausalLM):
        raise ArgumentError("model", got=f"a {type(model).__name__}", expected="a KalmixForCausalLM")
    if not isinstance(documents, list | tuple) or not all(isinstance(x, str) for x in documents):
        raise ArgumentError("documents", got=f"a {type(documents).__name__}", expected="a list of strings")
    if not any(documents):
        raise ArgumentError("documents", got="empty", expected="at least one document that is not empty")
    check_positive_int("window", window)
    check_positive_int("batch_size", batch_size)
    ids = encode_documents(tokenizer, documents)
    if int(ids.max()) >= model.config.vocab_size:
        expected = f"tokens below {model.config.vocab_size}, the vocabulary of the model"
        raise ArgumentError("tokenizer", problem=f"has a token {int(ids.max())}", expected=expected)
    nats = float(surprisals(model, ids, window=window, batch_size=batch_size, progress=progress).double().sum())
    return text.nats_to_bits_per_byte(nats, "\n\n".join(documents))


@torch.no_grad()
def surprisals(
    model: KalmixForCausalLM,
    ids: Tensor,
    *,
    window: int,
    batch_size: int = 8,
    progress: Callable[[float], None] = lambda done: None,
) -> Tensor:
    """Compute the negative log-likelihood of each token but the first.

    Windows overlap by half. The first window scores all its tokens, the others their second half. So each token is
    predicted from at least half a window of earlier tokens, or from all there are. The cost is about two forward passes
    over the text.

    Args:
        model: model to evaluate; its training mode is restored.
        ids: int64 `[n]`, tokens.
        window: tokens per window.
        batch_size: windows per forward pass.
        progress: called with the fraction that is done, 0 to 1.

    Returns:
        float32 `[n - 1]` on the CPU, in nats.
    """
    was_training = model.training
    model.eval()
    stride = max(1, window // 2)
    starts = list(range(0, max(1, len(ids) - 1 - window + stride), stride))
    scores = torch.zeros(len(ids) - 1)
    for first in range(0, len(starts), batch_size):
        progress(first / len(starts))
        group = starts[first : first + batch_size]
        rows = [ids[start : start + window + 1] for start in group]
        longest = max(map(len, rows))
        # Padding on the right comes after every scored token, so it needs no mask.
        inputs = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows]).to(model.device)
        logits = model(input_ids=inputs[:, :-1], use_cache=False).logits.float()
        nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs[:, 1:].flatten(), reduction="none")
        for start, row, values in zip(group, rows, nats.view(len(rows), -1).cpu(), strict=True):
            skip = 0 if start == 0 else window - stride
            scores[start + skip : start + len(row) - 1] = values[skip : len(row) - 1]
    model.train(was_training)
    progress(1.0)
    return scores


def compressor_bits_per_byte(documents: Sequence[str]) -> dict[str, float]:
    """Return bits per byte of the documents, joined by blank lines, under `gzip -9` and `xz -9`."""
    data = "\n\n".join(documents).encode()
    packed = {"gzip -9": gzip.compress(data, 9), "xz -9": lzma.compress(data, preset=9)}
    return {name: 8 * len(code) / len(data) for name, code in packed.items()}
