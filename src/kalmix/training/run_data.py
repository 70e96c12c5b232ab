"""Data of a run: text that is tokenized in memory, or token shards."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from kalmix._extras import optional_imports

with optional_imports():
    from transformers import AutoTokenizer, TrainerCallback

    from kalmix.training.shards import Order, Shards, TokenLoader
    from kalmix.training.shards.mixture import folder_weights
    from kalmix.training.shards.trainer_position import DataPosition

from kalmix.errors import ArgumentError
from kalmix.files import sync_tree
from kalmix.training import inputs
from kalmix.training.batching import Batching, plan_batches
from kalmix.training.corpus import Corpus, load_corpus, train_tokenizer, vocabulary_size
from kalmix.training.data import SequenceDataset, encode_documents, end_of_text_id, read_tokenizer, wrap_tokenizer
from kalmix.training.recipe import Recipe


@dataclass(frozen=True)
class RunData:
    """Data of a run, ready for a Trainer.

    Attributes:
        train: training sequences.
        evaluation: held-out sequences for evaluations during training, or batches if there is a `loader`; `None` for no
            evaluation.
        loader: loader of training batches from shards; `None` for text.
        tokens_per_byte: tokens per byte of the text behind each loss: "loss" for training, "eval_loss" for held-out
            text. Without a loss whose bytes are not known.
        batching: sizes of batches.
        max_documents: largest number of documents in a batch; `None` if the model has no use for it.
    """

    train: Dataset[Any]
    evaluation: Dataset[Any] | None
    loader: TokenLoader | None
    tokens_per_byte: dict[str, float]
    batching: Batching
    max_documents: int | None = None

    @property
    def callbacks(self) -> list[TrainerCallback]:
        """Callbacks that the data needs."""
        return [] if self.loader is None else [DataPosition(self.loader)]


class TextSource:
    """Text of a run, in memory.

    Args:
        recipe: settings of the run.

    Raises:
        ArgumentError: as `load_corpus`.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe: Recipe = recipe
        self.corpus: Corpus = load_corpus(recipe.text)

    def digests(self, output: Path) -> inputs.Digests:
        """Return the digests of the text, and of the tokenizer saved in `output`."""
        return inputs.digests(self.corpus, output)

    def tokenizer(self, folder: Path, *, fresh: bool) -> Any:
        """Return the tokenizer of the run: a new one, saved to `folder`; or the one there, so that a resumed run and
        all processes use the same.
        """
        if not fresh and (folder / "tokenizer.json").exists():
            return read_tokenizer(folder)
        kind, size = self.recipe.tokenizer, self.recipe.vocab_size
        tokenizer = wrap_tokenizer(train_tokenizer(self.corpus.training, kind, vocab_size=size))
        tokenizer.save_pretrained(folder)
        sync_tree(folder)
        return tokenizer

    def vocabulary(self, tokenizer: Any) -> tuple[int, int]:
        """Return the size of the model's vocabulary, and the id of the token that begins a document."""
        return vocabulary_size(tokenizer.get_vocab()), end_of_text_id(tokenizer)

    def load(self, tokenizer: Any, processes: int, rank: int) -> RunData:
        """Return the data as training sequences.

        Args:
            tokenizer: tokenizer of the run.
            processes: number of processes that train.
            rank: number of this process.
        """
        recipe, corpus = self.recipe, self.corpus
        ids, eval_ids = encode_documents(tokenizer, corpus.training), encode_documents(tokenizer, corpus.held_out)
        end = end_of_text_id(tokenizer)
        data = SequenceDataset(ids, recipe.seq_len, end_id=end, separate_documents=recipe.separate_documents)
        batching = plan_batches(recipe, processes, len(data))
        return RunData(
            train=data,
            evaluation=_eval_dataset(eval_ids, recipe),
            loader=None,
            tokens_per_byte={
                "loss": len(ids) / _bytes(corpus.training),
                "eval_loss": len(eval_ids) / _bytes(corpus.held_out),
            },
            batching=batching,
            max_documents=data.max_documents(batching.rows),
        )


