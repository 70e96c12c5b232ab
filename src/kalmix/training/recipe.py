"""Settings of a training run, stored beside its results and read back to resume it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from inspect import get_annotations
from pathlib import Path
from typing import Any, Literal

from kalmix.errors import ArgumentError, FileError, FormatError
from kalmix.files import FORMAT, check_format, read_json, write_text
from kalmix.validation import check_choice, check_types

Layers = tuple[str | dict[str, Any], ...]
RECIPE_FILE = "recipe.json"
MAX_SEED = 2**32 - 1  # NumPy accepts no larger seed
DEFAULT_MINUTES = 3.5  # of `kalmix train` without a limit


@dataclass(frozen=True)
class Recipe:
    """Settings of a training run: data, model, optimizer and limits. `kalmix.training.run.train` runs it.

    A recipe is immutable. No file is read or written before `train`.

    Attributes:
        text: path, as a string, of a UTF-8 text file (any suffix), or of a folder whose text files are read, subfolders
            included. Hidden files in a folder and files with a suffix outside
            `kalmix.training.corpus.TEXT_SUFFIXES` (.txt, .md, .py, ...) are skipped. Each file is a document. Default:
            the documentation of this Python installation; its documents are the topics of `help()` and the docstrings
            of each standard module.
        tokenizer: "bpe" (byte-pair encoding, learned from the training text) or "bytes" (one token per byte).
        vocab_size: largest vocabulary of "bpe", at least 257. "bytes" always has 257 tokens; it ignores the value,
            which must be at least 257 nevertheless.
        layers: tuple with one entry per block: a layer's name, or a dict of its options with the name as "mixer",
            such as `{"mixer": "kla", "slots": 8}`; see `KalmixConfig`. `parse_layers` makes one from text.
        hidden_size: width of the residual stream.
        seq_len: tokens per training sequence; at least 2.
        batch_size: sequences per batch on each device.
        grad_accum: batches per optimizer step.
        separate_documents: reset the state at the start of each document. Otherwise the state continues across
            documents in a training sequence, and only an end-of-text token separates them.
        steps: optimizer steps after which training stops; `None` for no limit.
        minutes: minutes of training after which it stops, including compilation in the first step; `None` for no limit.
            `steps` or `minutes` must be given. With both, the limit that is reached first ends the run, and progress is
            the larger of the two fractions.
        learning_rate: peak learning rate of AdamW, > 0. The parameters of latent dynamics, such as decay rates and
            noises (`Mixer.dynamics_parameters`), have a tenth of it.
        weight_decay: weight decay of weight matrices, except embeddings, output head and latent dynamics, which have
            none; >= 0.
        warmup: fraction of the run, 0 to 1, in which the learning rate rises linearly from 0.
        cooldown: fraction of the run, 0 to 1, at its end, in which the learning rate falls linearly to 0. `warmup +
            cooldown` must be at most 1.
        loss: "cross-entropy" of the next token for the mean read-out, or "marginal": -log of the next token's
            probability, where the probability is averaged over 10 samples of the last layer's posterior. The last layer
            must then have a posterior.
        bf16: train under bfloat16 autocast, on any device.
        compile: compile the model with `torch.compile`.
        seed: seed of initial weights, order of training sequences and samples of the loss, from 0 to 2^32 - 1.

    Raises:
        ArgumentError: a setting has another type or value than described; sizes, counts and limits must be positive. An
            integer is accepted for a float. `train` checks what needs the text or the model: that `text` exists, that
            names and options of layers are known, that `hidden_size` suits the layers, and that the last layer has a
            posterior for "marginal".

    Example:
        >>> from kalmix.training import Recipe
        >>> recipe = Recipe(layers=("kla", "attention"), hidden_size=64, steps=100)
        >>> recipe.seq_len, recipe.learning_rate
        (256, 0.004)
        >>> Recipe(steps=100, warmup=0.6, cooldown=0.6)
        Traceback (most recent call last):
            ...
        kalmix.errors.ArgumentError: `warmup` plus `cooldown` is 1.2 of the run; expected at most 1.
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
            raise ArgumentError(
                "layers", got=repr(self.layers), expected="a tuple of layer names and mappings of options"
            )
        check_choice("tokenizer", self.tokenizer, ("bpe", "bytes"))
        check_choice("loss", self.loss, ("cross-entropy", "marginal"))
        least = {"vocab_size": 257, "hidden_size": 1, "seq_len": 2, "batch_size": 1, "grad_accum": 1, "weight_decay": 0}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ArgumentError(name, got=getattr(self, name), expected=f"at least {minimum}")
        for name in ("steps", "minutes", "learning_rate"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < float("inf"):
                raise ArgumentError(name, got=getattr(self, name), expected="a positive number")
        if not 0 <= self.seed <= MAX_SEED:
            raise ArgumentError("seed", got=self.seed, expected=f"an integer between 0 and {MAX_SEED}")
        if self.text is not None and not self.text.strip():
            raise ArgumentError("text", got="empty", expected="the path of a UTF-8 text file or folder")
        for name in ("warmup", "cooldown"):
            if not 0 <= getattr(self, name) <= 1:
                raise ArgumentError(name, got=getattr(self, name), expected="a fraction between 0 and 1")
        if self.warmup + self.cooldown > 1 + 1e-9:
            problem = f"plus `cooldown` is {self.warmup + self.cooldown:g} of the run"
            raise ArgumentError("warmup", problem=problem, expected="at most 1")
        if self.steps is None and self.minutes is None:
            raise ArgumentError("minutes", problem="and `steps` are missing", expected="at least one of the two")
        if not self.layers:
            raise ArgumentError("layers", got="empty", expected="at least one layer")

    def save(self, folder: Path) -> None:
        """Write `recipe.json` into `folder`, replacing an older one atomically."""
        write_text(folder / RECIPE_FILE, json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Recipe:
        """Read `recipe.json` in the folder of a run.

        Raises:
            ArgumentError: the file is missing, damaged or not a recipe.
            FormatError: a newer version of kalmix wrote it, or one before format 2, which had other names for the
                settings.
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
            exists = (folder / RECIPE_FILE).exists()
            problem = f"whose {RECIPE_FILE} is unreadable ({error})" if exists else f"which holds no run ({error})"
            raise ArgumentError("run", got=f"{str(folder)!r}, {problem}", expected=expected) from None


RECIPE_FIELDS = tuple(field.name for field in fields(Recipe))


def parse_layers(text: str) -> Layers:
    """Parse the layers that a user types.

    Args:
        text: names separated by commas, each with an optional number of repetitions before it, 1 to 9999, such as
            `3*kla,attention`; spaces are ignored. Or a JSON list of names and objects of options, as in
            `Recipe.layers`, without such numbers.

    Returns:
        Tuple of names and dicts for `Recipe.layers`, repetitions expanded. Names are not checked here; `train`
        checks them.

    Raises:
        ArgumentError: `text` has neither form, or contains no layer.

    Example:
        >>> from kalmix.training import parse_layers
        >>> parse_layers("2*kla,attention")
        ('kla', 'kla', 'attention')
    """
    expected = "names such as 'kla,kla,attention' or '3*kla,attention', or a JSON list of names and options"
    if not isinstance(text, str):
        raise ArgumentError("layers", got=f"a {type(text).__name__}", expected=expected)
    if text.lstrip().startswith(("[", "{")):
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentError("layers", got=f"{text!r} ({error})", expected=expected) from None
        if not isinstance(entries, list) or not entries or not all(isinstance(x, str | dict) for x in entries):
            raise ArgumentError("layers", got=repr(text), expected=expected)
        return tuple(entries)
    layers: list[str] = []
    for entry in text.split(","):
        times, star, name = entry.strip().rpartition("*")
        if not name.strip() or (star and not re.fullmatch(r"0*[1-9][0-9]{0,3}", times.strip())):
            raise ArgumentError("layers", got=repr(text), expected=expected)
        layers += [name.strip()] * (int(times) if star else 1)
    return tuple(layers)
