"""Perplexity of a text by length of the context, in windows that do not overlap."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix.evaluation.ranks import ALONE, Ranks
from kalmix.evaluation.suites import PERPLEXITY_LENGTHS
from kalmix.models import KalmixForCausalLM
from kalmix.training.corpus import read_documents
from kalmix.training.model_folder import ModelFolder
from kalmix.training.shards import Shards
from kalmix.training.shards.manifest import MANIFEST

PIECE = 4096  # tokens of a window that are computed at once; the cache carries the states on


class HeldOutText(NamedTuple):
    """Tokens to compute a perplexity of.

    Attributes:
        ids: int64 `[n]`, a whole number of windows of the longest length.
        lengths: lengths of windows, in tokens.
    """

    ids: Tensor
    lengths: tuple[int, ...]

    @property
    def sha256(self) -> str:
        """Hash of the tokens."""
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()


def read_text(
    path: Path, tokenizer: Any, folder: ModelFolder, lengths: Sequence[int] = (), limit: int | None = None
) -> HeldOutText:
    """Read the text of a perplexity: documents one after the other, each after the token that begins documents.

    All lengths read the same tokens: as many windows of the longest length as the text has.

    Args:
        path: folder of token shards, whose held-out documents are read; or a text file, or a folder with text files.
        tokenizer: tokenizer that begins a text with that token, see `begin_with`.
        folder: folders of the model, with tokenizer.json and config.json.
        lengths: lengths in tokens. Default: those from 2K to 128K that the text has.
        limit: largest number of windows of the longest length.

    Raises:
        ArgumentError: there is no text, it is shorter than a length, or shards have another tokenizer or begin
            documents with another token.
    """
    shards, stream = None, torch.empty(0, dtype=torch.int64)
    if (path / MANIFEST).is_file():
        shards = Shards(path, "held_out")
        own = hashlib.sha256((folder.tokenizer / "tokenizer.json").read_bytes()).hexdigest()
        if shards.manifest.tokenizer_sha256 != own:
            raise ArgumentError("text", got=f"{str(path)!r}, shards of another tokenizer", expected="the model's")
        begin = shards.manifest.other_begin(folder.weights)
        if begin is not None:
            got = f"{str(path)!r}, shards whose documents begin with another token"
            raise ArgumentError("text", got=got, expected=f"the model's, {begin} (`kalmix data prepare --bos`)")
        total = shards.tokens
    else:
        encoded = tokenizer(list(read_documents(path).values()), return_attention_mask=False)["input_ids"]
        stream = torch.tensor([token for ids in encoded for token in ids])
        total = len(stream)
    chosen = tuple(sorted(set(lengths))) or tuple(n for n in PERPLEXITY_LENGTHS if n <= total)
    shortest = min(chosen, default=PERPLEXITY_LENGTHS[0])
    longest = max(chosen, default=shortest)
    if longest > total:
        got = f"{str(path)!r}, which has {total:,} tokens"
        raise ArgumentError("text", got=got, expected=f"at least {longest:,} tokens, the longest length")
    used = longest * min(total // longest, limit or total)
    if shards is not None:
        stream = torch.from_numpy(shards.window(0, used).astype("int64"))
    return HeldOutText(stream[:used], chosen)


@torch.no_grad()
def perplexity(
    model: KalmixForCausalLM,
    text: HeldOutText,
    length: int,
    *,
    batch_size: int = 1,
    bf16: bool = False,
    progress: Callable[[float], None] = lambda done: None,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Compute the perplexity of a text in windows of `length` tokens that do not overlap.

    Each token but the first of a window is predicted from all earlier tokens of the window. A window is computed in
    pieces, so that memory for logits does not grow with its length.

    Args:
        model: model in evaluation mode.
        text: tokens, as `read_text` returns them.
        length: tokens of a window.
        batch_size: windows computed together.
        bf16: run under bfloat16 autocast.
        progress: called with the fraction that is done, 0 to 1.
        ranks: processes among which batches of windows are divided. All return the same record.

    Returns:
        A record for JSON: "scores" with "perplexity" and "nats_per_token", the number of windows as "rows", and the
        number of predicted "tokens".
    """
    windows = text.ids[: len(text.ids) // length * length].view(-1, length)

    def nats_of(own: list[Tensor]) -> list[float]:
        reports = (lambda done, n=n: progress((n + done) / len(own)) for n in range(len(own)))
        return [_nats(model, ids, bf16, report) for ids, report in zip(own, reports, strict=True)]

    batches = windows.split(batch_size)
    count = windows.numel() - len(windows)
    nats = sum(ranks.divide(batches, nats_of, range(len(batches)))) / count
    scores = {"perplexity": math.exp(min(nats, 700.0)), "nats_per_token": nats}
    return {"scores": scores, "stderr": {}, "rows": len(windows), "tokens": count, "text": text.sha256}


def _nats(model: KalmixForCausalLM, windows: Tensor, bf16: bool, report: Callable[[float], None]) -> float:
    """Return the sum of the nats of all tokens of a batch of windows, without the first ones."""
    device, length = model.device, windows.shape[1]
    ids, cache, previous, total = windows.to(device), None, None, 0.0
    for begin in range(0, length, PIECE):
        piece = ids[:, begin : begin + PIECE]
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            output = model(piece, cache=cache, use_cache=True)
        cache, logits = output.cache, output.logits.float()
        predictions = logits[:, :-1] if previous is None else torch.cat([previous, logits[:, :-1]], dim=1)
        targets = piece[:, 1:] if previous is None else piece
        previous = logits[:, -1:]
        nll = torch.nn.functional.cross_entropy(predictions.flatten(0, 1), targets.flatten(), reduction="none")
        total += float(nll.double().sum())
        report(min(1.0, (begin + PIECE) / length))
    return total
