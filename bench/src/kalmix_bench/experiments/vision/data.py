"""Labelled images (a folder in ImageNet's layout, or scikit-learn's digits) and their augmentation."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from kalmix.errors import ArgumentError
from kalmix_bench.experiments.vision.recipe import VisionRecipe

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's pixel statistics
SUFFIXES = frozenset({".jpeg", ".jpg", ".png", ".bmp", ".webp"})
HELD_OUT = 360  # test images among the 1797 digits


class Images(Dataset):
    """Dataset of `{"pixel_values": [C, H, W], "labels": int}` with its classes and number of channels."""

    classes: list[str]
    channels: int


def load(recipe: VisionRecipe) -> tuple[Images, Images]:
    """Return training and test images.

    Raises:
        ArgumentError: there are no images, or a package that reads or augments them is missing.
    """
    if recipe.images is None:
        return Digits(recipe.size, shift=recipe.shift), Digits(recipe.size, held_out=True)
    root = Path(recipe.images)
    train_set, test_set = (
        Folder(root / "train", train_transform(recipe)),
        Folder(root / "val", eval_transform(recipe.size)),
    )
    if train_set.classes != test_set.classes:
        got = f"{recipe.images!r}, whose train and val have different classes"
        raise ArgumentError("images", got=got, expected="a folder with the same classes in both")
    return train_set, test_set


class Digits(Images):
    """Scikit-learn's 1797 handwritten digits of 8 x 8 pixels, enlarged; a fixed random subset of 360 is the test set.

    Args:
        size: height and width after enlargement.
        held_out: whether to use the test set instead of the training set.
        shift: each image is shifted at random by up to this many pixels.
    """

    channels = 1

    def __init__(self, size: int, *, held_out: bool = False, shift: int = 0) -> None:
        if find_spec("sklearn") is None:
            problem = "is not given, and scikit-learn, which has the digits, is not installed"
            hint = "Or install it with `pip install scikit-learn`"
            raise ArgumentError("images", problem=problem, expected="a folder of images", hint=hint)
        from sklearn.datasets import load_digits

        digits: Any = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        index = order[:HELD_OUT] if held_out else order[HELD_OUT:]
        pixels = (torch.tensor(digits.images[index.numpy()], dtype=torch.float32)[:, None] / 8 - 0.6) / 0.75
        self.images = F.interpolate(pixels, (size, size), mode="bilinear")
        self.labels = torch.tensor(digits.target[index.numpy()], dtype=torch.long)
        self.classes, self.shift = [str(n) for n in range(10)], shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image, shift = self.images[index], self.shift
        if shift:
            down, right = torch.randint(2 * shift + 1, (2,)).tolist()
            around = F.pad(image, (shift,) * 4, value=float(image.min()))
            image = around[:, down : down + image.shape[1], right : right + image.shape[2]]
        return {"pixel_values": image, "labels": self.labels[index]}


class Folder(Images):
    """Images in one subfolder per class, sorted by name; read on access."""

    channels = 3

    def __init__(self, root: Path, transform: Callable[[Any], Tensor]) -> None:
        folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        self.classes = [folder.name for folder in folders]
        self.files = [
            (path, label)
            for label, folder in enumerate(folders)
            for path in sorted(folder.rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.files:
            raise ArgumentError(
                "images", got=f"{str(root)!r}, which has no images", expected="a folder of images for each class"
            )
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        from PIL import Image

        path, label = self.files[index]
        with Image.open(path) as image:
            return {"pixel_values": self.transform(image.convert("RGB")), "labels": label}


def train_transform(recipe: VisionRecipe) -> Callable[[Any], Tensor]:
    """Return the training transform: `timm`'s augmentation if the recipe uses it, otherwise a random crop and flip.

    Raises:
        ArgumentError: the recipe uses `timm`, which is not installed.
    """
    if not (recipe.augment or recipe.jitter or recipe.erase):
        return lambda image: _tensor(_random_crop(image, recipe.size))
    if find_spec("timm") is None:
        problem, hint = "has `augment`, `jitter` or `erase`, which need timm", "Run `pip install 'kalmix[vision]'`"
        raise ArgumentError("recipe", problem=problem, expected="none of them without timm", hint=hint)
    from timm.data.transforms_factory import create_transform

    transform: Any = create_transform(
        recipe.size,
        is_training=True,
        auto_augment=recipe.augment or None,
        color_jitter=recipe.jitter,
        re_prob=recipe.erase,
        re_mode="pixel",
        interpolation="random",
        mean=MEAN,
        std=STD,
    )
    return transform


def eval_transform(size: int) -> Callable[[Any], Tensor]:
    """Return the evaluation transform: resize the shorter side to `size` and crop the center."""

    def transform(image: Any) -> Tensor:
        from PIL import Image

        width, height = image.size
        scale = size / min(width, height)
        width, height = max(size, round(width * scale)), max(size, round(height * scale))
        left, top = (width - size) // 2, (height - size) // 2
        resized = image.resize((width, height), Image.Resampling.BICUBIC)
        return _tensor(resized.crop((left, top, left + size, top + size)))

    return transform


def _random_crop(image: Any, size: int) -> Any:
    """Return a resized crop of 8 to 100% of the area, aspect ratio 3:4 to 4:3, flipped with probability 1/2."""
    from PIL import Image

    width, height = image.size
    area, stretch, x, y, mirror = torch.rand(5).tolist()
    ratio = math.exp((2 * stretch - 1) * math.log(4 / 3))
    area = (0.08 + 0.92 * area) * width * height
    wide, high = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, top = x * (width - wide), y * (height - high)
    crop = image.resize((size, size), Image.Resampling.BICUBIC, (left, top, left + wide, top + high))
    return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror < 0.5 else crop


def _tensor(image: Any) -> Tensor:
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
    return ((pixels / 255 - torch.tensor(MEAN)) / torch.tensor(STD)).permute(2, 0, 1)


def mix_images(images: Tensor, labels: Tensor, classes: int, recipe: VisionRecipe) -> tuple[Tensor, Tensor]:
    """Apply mixup or CutMix to a batch; return images and their class probabilities `[B, classes]`.

    Mixup (Zhang et al., 2018) interpolates two images, CutMix (Yun et al., 2019) pastes a rectangle of one into the
    other.
    Labels are smoothed first. Image i is mixed with image B - 1 - i, all with the same share.
    """
    targets = F.one_hot(labels, classes) * (1 - recipe.label_smoothing) + recipe.label_smoothing / classes
    kinds = [kind for kind in ("mixup", "cutmix") if getattr(recipe, kind)]
    if not kinds:
        return images, targets
    kind = kinds[int(torch.randint(len(kinds), ()))]
    strength = torch.tensor(float(getattr(recipe, kind)))
    share = float(torch.distributions.Beta(strength, strength).sample())  # share of the image itself
    others = images.flip(0)
    if kind == "mixup":
        images = torch.lerp(others, images, share)
    else:
        height, width = images.shape[-2:]
        side = math.sqrt(1 - share)
        (top, bottom), (left, right) = (_span(length, side) for length in (height, width))
        images = images.clone()
        images[..., top:bottom, left:right] = others[..., top:bottom, left:right]
        share = 1 - (bottom - top) * (right - left) / (height * width)
    return images, torch.lerp(targets.flip(0), targets, share)


def _span(length: int, share: float) -> tuple[int, int]:
    """Return start and end of a span with a random center, `share` of the length unless it leaves the image."""
    middle, half = int(torch.randint(length, ())), int(length * share) // 2
    return max(0, middle - half), min(length, middle + half)
