"""Text as blocks of tokens, and a tokenizer as transformers knows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from kalmix.errors import ArgumentError, FileError
from kalmix.files import read_json
from kalmix.training.corpus import END


def pretrained(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The same tokenizer with `save_pretrained`, for `AutoTokenizer`; texts and prompts begin after `END`."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer that `pretrained` made and a run saved to `folder`, from its tokenizer.json alone.

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
        if tokenizer.token_to_id(END) is None:
            raise FileError(f"{path.name} is without the token {END}")
    except FileError as error:
        got = f"of {str(folder)!r}, where {error}"
        raise ArgumentError("tokenizer", got=got, expected="one that `kalmix train` wrote") from None
    return pretrained(tokenizer)


def mark(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id of `END`."""
    end = tokenizer.backend_tokenizer.token_to_id(END)
    if end is None:
        raise ArgumentError("tokenizer", got=f"without the token {END}", expected="one that kalmix trained")
    return end


def stream(tokenizer: PreTrainedTokenizerFast, documents: Sequence[str]) -> Tensor:
    """Documents laid end to end, each after the mark `END`: int64 `[n]`."""
    end = mark(tokenizer)
    encoded = tokenizer(list(documents), add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in (end, *ids)])


class Blocks(Dataset[dict[str, Tensor]]):
    """A stream cut into blocks of equal length; what is left over at the end is dropped.

    A block may hold the end of one document and the start of the next: the mark between them is all that tells the
    model. With `documents`, position ids start over at each mark, and a model that filters sequences apart does.
    """

    def __init__(self, ids: Tensor, length: int, *, end: int, documents: bool = False) -> None:
        """Args:
            ids: int64 `[n]`.
            length: tokens a block.
            end: the mark that begins a document.
            documents: whether to give position ids.

        Raises:
            ArgumentError: the stream is shorter than one block.
        """
        count = len(ids) // length
        if count == 0:
            raise ArgumentError("seq_len", got=length, expected=f"at most {len(ids)}, the number of tokens in the text")
        self.ids: Tensor = ids[: count * length].view(count, length)
        self.positions: Tensor | None = _positions(self.ids == end) if documents else None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = {"input_ids": self.ids[index], "labels": self.ids[index]}
        return item if self.positions is None else {**item, "position_ids": self.positions[index]}


def _positions(starts: Tensor) -> Tensor:
    """Tokens since the last start (or the block's), int64, from bool `[count, length]`."""
    index = torch.arange(starts.shape[1]).expand(starts.shape)
    return index - torch.where(starts, index, 0).cummax(1).values
