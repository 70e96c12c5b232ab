"""What a model is judged by: bits per byte of text it never saw, beside what compressors need for the same text."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kalmix import text
from kalmix.models import KalmixForCausalLM
from kalmix.training.data import stream


def bits_per_byte(
    model: KalmixForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    documents: Sequence[str],
    *,
    window: int,
    batch: int = 8,
) -> float:
    """The length of a lossless code for `documents`, in bits a byte of the documents joined by blank lines.

    Every token counts, the first and the marks between documents too, so tokenizers compare fairly. Each is
    predicted from at least half a `window` of what came before it, or from all there is.
    """
    nats = float(surprisals(model, stream(tokenizer, documents), window=window, batch=batch).double().sum())
    return text.bits_per_byte(nats, "\n\n".join(documents))


@torch.no_grad()
def surprisals(model: KalmixForCausalLM, ids: Tensor, *, window: int, batch: int = 8) -> Tensor:
    """The negative log-likelihood of each token of `ids` (int64 `[n]`) but the first, in nats, float32 `[n - 1]`.

    Windows overlap by half; a window scores its second half (the first one scores all), so the work is about two
    forward passes.
    """
    was_training = model.training
    model.eval()
    stride = max(1, window // 2)
    starts = list(range(0, max(1, len(ids) - 1 - window + stride), stride))
    scores = torch.zeros(len(ids) - 1)
    for group in (starts[at : at + batch] for at in range(0, len(starts), batch)):
        rows = [ids[start : start + window + 1] for start in group]
        longest = max(map(len, rows))
        # Padding on the right is after every token that counts, so it needs no mask.
        inputs = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows]).to(model.device)
        logits = model(input_ids=inputs[:, :-1], use_cache=False).logits.float()
        nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs[:, 1:].flatten(), reduction="none")
        for start, row, values in zip(group, rows, nats.view(len(rows), -1).cpu(), strict=True):
            skip = 0 if start == 0 else window - stride
            scores[start + skip : start + len(row) - 1] = values[skip : len(row) - 1]
    model.train(was_training)
    return scores


def compressors(documents: Sequence[str]) -> dict[str, float]:
    """Bits per byte of the documents, joined by blank lines, under `gzip -9` and `xz -9`."""
    data = "\n\n".join(documents).encode()
    packed = {"gzip -9": gzip.compress(data, 9), "xz -9": lzma.compress(data, preset=9)}
    return {name: 8 * len(code) / len(data) for name, code in packed.items()}