class ShardSource:
    """Token shards of a run.

    Args:
        recipe: settings of the run.

    Raises:
        ArgumentError: a folder holds no finished shards, or the vocabulary of the recipe is smaller than theirs.
    """

    corpus: Corpus = Corpus((), ())

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.shards is not None
        self.recipe: Recipe = recipe
        self.weights: dict[Any, float] = folder_weights(recipe.shards)
        self.shards: list[Shards] = [Shards(folder) for folder in self.weights]
        if self.shards[0].manifest.vocab_size > recipe.vocab_size:
            expected = f"at least {self.shards[0].manifest.vocab_size}, the vocabulary of the shards"
            raise ArgumentError("vocab_size", got=recipe.vocab_size, expected=expected)

    def check_rows(self) -> None:
        """Check that the folders have one tokenizer, and each enough tokens for a sequence.

        Raises:
            ArgumentError: they do not.
        """
        order = Order(self.recipe.seq_len, self.recipe.packing, seed=self.recipe.seed)
        TokenLoader(self.weights, order, batch_size=1, rank=0, world_size=1)

    def digests(self, output: Path) -> inputs.Digests:
        """Return the digests of the shards and of their tokenizer."""
        hashes = [shard.sha256 for shards in self.shards for shard in shards.manifest.shards]
        text = hashlib.sha256(" ".join(hashes).encode()).hexdigest()
        return {"shards": text, "tokenizer": self.shards[0].manifest.tokenizer_sha256}

    def tokenizer(self, folder: Path, *, fresh: bool) -> Any:
        """Return the tokenizer of the shards; if `fresh`, copy it to `folder`."""
        own = self.shards[0].folder / "tokenizer"
        if fresh:
            shutil.copytree(own, folder, dirs_exist_ok=True)
            sync_tree(folder)
        return AutoTokenizer.from_pretrained(own)

    def vocabulary(self, tokenizer: Any) -> tuple[int, int]:
        """Return the size of the model's vocabulary, and the id of the token that begins a document."""
        return self.recipe.vocab_size, self.shards[0].manifest.bos_id

    def load(self, tokenizer: Any, processes: int, rank: int) -> RunData:
        """Return the data as batches of a `TokenLoader`; arguments are those of `TextSource.load`."""
        recipe, batching = self.recipe, plan_batches(self.recipe, processes)
        order = Order(recipe.seq_len, recipe.packing, seed=recipe.seed)
        loader = TokenLoader(
            self.weights,
            order,
            batch_size=batching.rows,
            rank=rank // recipe.context_parallel,
            world_size=batching.groups,
            workers=recipe.workers,
        )
        found = {"loss": self._tokens_per_byte("train"), "eval_loss": self._tokens_per_byte("held_out")}
        return RunData(
            train=loader.dataset,
            evaluation=self._eval_batches(batching.rows),
            loader=loader,
            tokens_per_byte={name: ratio for name, ratio in found.items() if ratio},
            batching=batching,
        )

    def _weights(self, split: str) -> dict[Any, float]:
        """Return the weights of the folders whose split has tokens."""
        pairs = zip(self.weights.items(), self.shards, strict=True)
        return {folder: weight for (folder, weight), x in pairs if x.manifest.count(split, "tokens")}

    def _tokens_per_byte(self, split: str) -> float:
        """Return the tokens per byte of a mixture; 0 if the split is empty."""
        weights, mean = self._weights(split), 0.0
        for folder, shards in zip(self.weights, self.shards, strict=True):
            if folder in weights:
                tokens, count = (shards.manifest.count(split, unit) for unit in ("tokens", "bytes"))
                mean += weights[folder] / sum(weights.values()) * count / tokens
        return 1 / mean if mean else 0.0

    def _eval_batches(self, rows: int) -> Dataset[Any] | None:
        """Return the first held-out batches of the folders that have any; `None` if there are too few tokens.

        They have no more rows than the folders hold out together; a mixture keeps its weights, so a small folder may
        repeat. They have the same rows for any number of rows per batch, which depends on the number of processes.
        More than `recipe.batch_size` sequences are cut to a multiple of it: batches of one size that few numbers
        divide are slow.
        """
        order = Order(self.recipe.seq_len, self.recipe.packing, seed=None, split="held_out")
        count = self.recipe.eval_tokens // self.recipe.seq_len
        weights = self._weights("held_out")
        if not count or not weights:
            return None
        try:
            count = TokenLoader(weights, order, batch_size=1, rank=0, world_size=1).dataset.count_rows(count)
        except ArgumentError:  # a folder holds out less than one sequence
            return None
        count = count // self.recipe.batch_size * self.recipe.batch_size or count
        rows = max(size for size in range(1, rows + 1) if count % size == 0)
        loader = TokenLoader(weights, order, batch_size=rows, rank=0, world_size=1)
        return Batches(list(islice(loader, count // rows)))


class Batches(Dataset[dict[str, Tensor]]):
    """Dataset whose items are whole batches.

    Args:
        batches: the batches.
    """

    def __init__(self, batches: Sequence[dict[str, Tensor]]) -> None:
        self.batches: Sequence[dict[str, Tensor]] = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.batches[index]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)


def open_source(recipe: Recipe) -> TextSource | ShardSource:
    """Open the data of a recipe.

    Raises:
        ArgumentError: it cannot be read, or context parallelism is asked for without shards.
    """
    if recipe.shards is not None:
        return ShardSource(recipe)
    if recipe.context_parallel > 1:
        raise ArgumentError("context_parallel", got=recipe.context_parallel, expected="1 without `shards`")
    return TextSource(recipe)


def _eval_dataset(ids: Tensor, recipe: Recipe) -> Dataset[Any] | None:
    """Return the held-out sequences for evaluation during training: the first ones, in full batches if there is one."""
    ids = ids[: recipe.eval_tokens]
    batch = recipe.seq_len * recipe.batch_size
    full = len(ids) // batch * batch  # another batch size would compile again
    return SequenceDataset(ids[: full or None], recipe.seq_len, end_id=-1) if len(ids) >= recipe.seq_len else None


def _bytes(documents: Sequence[str]) -> int:
    return len("\n\n".join(documents).encode())
