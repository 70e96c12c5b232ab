"""Recipe of a training run of an image classifier."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from inspect import get_annotations
from pathlib import Path
from typing import Any

from kalmix.errors import ArgumentError, FormatError
from kalmix.files import FORMAT, check_format, read_json, write_text
from kalmix.training.recipe import RECIPE_FILE
from kalmix.validation import check_types

WEIGHTS, HISTORY = "model.safetensors", "history.json"  # files of a run, beside RECIPE_FILE


@dataclass(frozen=True)
class VisionRecipe:
    """Training run; the defaults are GKAVision-T on ImageNet, by section N of Gated KalmaNet and, for the rest,
    MambaVision.

    Attributes:
        images: folder with `train` and `val`, each with one subfolder per class; scikit-learn's digits if `None`.
        size: image height and width in pixels.
        mixer: a layer's name; "attention" for attention in every block.
        width, stem_width, depths, heads, windows, drop_path: of the model, see `VisionModel`.
        batch_size: images per step on each device (published: on each of 8).
        epochs: epochs of the cosine schedule, warm-up included.
        warmup: epochs of warm-up.
        cooldown: additional epochs at the final learning rate.
        learning_rate, initial_learning_rate, final_learning_rate: peak, first and last value.
        weight_decay: of matrices only.
        max_grad_norm: largest gradient norm.
        mixup, cutmix: their Beta parameters, 0 for off; each batch uses one of them.
        label_smoothing: of the targets.
        augment, jitter, erase: RandAugment as `timm` spells it, color jitter (used if `augment` is empty), and the
            probability of random erasing. They need `timm`, unless they are empty or 0.
        shift: largest random shift in pixels (digits only).
        bf16: train under bfloat16 autocast.
        compile: `torch.compile` the model.
        workers: processes that load images.
        seed: seed of weights, order and augmentation.
    """

    images: str | None = None
    size: int = 224
    mixer: str = "gated-kalmanet"
    width: int = 80
    stem_width: int = 32
    depths: tuple[int, int, int, int] = (1, 3, 8, 4)
    heads: tuple[int, int] = (8, 16)
    windows: tuple[int, int] = (14, 7)
    drop_path: float = 0.2
    batch_size: int = 256
    epochs: int = 310
    warmup: float = 20.0
    cooldown: float = 10.0
    learning_rate: float = 5e-4
    initial_learning_rate: float = 1e-6
    final_learning_rate: float = 5e-6
    weight_decay: float = 0.05
    max_grad_norm: float = 5.0
    mixup: float = 0.8
    cutmix: float = 1.0
    label_smoothing: float = 0.1
    augment: str = "rand-m9-mstd0.5-inc1"
    jitter: float = 0.4
    erase: float = 0.25
    shift: int = 0
    bf16: bool = True
    compile: bool = False
    workers: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(get_annotations(VisionRecipe, eval_str=True), vars(self))
        for name, length in (("depths", 4), ("heads", 2), ("windows", 2)):
            sizes = getattr(self, name)
            if not isinstance(sizes, tuple) or len(sizes) != length or not all(type(size) is int for size in sizes):
                raise ArgumentError(name, got=repr(sizes), expected=f"a tuple of {length} integers")
        for name in ("size", "width", "stem_width", "batch_size", "epochs"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, got=getattr(self, name), expected="at least 1")
        for name in ("warmup", "cooldown", "mixup", "cutmix", "weight_decay", "shift", "workers", "jitter"):
            if getattr(self, name) < 0:
                raise ArgumentError(name, got=getattr(self, name), expected="at least 0")
        for name in ("learning_rate", "initial_learning_rate", "final_learning_rate", "max_grad_norm"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ArgumentError(name, got=getattr(self, name), expected="a positive number")
        for name in ("drop_path", "label_smoothing", "erase"):
            if not 0 <= getattr(self, name) < 1:
                raise ArgumentError(name, got=getattr(self, name), expected="at least 0 and below 1")
        if self.warmup > self.epochs:
            raise ArgumentError("warmup", got=self.warmup, expected=f"at most {self.epochs} (`epochs`)")

    @property
    def total_epochs(self) -> float:
        """Number of epochs with cool-down."""
        return self.epochs + self.cooldown

    def learning_rate_factor(self, epoch: float) -> float:
        """Return the learning rate at an epoch as a fraction of `learning_rate`: linear warm-up, cosine, cool-down."""
        if epoch < self.warmup:
            now = self.initial_learning_rate + (self.learning_rate - self.initial_learning_rate) * epoch / self.warmup
        else:
            turn = math.cos(math.pi * min(1.0, epoch / self.epochs))
            now = self.final_learning_rate + (self.learning_rate - self.final_learning_rate) * (1 + turn) / 2
        return now / self.learning_rate

    def save(self, folder: Path) -> None:
        """Write `recipe.json` into `folder`."""
        write_text(folder / RECIPE_FILE, json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> VisionRecipe:
        """Read `recipe.json` of `folder`.

        Raises:
            ArgumentError: there is no such file, it is not a recipe, or a newer version wrote it.
        """
        try:
            values = read_json(folder / RECIPE_FILE)
            check_format(values, folder / RECIPE_FILE)
            known = {field.name for field in fields(cls)}
            shaped: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known
            }
            return cls(**shaped)
        except FormatError:
            raise
        except (OSError, ValueError, TypeError, AttributeError) as error:
            got = f"{str(folder)!r}, whose {RECIPE_FILE} is unreadable ({error})"
            raise ArgumentError("folder", got=got, expected="the folder of a run") from None


DIGITS = VisionRecipe(
    size=64,
    width=16,
    stem_width=16,
    depths=(1, 1, 4, 2),
    heads=(4, 8),
    windows=(4, 2),
    drop_path=0.05,
    batch_size=64,
    epochs=10,
    warmup=1,
    cooldown=0,
    learning_rate=4e-3,
    final_learning_rate=1e-5,
    mixup=0.0,
    cutmix=0.0,
    augment="",
    jitter=0.0,
    erase=0.0,
    shift=6,
    bf16=False,
    workers=0,
)
