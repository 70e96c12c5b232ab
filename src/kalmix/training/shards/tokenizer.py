"""Tokenizers of shards: any fast one of Hugging Face, or a new byte-level BPE trained on the source."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kalmix._extras import optional_imports
from kalmix.errors import ArgumentError
from kalmix.files import check_regular, sync_tree
from kalmix.training.corpus import train_tokenizer, vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TRAINED = "trained on the source"
SAMPLE_BYTES = 1 << 28  # of text from which a tokenizer learns
_PIECE = 1 << 20  # characters that are encoded at once
_EXPECTED = "a folder or a name of a tokenizer of Hugging Face that has a tokenizer.json"


class TokenizerFacts(NamedTuple):
    """Facts about the tokenizer of shards: hash of its tokenizer.json, number of ids, and first token.

    Ids may have gaps; all are below `vocab_size`.
    """

    sha256: str
    vocab_size: int
    bos_id: int


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer from a folder or by its name on the Hugging Face hub. Code in it never runs.

    Raises:
        ArgumentError: it cannot be loaded, or is not a fast one.
    """
    with optional_imports():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    try:
        if Path(name).exists():
            check_regular(Path(name, "tokenizer.json"))
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of many classes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        got = f"{name!r}, which cannot be loaded ({reason})"
        raise ArgumentError("tokenizer", got=got, expected=_EXPECTED) from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        got = f"{name!r}, a {type(tokenizer).__name__} without tokenizer.json"
        raise ArgumentError("tokenizer", got=got, expected=_EXPECTED)
    return tokenizer


def new_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on texts; see `train_tokenizer`.

    Raises:
        ArgumentError: `vocab_size` is below 257.
    """
    from kalmix.training.data import wrap_tokenizer

    return wrap_tokenizer(train_tokenizer(texts, vocab_size=vocab_size))


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path, bos: str | None) -> TokenizerFacts:
    """Write a tokenizer to `folder`, and return its facts.

    Args:
        tokenizer: the tokenizer.
        folder: folder for its files.
        bos: token that begins each document. Default: the one that begins a text, or else the one that ends it.

    Raises:
        ArgumentError: `bos` is not a token, or is missing and the tokenizer has no default.
    """
    first = bos or tokenizer.bos_token or tokenizer.eos_token
    bos_id = None if first is None else tokenizer.backend_tokenizer.token_to_id(str(first))
    if bos_id is None:
        problem = "is missing, and the tokenizer has no token that begins or ends a text"
        problem = problem if first is None else f"is {str(first)!r}, which the tokenizer lacks"
        raise ArgumentError("bos", problem=problem, expected="one of its tokens")
    tokenizer.save_pretrained(folder)
    sync_tree(folder)
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    return TokenizerFacts(digest, vocabulary_size(tokenizer.get_vocab()), bos_id)


@lru_cache(maxsize=1)  # a tokenizer that has encoded a text keeps memory when it is deleted (tokenizers 0.23)
def make_encoder(folder: Path, sha256: str) -> Callable[[list[str]], Iterator[np.ndarray]]:
    """Return a function that encodes texts one by one to arrays of ids, without special tokens.

    Special tokens that a text spells out, such as `<|endoftext|>`, are encoded as ordinary text. Texts of more than
    about a million characters are cut at line breaks and encoded in pieces. The function raises ArgumentError if the
    tokenizer cannot encode a text, for example because it has no unknown token.

    Args:
        folder: folder with tokenizer.json.
        sha256: its hash. The function for the last folder and hash is kept.
    """
    with optional_imports():
        from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True

    def encode(texts: list[str]) -> Iterator[np.ndarray]:
        pieces = [list(_pieces(text)) for text in texts]
        flat = [piece for several in pieces for piece in several]
        try:
            encoded = iter(tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        except Exception as error:  # it raises no other class
            problem = f"cannot encode a text of the source ({error})"
            raise ArgumentError("tokenizer", problem=problem, expected="one that encodes any text") from None
        for several in pieces:
            ids = [np.array(next(encoded).ids, np.int64) for _ in several]
            yield np.concatenate(ids) if len(ids) > 1 else ids[0]

    return encode


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PIECE:
        cut = text.rfind("\n", start + _PIECE // 2, start + _PIECE) + 1 or start + _PIECE
        yield text[start:cut]
        start = cut
    yield text[start:]
