"""Datasets of token sequences, and tokenizers for transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from kalmix._extras import optional_imports

with optional_imports():
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

from kalmix.errors import ArgumentError, FileError
from kalmix.files import read_json
from kalmix.layers.fused.cross_entropy import IGNORE_INDEX
from kalmix.models import KalmixForCausalLM
from kalmix.training.corpus import END_OF_TEXT


def wrap_tokenizer(tokenizer: Tokenizer, mark: str = END_OF_TEXT) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer for transformers, so that it has `save_pretrained` and `AutoTokenizer` can load it.

    Args:
        tokenizer: as `train_tokenizer` returns it.
        mark: its token that begins, ends and pads texts. If it is not `END_OF_TEXT`, the names of special tokens in a
            text are encoded as ordinary text, as in token shards.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=mark,
        eos_token=mark,
        pad_token=mark,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=mark != END_OF_TEXT,
    )


def read_tokenizer(folder: Path, begin: int | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer in a run's model folder, from tokenizer.json alone.

    Args:
        folder: the model folder.
        begin: id of the token that began documents in training (`KalmixConfig.bos_token_id`). Default: that of
            `END_OF_TEXT`.

    Raises:
        ArgumentError: the file is missing or damaged, or lacks the token that begins documents.
    """
    path = folder / "tokenizer.json"
    try:
        read_json(path)
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # it raises no other class
            raise FileError(f"{path.name} is damaged ({error})") from None
        mark = END_OF_TEXT if begin is None else tokenizer.id_to_token(begin)
        if mark is None or tokenizer.token_to_id(mark) is None:
            raise FileError(f"{path.name} lacks the token {mark or begin}, which begins documents")
    except FileError as error:
        problem = f"in {str(folder)!r} cannot be read: {error}"
        raise ArgumentError("tokenizer", problem=problem, expected="files that `kalmix train` wrote") from None
    return wrap_tokenizer(tokenizer, mark)


def end_of_text_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id of `END_OF_TEXT`.

    Raises:
        ArgumentError: the tokenizer is not a `PreTrainedTokenizerFast`, or does not have that token.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ArgumentError("tokenizer", got=f"a {type(tokenizer).__name__}", expected="a PreTrainedTokenizerFast")
    end = tokenizer.backend_tokenizer.token_to_id(END_OF_TEXT)
    if end is None:
        raise ArgumentError("tokenizer", problem=f"lacks the token {END_OF_TEXT}", expected="one that kalmix trained")
    return end


def begin_id(model: KalmixForCausalLM, tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id of the token that began documents in the training of a model, by default of `END_OF_TEXT`.

    Raises:
        ArgumentError: neither the configuration of the model nor the tokenizer has one.
    """
    begin = model.config.bos_token_id
    return end_of_text_id(tokenizer) if begin is None else int(begin)


def check_unicode(name: str, text: str) -> None:
    """Check that UTF-8 can encode a text. Python reads other bytes of a command line as lone surrogates.

    Raises:
        ArgumentError: the text has a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{text!r}, whose character {error.start} UTF-8 cannot encode"
        raise ArgumentError(name, got=got, expected="a text in UTF-8") from None


def encode_documents(tokenizer: PreTrainedTokenizerFast, documents: Sequence[str]) -> Tensor:
    """Return the tokens of all documents, each preceded by `END_OF_TEXT`: int64 `[n]`."""
    end = end_of_text_id(tokenizer)
    encoded = tokenizer(list(documents), add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in (end, *ids)])


class SequenceDataset(Dataset[dict[str, Tensor]]):
    """Dataset of consecutive token sequences of equal length. Tokens left over at the end are dropped.

    A sequence may contain the end of one document and the start of the next, separated by an end-of-text token. With
    `separate_documents`, items have `position_ids` that start anew at each document, so that models of kalmix reset
    their state there. The end-of-text token that begins a document is then no target (its label is -100), so a model
    does not learn where documents end.

    Args:
        ids: int64 `[n]`, tokens of all documents.
        seq_len: tokens per sequence.
        end_id: id of the token that begins a document.
        separate_documents: add `position_ids`.

    Raises:
        ArgumentError: there are fewer than `seq_len` tokens.

    Example:
        >>> from kalmix.training.data import SequenceDataset
        >>> dataset = SequenceDataset(torch.tensor([0, 5, 6, 0, 7, 8, 9]), 3, end_id=0, separate_documents=True)
        >>> len(dataset), dataset[1]["input_ids"], dataset[1]["position_ids"]
        (2, tensor([0, 7, 8]), tensor([0, 1, 2]))
    """

    def __init__(self, ids: Tensor, seq_len: int, *, end_id: int, separate_documents: bool = False) -> None:
        count = len(ids) // seq_len
        if count == 0:
            expected = f"at most {len(ids)}, the number of tokens in the text"
            raise ArgumentError("seq_len", got=seq_len, expected=expected)
        self.ids: Tensor = ids[: count * seq_len].view(count, seq_len)
        self.position_ids: Tensor | None = _position_ids(self.ids == end_id) if separate_documents else None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index]
        if self.position_ids is None:
            return {"input_ids": ids, "labels": ids}
        position_ids = self.position_ids[index]
        labels = torch.where(position_ids == 0, IGNORE_INDEX, ids)  # the Trainer divides by the number of other labels
        return {"input_ids": ids, "labels": labels, "position_ids": position_ids}

    def max_documents(self, batch_size: int) -> int | None:
        """Return the largest number of documents, or parts of them, in a batch; `None` if they are not separated."""
        if self.position_ids is None:
            return None
        documents = (self.position_ids == 0).sum(1)
        return int(documents.topk(min(batch_size, len(documents))).values.sum())


def _position_ids(starts: Tensor) -> Tensor:
    """Return the number of tokens since the last start, or since the beginning: int64, from bool `[count, length]`."""
    index = torch.arange(starts.shape[1]).expand(starts.shape)
    return index - torch.where(starts, index, 0).cummax(1).values
