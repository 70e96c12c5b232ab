"""Everything a training run is, as data: written beside its results, read back to resume."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from inspect import get_annotations
from pathlib import Path
from typing import Any, Literal

from kalmix.errors import ArgumentError, FileError, FormatError
from kalmix.files import FORMAT, check_format, read_json, write_text
from kalmix.validation import check_types

Layers = tuple[str | dict[str, Any], ...]
RECIPE_FILE = "recipe.json"
MAX_SEED = 2**32 - 1  # NumPy accepts no larger seed
DEFAULT_MINUTES = 3.5  # that the command line trains for, unless told


@dataclass(frozen=True)
class Recipe:
    """A run: what to read, what to build, how to learn.

    Attributes:
        text: a UTF-8 file or folder; the documentation of the Python installation if absent.
        tokenizer: "bpe" (byte-pair encoding) or "bytes".
        vocab_size: largest vocabulary of a BPE tokenizer; at least 257.
        layers: mixers, first to last: names, or mappings of a mixer's options.
        hidden_size: width of the residual stream.
        seq_len: tokens per training sequence; at least 2.
        batch_size: sequences per batch on each device.
        grad_accum: batches whose gradients are summed before an optimizer step.
        separate_documents: reset the state at the start of each document. Otherwise documents are joined by an
            end-of-text token.
        steps: optimizer steps after which training stops; `None` for no limit.
        minutes: minutes after which training stops, set-up included; `None` for no limit. Training stops at the
            earlier of the two limits.
        learning_rate: peak learning rate.
        weight_decay: weight decay of the matrices.
        warmup: fraction of the run in which the learning rate rises linearly from 0.
        cooldown: fraction of the run in which the learning rate falls linearly to 0, at the end.
        loss: "cross-entropy" on the posterior mean, or "marginal" likelihood under the last layer's belief.
        bf16: train under bfloat16 autocast.  compile: `torch.compile` the model.
        seed: of weights, order and samples.
    """

    text: str | None = None
    tokenizer: Literal["bpe", "bytes"] = "bpe"
    vocab_size: int = 2048
    layers: Layers = ("kla",) * 3
    hidden_size: int = 192
    seq_len: int = 256
    batch_size: int = 8
    grad_accum: int = 1
    separate_documents: bool = False
    steps: int | None = None
    minutes: float | None = None
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    warmup: float = 0.02
    cooldown: float = 0.6
    loss: Literal["cross-entropy", "marginal"] = "cross-entropy"
    bf16: bool = False
    compile: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(get_annotations(Recipe, eval_str=True), vars(self))
        if not isinstance(self.layers, tuple) or not all(isinstance(entry, str | dict) for entry in self.layers):
            raise ArgumentError("layers", got=repr(self.layers), expected="a list of mixer names and mappings")
        least = {"vocab_size": 1, "hidden_size": 1, "seq_len": 2, "batch_size": 1, "grad_accum": 1, "weight_decay": 0}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ArgumentError(name, got=getattr(self, name), expected=f"at least {minimum}")
        for name in ("steps", "minutes", "learning_rate"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < float("inf"):
                raise ArgumentError(name, got=getattr(self, name), expected="a positive number")
        if not 0 <= self.seed <= MAX_SEED:
            raise ArgumentError("seed", got=self.seed, expected=f"between 0 and {MAX_SEED}")
        if self.text is not None and not self.text.strip():
            raise ArgumentError("text", got="empty", expected="the path of a UTF-8 text file or folder")
        for name in ("warmup", "cooldown"):
            if not 0 <= getattr(self, name) <= 1:
                raise ArgumentError(name, got=getattr(self, name), expected="between 0 and 1")
        if self.warmup + self.cooldown > 1 + 1e-9:
            got = f"{self.warmup:g}, and with `cooldown` {self.warmup + self.cooldown:g} of the run"
            raise ArgumentError("warmup", got=got, expected="at most 1 together with `cooldown`")
        if self.steps is None and self.minutes is None:
            raise ArgumentError("minutes", got="absent, as are steps", expected="given, or steps")
        if not self.layers:
            raise ArgumentError("layers", got="empty", expected="one mixer or more")
        if self.loss not in ("cross-entropy", "marginal"):
            raise ArgumentError("loss", got=repr(self.loss), expected="'cross-entropy' or 'marginal'")

    def save(self, folder: Path) -> None:
        """Write `recipe.json` into `folder`."""
        write_text(folder / RECIPE_FILE, json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Recipe:
        """Read `recipe.json` of `folder`.

        Raises:
            ArgumentError: there is none, or it is not a recipe.
            FormatError: a newer version of kalmix wrote it, or one before format 2.
        """
        expected = "the folder of a run"
        try:
            written = read_json(folder / RECIPE_FILE)
            check_format(written, folder / RECIPE_FILE, oldest=2)
            given = {name: value for name, value in written.items() if name in RECIPE_FIELDS}
            if isinstance(given.get("layers"), list):
                given["layers"] = tuple(given["layers"])
            return cls(**given)
        except FormatError:
            raise
        except (FileError, ArgumentError) as error:
            there = (folder / RECIPE_FILE).exists()
            how = f"whose {RECIPE_FILE} is unreadable ({error})" if there else f"which holds no run ({error})"
            raise ArgumentError("run", got=f"{str(folder)!r}, {how}", expected=expected) from None


RECIPE_FIELDS = tuple(field.name for field in fields(Recipe))


def parse_layers(text: str) -> Layers:
    """Mixers from what a person types: `kla,kla,attention`, `3*kla,attention`, or a JSON list with options.

    Raises:
        ArgumentError: it is none of these. Whether a mixer exists is the model's to say.
    """
    expected = "such as 'kla,kla,attention', '3*kla,attention' or a JSON list of names and options"
    if text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentError("layers", got=f"{text!r} ({error})", expected=expected) from None
        if not all(isinstance(entry, str | dict) for entry in entries):
            raise ArgumentError("layers", got=repr(text), expected=expected)
        return tuple(entries)
    layers: list[str] = []
    for entry in text.split(","):
        times, star, name = entry.strip().rpartition("*")
        if not name.strip() or (star and not times.strip().isdigit()):
            raise ArgumentError("layers", got=repr(text), expected=expected)
        layers += [name.strip()] * (int(times) if star else 1)
    return tuple(layers)
