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
FILE = "recipe.json"
MINUTES = 3.5  # that the command line trains for, unless told


@dataclass(frozen=True)
class Recipe:
    """A run: what to read, what to build, how to learn.

    Attributes:
        text: a UTF-8 file or folder; the documentation of the Python installation if absent.
        tokens: "bpe" or "bytes".  vocabulary: pieces of the BPE at most.
        layers: mixers, first to last.  width: of the residual stream.
        block: tokens of a training sequence.  batch: sequences a step, a device.  accumulate: batches a step.
        documents: whether a document's first token forgets the one before it (else they are joined by an end mark).
        steps, minutes: where to stop, whichever comes first; minutes are of training, its set-up included.
        rate: peak learning rate of the matrices.  decay: weight decay of the matrices.
        warmup, cooldown: the parts of the run in which the rate rises and falls, linearly.
        loss: "cross-entropy" on the posterior mean, or "marginal" likelihood under the last layer's belief.
        bf16: train under bfloat16 autocast.  compile: `torch.compile` the model.
        seed: of weights, order and samples.
    """

    text: str | None = None
    tokens: Literal["bpe", "bytes"] = "bpe"
    vocabulary: int = 2048
    layers: Layers = ("kla",) * 3
    width: int = 192
    block: int = 256
    batch: int = 8
    accumulate: int = 1
    documents: bool = False
    steps: int | None = None
    minutes: float | None = None
    rate: float = 4e-3
    decay: float = 0.1
    warmup: float = 0.02
    cooldown: float = 0.6
    loss: Literal["cross-entropy", "marginal"] = "cross-entropy"
    bf16: bool = False
    compile: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(get_annotations(Recipe, eval_str=True), vars(self))
        if not isinstance(self.layers, tuple) or not all(isinstance(entry, str | dict) for entry in self.layers):
            raise ArgumentError("layers", got=repr(self.layers), needs="a list of mixer names and mappings")
        for name in ("vocabulary", "width", "block", "batch", "accumulate"):
            if getattr(self, name) < 1 + (name == "block"):
                raise ArgumentError(name, got=getattr(self, name), needs=f"at least {1 + (name == 'block')}")
        for name in ("steps", "minutes", "rate"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < float("inf"):
                raise ArgumentError(name, got=getattr(self, name), needs="positive")
        for name in ("warmup", "cooldown"):
            if not 0 <= getattr(self, name) <= 1:
                raise ArgumentError(name, got=getattr(self, name), needs="between 0 and 1")
        if self.steps is None and self.minutes is None:
            raise ArgumentError("minutes", got="absent, as are steps", needs="given, or steps")
        if not self.layers:
            raise ArgumentError("layers", got="empty", needs="one mixer or more")
        if self.loss not in ("cross-entropy", "marginal"):
            raise ArgumentError("loss", got=repr(self.loss), needs="'cross-entropy' or 'marginal'")

    def save(self, folder: Path) -> None:
        """Write `recipe.json` into `folder`."""
        write_text(folder / FILE, json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Recipe:
        """Read `recipe.json` of `folder`.

        Raises:
            ArgumentError: there is none, it is not a recipe, or a newer version wrote it.
        """
        needs = "the folder of a run"
        try:
            written = read_json(folder / FILE)
            check_format(written, folder / FILE)
            given = {name: value for name, value in written.items() if name in FIELDS}
            if isinstance(given.get("layers"), list):
                given["layers"] = tuple(given["layers"])
            return cls(**given)
        except FormatError:
            raise
        except (FileError, ArgumentError) as error:
            there = (folder / FILE).exists()
            how = f"whose {FILE} is unreadable ({error})" if there else f"which holds no run ({error})"
            raise ArgumentError("run", got=f"{str(folder)!r}, {how}", needs=needs) from None


FIELDS = tuple(field.name for field in fields(Recipe))


def parse_layers(text: str) -> Layers:
    """Mixers from what a person types: `kla,kla,attention`, `3*kla,attention`, or a JSON list with options.

    Raises:
        ArgumentError: it is none of these. Whether a mixer exists is the model's to say.
    """
    needs = "such as 'kla,kla,attention', '3*kla,attention' or a JSON list of names and options"
    if text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentError("layers", got=f"{text!r} ({error})", needs=needs) from None
        if not all(isinstance(entry, str | dict) for entry in entries):
            raise ArgumentError("layers", got=repr(text), needs=needs)
        return tuple(entries)
    layers: list[str] = []
    for entry in text.split(","):
        times, star, name = entry.strip().rpartition("*")
        if not name.strip() or (star and not times.strip().isdigit()):
            raise ArgumentError("layers", got=repr(text), needs=needs)
        layers += [name.strip()] * (int(times) if star else 1)
    return tuple(layers)
