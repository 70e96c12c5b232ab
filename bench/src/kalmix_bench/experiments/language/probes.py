"""Tests of a trained language model: loss by position, beyond the training length, copying, recall, and generation."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix.models import KalmixForCausalLM
from kalmix.training.shards import Shards
from kalmix_bench.runner.generation import Clock, held_bytes

LOGITS = 1 << 27  # logits computed at once
FIRST_EDGE = 16  # tokens of the first bucket of positions
COPIED = (1 / 8, 1 / 2, 2)  # lengths of the copied texts, relative to the training length
PAIRS = (4, 16, 64)
DECODE_ROWS, DECODE_TOKENS = 8, 32
_WORD = re.compile(r"Ġ[a-z]{2,}")  # a word with a space before it, in byte-level BPE
_SEED = 12345  # of the pairs


class TokenScores(NamedTuple):
    """Loss of each predicted token in nats, and whether it has the largest logit; `[B, L]` each."""

    loss: Tensor
    correct: Tensor


@torch.no_grad()
def score_tokens(model: KalmixForCausalLM, tokens: Tensor, candidates: Tensor | None = None) -> TokenScores:
    """Predict each token of `[B, L + 1]` but the first from those before it.

    Args:
        model: model in evaluation mode.
        tokens: ids.
        candidates: ids `[B, n]` to which `correct` compares the logits of a row; all tokens by default.
    """
    length, vocabulary = tokens.shape[1] - 1, model.config.vocab_size
    rows = max(1, LOGITS // (length * vocabulary))
    losses, correct = [], []
    for first in range(0, len(tokens), rows):
        ids = tokens[first : first + rows].to(model.device)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
        targets = ids[:, 1:]
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape))
        if candidates is not None:
            chosen = candidates[first : first + rows].to(model.device)
            best = logits.gather(2, chosen[:, None].expand(-1, length, -1)).argmax(2)
            correct.append(chosen.gather(1, best) == targets)
        else:
            correct.append(logits.argmax(2) == targets)
    return TokenScores(torch.cat(losses).cpu(), torch.cat(correct).cpu())


def long_documents(shards: Shards, length: int, rows: int) -> Tensor:
    """Return the first `length` tokens of up to `rows` documents that have so many: int64 `[n, length]`."""
    found = np.flatnonzero(shards.lengths(np.arange(shards.documents)) >= length)[:rows]
    tokens = [shards.read(int(document), 0, length).astype(np.int64) for document in found]
    return torch.from_numpy(np.stack(tokens)) if tokens else torch.zeros(0, length, dtype=torch.int64)


def loss_by_position(model: KalmixForCausalLM, tokens: Tensor, trained: int) -> dict[str, Any]:
    """Return the loss of long documents by position, up to the training length and beyond it.

    Args:
        model: model in evaluation mode.
        tokens: beginnings of documents, `[B, L + 1]`.
        trained: tokens of a training sequence.
    """
    if not len(tokens):
        return {"documents": 0}
    loss = score_tokens(model, tokens).loss.double().mean(0)
    edges = [0, FIRST_EDGE]
    while edges[-1] < len(loss):
        edges.append(min(2 * edges[-1], len(loss)))
    return {
        "documents": len(tokens),
        "edges": edges,
        "loss": [round(loss[begin:end].mean().item(), 5) for begin, end in pairwise(edges)],
        "trained_loss": loss[:trained].mean().item(),
        "longer_loss": loss[trained:].mean().item(),
    }


def copying(model: KalmixForCausalLM, shards: Shards, trained: int, rows: int) -> dict[str, Any]:
    """Return the loss and the accuracy of the second copy of a text that occurs twice in a row, by its length.

    The texts are the beginnings of held-out documents. "first_loss" is that of the first copy.
    """
    found = {}
    for length in (int(part * trained) for part in COPIED):
        texts = long_documents(shards, length + 1, rows)
        if len(texts):
            scores = score_tokens(model, torch.cat([texts, texts[:, 1:]], 1))
            found[str(length)] = {
                "rows": len(texts),
                "first_loss": scores.loss[:, :length].mean().item(),
                "loss": scores.loss[:, length:].mean().item(),
                "accuracy": scores.correct[:, length:].float().mean().item(),
            }
    return found


class Pairs(NamedTuple):
    """Lists of pairs of words, followed by each key again with its value.

    Attributes:
        tokens: ids `[B, L + 1]`.
        values: ids of the values `[B, n]`.
        scored: positions among L of the values behind the repeated keys, `[n]`.
    """

    tokens: Tensor
    values: Tensor
    scored: Tensor


def draw_pairs(tokenizer: Any, bos: int, pairs: int, rows: int) -> Pairs | None:
    """Draw lines such as " filter = noise" with different words, then the same lines in another order.

    Returns:
        `None` if the tokenizer has too few words, each of one token.
    """
    words = np.array(sorted(index for word, index in tokenizer.get_vocab().items() if _WORD.fullmatch(word)))
    if len(words) < 2 * pairs:
        return None
    encode = [tokenizer.encode(text, add_special_tokens=False) for text in (" =", "\n")]
    between, end = (np.tile(np.array(ids), (pairs, 1)) for ids in encode)
    draw, lines, values = np.random.default_rng(_SEED), [], []
    for _ in range(rows):
        key, value = draw.choice(words, (2, pairs), replace=False)
        once = np.concatenate([key[:, None], between, value[:, None], end], 1)
        lines.append(np.concatenate([[bos], once.ravel(), draw.permutation(once).ravel()]))
        values.append(value)
    line = 2 + between.shape[1] + end.shape[1]
    scored = (pairs + np.arange(pairs)) * line + 1 + between.shape[1]
    return Pairs(torch.from_numpy(np.stack(lines)), torch.from_numpy(np.stack(values)), torch.from_numpy(scored))


def recall(model: KalmixForCausalLM, tokenizer: Any, bos: int, trained: int, rows: int) -> dict[str, Any]:
    """Return the accuracy of values behind repeated keys, among all tokens and among the row's values, by the number
    of pairs. Rows longer than the training length are left out.
    """
    found = {}
    for count in PAIRS:
        pairs = draw_pairs(tokenizer, bos, count, rows)
        if pairs is not None and pairs.tokens.shape[1] <= trained + 1:
            scores = score_tokens(model, pairs.tokens)
            among = score_tokens(model, pairs.tokens, pairs.values)
            found[str(count)] = {
                "accuracy": scores.correct[:, pairs.scored].float().mean().item(),
                "choice": among.correct[:, pairs.scored].float().mean().item(),
                "loss": scores.loss[:, pairs.scored].mean().item(),
            }
    return found


def decoding(model: KalmixForCausalLM, prompts: Tensor, lengths: Sequence[int]) -> dict[str, Any]:
    """Return the milliseconds of a generated token for a batch of prompts, and the bytes of state of a sequence.

    Args:
        model: model in evaluation mode.
        prompts: ids `[B, L]`, at least as long as the longest of `lengths`; the prompts have the first length.
        lengths: numbers of tokens after which the state is measured.
    """
    if not len(prompts):
        return {}
    prompts, clock = prompts.to(model.device), Clock()
    batch = prompts[:DECODE_ROWS, : lengths[0]]
    generate: Any = model.generate  # pyright: ignore[reportAttributeAccessIssue]
    generate(
        batch,
        attention_mask=torch.ones_like(batch),
        max_new_tokens=DECODE_TOKENS,
        min_new_tokens=DECODE_TOKENS,
        do_sample=False,
        use_cache=True,
        streamer=clock,
        pad_token_id=0,
    )
    _, *tokens = (1e3 * (after - before) for before, after in pairwise(clock.times))
    state = {}
    with torch.no_grad():
        for length in lengths:
            cache = model(input_ids=prompts[:1, :length], use_cache=True).cache
            state[str(length)] = held_bytes(cache)
    return {"decode_rows": len(batch), "decode_ms": statistics.median(tokens), "state_bytes": state}
