"""Settings of a training run, stored beside its results and read back to resume it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field, fields
from inspect import get_annotations
from pathlib import Path
from typing import Any, Literal

from kalmix.errors import ArgumentError, FileError, FormatError
from kalmix.files import FORMAT, check_format, read_json, write_text
from kalmix.training.recipe_checks import check_recipe
from kalmix.validation import check_types

Layers = tuple[str | dict[str, Any], ...]
RECIPE_FILE, HISTORY = "recipe.json", "history.json"  # the latter is written after the model
# Settings that a resumed run may change, since they do not affect its result. Data is checked by its digest.
CHANGEABLE = (
    *("shards", "text", "workers", "keep_checkpoints", "keep_steps", "save_minutes", "save_steps"),
    *("report_to", "description"),
)
# Settings that a branch may change, too: they affect the run only after its checkpoint (`kalmix.training.branch`).
BRANCHED = ("steps", "tokens", "schedule", "cooldown", "final_learning_rate")
# Settings for which `kalmix train` has an option; `kalmix pretrain` takes all.
TRAIN_OPTIONS = (
    *("text", "tokenizer", "vocab_size", "layers", "hidden_size", "seq_len", "batch_size", "grad_accum"),
    *("separate_documents", "steps", "minutes", "learning_rate", "weight_decay", "warmup", "cooldown", "loss"),
    *("bf16", "compile", "seed"),
)
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
        shards: in place of `text`: folder of token shards (`kalmix data prepare`), as a string, or a dict from folders
            to weights. Each folder gives its weight's share of the training sequences.
        packing: with `shards`: "best-fit" packs whole documents into each batch and resets the state at each, "stream"
            cuts the stream of all documents into sequences.
        workers: with `shards`: processes that read ahead; 0 reads in the training process.
        tokenizer: "bpe" (byte-pair encoding, learned from the training text) or "bytes" (one token per byte). Unused
            with `shards`, which have their own.
        vocab_size: largest vocabulary of "bpe", at least 257. "bytes" always has 257 tokens; it ignores the value,
            which must be at least 257 nevertheless. With `shards`: number of rows of embedding and head, more than
            the largest id of the shards' tokenizer.
        layers: tuple with one entry per block: a layer's name, or a dict of its options with the name as "mixer",
            such as `{"mixer": "kla", "slots": 8}`; see `KalmixConfig`. `parse_layers` makes one from text.
        hidden_size: width of the residual stream.
        model: further settings of `KalmixConfig`, by name, such as `{"tie_word_embeddings": True}`.
        initial: folder of a model whose weights begin the training, as a string: a run, RUN/checkpoint-N, or a folder
            of `save_pretrained`. Its parameters need the names and shapes of this model. A tokenizer beside
            them needs the vocabulary of the data.
        seq_len: tokens per training sequence; at least 2.
        batch_size: sequences per batch on each device; with `batch_tokens` the largest number.
        grad_accum: batches per optimizer step; follows from `batch_tokens` if that is given.
        batch_tokens: tokens per optimizer step on all devices, a multiple of `seq_len` times the number of devices
            divided by `context_parallel`. A step is then divided into as few equal batches as `batch_size` allows.
            `None`: `batch_size * grad_accum` sequences on each device.
        separate_documents: without `shards`, reset the state at the start of each document. By default the state
            continues across documents in a training sequence, and only an end-of-text token separates them. With
            `shards`, `packing` decides it.
        steps: optimizer steps after which training stops; `None` for no limit.
        tokens: in place of `steps`: training tokens after which it stops, rounded up to whole steps.
        minutes: minutes of training after which it stops, including compilation in the first step; `None` for no limit.
            `steps`, `tokens` or `minutes` must be given. With minutes and another, the limit that is reached first ends
            the run, and progress is the larger of the two fractions.
        learning_rate: peak learning rate of AdamW, > 0. The parameters of latent dynamics, such as decay rates and
            noises (`Mixer.dynamics_parameters`), have a tenth of it.
        learning_rates: peak learning rates of groups of parameters that differ from this: dict from "matrices",
            "vectors", "embeddings", "head" or "dynamics" to a number >= 0 (`kalmix.models.optimizer_groups`).
        reference_width: width for which the learning rates are given; all are multiplied by
            sqrt(reference_width / hidden_size). `None` for no such factor.
        reference_batch: tokens per step for which they are given; all are multiplied by
            sqrt(tokens per step / reference_batch). `None` for no such factor.
        betas: decay rates of AdamW's two averages, each from 0 to below 1.
        eps: AdamW's epsilon, > 0.
        clip: largest norm of all gradients, to which larger ones are scaled; `None` for no limit.
        weight_decay: weight decay of weight matrices, except embeddings, output head and latent dynamics, which have
            none; >= 0.
        weight_decays: weight decays of groups of parameters that differ from this, as `learning_rates`.
        schedule: learning rate after the warmup. "trapezoid" and "wsd" keep the peak until the cooldown, which is
            linear for "trapezoid" and 1 - sqrt(fraction of the cooldown) for "wsd". "cosine" falls along a half cosine
            and has no cooldown.
        warmup: fraction of the run, 0 to 1, in which the learning rate rises linearly from 0.
        cooldown: fraction of the run, 0 to 1, at its end, in which the learning rate falls. `warmup + cooldown` must be
            at most 1.
        final_learning_rate: learning rate at the end, as a fraction of the peak, 0 to 1.
        loss: "cross-entropy" of the next token for the mean read-out, or "marginal": -log of the next token's
            probability, where the probability is averaged over 10 samples of the last layer's posterior. The last layer
            must then have a posterior.
        bf16: train under bfloat16 autocast, on any device.
        compile: compile the model with `torch.compile`.
        checkpointing: compute the activations of each block again in the backward pass, to save memory.
        fsdp: shard parameters, gradients and optimizer over all processes (FSDP2).
        context_parallel: number of processes that divide the tokens of each sequence (`ContextParallel`), a divisor of
            `seq_len` and of the number of processes. It needs `shards`.
        context_layout: with `context_parallel`, "contiguous" or "head-tail", which divides the work of attention
            equally; `seq_len` is then a multiple of twice `context_parallel`.
        context_attention: with `context_parallel`, "gather" or "ring": how attention gets the keys of other processes.
        save_minutes: longest time between two checkpoints, > 0.
        save_steps: further checkpoints after each multiple of so many steps; `None` for none.
        keep_checkpoints: number of checkpoints to keep, the newest ones; at least 1.
        keep_steps: checkpoints after each multiple of so many steps, and after the last step, are kept, also when the
            run has ended, and do not count for `keep_checkpoints`. Other runs can branch from them (`train`). `None`
            for none.
        eval_tokens: held-out tokens of each of the ten evaluations in a run, rounded down to full batches of
            `batch_size` sequences if there is one; at most those that are held out. There are none if it is below
            `seq_len`, or if no documents are held out. Folders in `shards` that hold out none are left out.
        report_to: tuple of integrations of the Trainer that get the log too, such as "wandb". TensorBoard always does.
        description: source of the settings, for people.
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
    shards: str | dict[str, float] | None = None
    packing: Literal["best-fit", "stream"] = "stream"
    workers: int = 0
    tokenizer: Literal["bpe", "bytes"] = "bpe"
    vocab_size: int = 2048
    layers: Layers = ("kla",) * 3
    hidden_size: int = 192
    model: dict[str, Any] = field(default_factory=dict)
    initial: str | None = None
    seq_len: int = 256
    batch_size: int = 8
    grad_accum: int = 1
    batch_tokens: int | None = None
    separate_documents: bool = False
    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None
    learning_rate: float = 4e-3
    learning_rates: dict[str, float] = field(default_factory=dict)
    reference_width: int | None = None
    reference_batch: int | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-10
    clip: float | None = 1.0
    weight_decay: float = 0.1
    weight_decays: dict[str, float] = field(default_factory=dict)
    schedule: Literal["trapezoid", "cosine", "wsd"] = "trapezoid"
    warmup: float = 0.02
    cooldown: float = 0.6
    final_learning_rate: float = 0.0
    loss: Literal["cross-entropy", "marginal"] = "cross-entropy"
    bf16: bool = False
    compile: bool = False
    checkpointing: bool = False
    fsdp: bool = False
    context_parallel: int = 1
    context_layout: Literal["contiguous", "head-tail"] = "contiguous"
    context_attention: Literal["gather", "ring"] = "gather"
    save_minutes: float = 10.0
    save_steps: int | None = None
    keep_checkpoints: int = 2
    keep_steps: int | None = None
    eval_tokens: int = 8192
    report_to: tuple[str, ...] = ()
    description: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(get_annotations(Recipe, eval_str=True), vars(self))
        check_recipe(self)

    def lr_scale(self, step_tokens: int) -> float:
        """Return the factor of all learning rates by width and by tokens per step; see `reference_width`.

        Args:
            step_tokens: tokens per optimizer step on all devices.
        """
        width = 1.0 if self.reference_width is None else self.reference_width / self.hidden_size
        return math.sqrt(width * (1.0 if self.reference_batch is None else step_tokens / self.reference_batch))

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
            return cls.from_json(written, written.get("format", 0))
        except FormatError:
            raise
        except (FileError, ArgumentError) as error:
            exists = (folder / RECIPE_FILE).exists()
            problem = f"whose {RECIPE_FILE} is unreadable ({error})" if exists else f"which holds no run ({error})"
            raise ArgumentError("run", got=f"{str(folder)!r}, {problem}", expected=expected) from None

    @classmethod
    def from_json(cls, written: dict[str, Any], version: int) -> Recipe:
        """Return the recipe that a file holds. Settings that it lacks have their defaults.

        Args:
            written: settings as JSON, by name; other names are ignored.
            version: format of the file.

        Raises:
            ArgumentError: a setting has another type or value than described.
        """
        given = {name: value for name, value in written.items() if name in RECIPE_FIELDS}
        if "layers" in given:
            from kalmix.layers.config_io import with_old_defaults  # slow to import

            given["layers"] = with_old_defaults(given["layers"], version)
        return cls(**as_fields(given))


RECIPE_FIELDS = tuple(x.name for x in fields(Recipe))


def resume_command(recipe: Recipe, output: Path) -> str:
    """Return the command that continues a run: `kalmix train` if it has options for the settings of the run.

    Args:
        recipe: settings of the run.
        output: folder of the run.
    """
    default = Recipe(steps=1)
    changed = {name for name in RECIPE_FIELDS if getattr(recipe, name) != getattr(default, name)}
    command = "train" if changed <= set(TRAIN_OPTIONS) else "pretrain"
    return f"kalmix {command} --resume --output {output}"


def as_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Convert lists, in which JSON and TOML store settings, to tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


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
