"""Text as blocks of tokens, and a tokenizer as transformers knows it."""

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
from kalmix.training.corpus import END_OF_TEXT


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The same tokenizer with `save_pretrained`, for `AutoTokenizer`; texts and prompts begin after `END_OF_TEXT`."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer that `wrap_tokenizer` made and a run saved to `folder`, from its tokenizer.json alone.

    Raises:
        ArgumentError: the file is missing or damaged, or kalmix did not write it.
    """
    path = folder / "tokenizer.json"
    try:
        read_json(path)
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # it raises no other class
            raise FileError(f"{path.name} is damaged ({error})") from None
        if tokenizer.token_to_id(END_OF_TEXT) is None:
            raise FileError(f"{path.name} is without the token {END_OF_TEXT}")
    except FileError as error:
        got = f"of {str(folder)!r}, where {error}"
        raise ArgumentError("tokenizer", got=got, expected="one that `kalmix train` wrote") from None
    return wrap_tokenizer(tokenizer)


def end_of_text_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id of `END_OF_TEXT`."""
    end = tokenizer.backend_tokenizer.token_to_id(END_OF_TEXT)
    if end is None:
        raise ArgumentError("tokenizer", got=f"without the token {END_OF_TEXT}", expected="one that kalmix trained")
    return end


def encode_documents(tokenizer: PreTrainedTokenizerFast, documents: Sequence[str]) -> Tensor:
    """Documents laid end to end, each after the mark `END_OF_TEXT`: int64 `[n]`."""
    end = end_of_text_id(tokenizer)
    encoded = tokenizer(list(documents), add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in (end, *ids)])


class SequenceDataset(Dataset[dict[str, Tensor]]):
    """A stream cut into blocks of equal length; what is left over at the end is dropped.

    A block may hold the end of one document and the start of the next: the mark between them is all that tells the
    model. With `separate_documents`, position ids start over at each mark, and a model that filters sequences apart
    does.
    """

    def __init__(self, ids: Tensor, seq_len: int, *, end_id: int, separate_documents: bool = False) -> None:
        """Args:
            ids: int64 `[n]`.
            seq_len: tokens a block.
            end_id: the mark that begins a document.
            separate_documents: whether to give position ids.

        Raises:
            ArgumentError: the stream is shorter than one block.
        """
        count = len(ids) // seq_len
        if count == 0:
            expected = f"at most {len(ids)}, the number of tokens in the text"
            raise ArgumentError("seq_len", got=seq_len, expected=expected)
        self.ids: Tensor = ids[: count * seq_len].view(count, seq_len)
        self.position_ids: Tensor | None = _position_ids(self.ids == end_id) if separate_documents else None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = {"input_ids": self.ids[index], "labels": self.ids[index]}
        return item if self.position_ids is None else {**item, "position_ids": self.position_ids[index]}


def _position_ids(starts: Tensor) -> Tensor:
    """Tokens since the last start (or the block's), int64, from bool `[count, length]`."""
    index = torch.arange(starts.shape[1]).expand(starts.shape)
    return index - torch.where(starts, index, 0).cummax(1).values
