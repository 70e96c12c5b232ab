"""Image classifiers are trained as recipes say, on digits and on folders of images."""

import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import TrainerCallback

from kalmix.errors import ArgumentError
from kalmix_bench.experiments.vision import data as vision_data
from kalmix_bench.experiments.vision.data import Digits, Folder, eval_transform, mix_images, train_transform
from kalmix_bench.experiments.vision.data import load as load_images
from kalmix_bench.experiments.vision.recipe import DIGITS, VisionRecipe
from kalmix_bench.experiments.vision.run import build, load, train

SMALL = replace(DIGITS, size=32, depths=(1, 1, 2, 1), windows=(2, 1), batch_size=32, warmup=0.2, shift=2)


@pytest.mark.slow
def test_learns_digits(tmp_path):
    """Two epochs give an accuracy far above chance (0.1) and falling losses; the model is saved."""
    run = train(replace(SMALL, epochs=2), tmp_path / "run")
    losses = [row["loss"] for row in run.history if "loss" in row]
    assert len(losses) == 2 and losses[-1] < losses[0] - 0.3
    assert run.accuracy > 0.8
    saved = load(tmp_path / "run")
    held_out = Digits(32, held_out=True)
    images = torch.stack([held_out[n]["pixel_values"] for n in range(len(held_out))])
    with torch.no_grad():
        found = saved(images).argmax(-1)
    assert (found == held_out.labels).float().mean().item() == pytest.approx(run.accuracy, abs=0.003)
    assert VisionRecipe.load(tmp_path / "run") == run.recipe
    assert not (tmp_path / "run" / "checkpoints").exists()
    with pytest.raises(ArgumentError, match="holds a run"):
        train(SMALL, tmp_path / "run")


@pytest.mark.slow
def test_resumes(tmp_path):
    """A run that was cut off behind its first epoch ends as if it had not been."""

    class CutOff(TrainerCallback):
        def on_save(self, args, state, control, **_):
            raise KeyboardInterrupt

    recipe = replace(SMALL, width=8, batch_size=128, epochs=2)
    whole = train(recipe, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "cut", callbacks=[CutOff()])
    with pytest.raises(ArgumentError, match="Set `resume`"):
        train(recipe, tmp_path / "cut")
    again = train(recipe, tmp_path / "cut", resume=True)
    assert again.accuracy == whole.accuracy
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], value, rtol=0, atol=0)


def test_the_default_recipe_builds_the_published_model():
    assert sum(p.numel() for p in build(VisionRecipe(), 1000, 3).parameters()) == 31_803_624
    for mixer in ("attention", "gated-deltanet"):
        assert build(replace(SMALL, mixer=mixer), 10, 1)(torch.zeros(2, 1, 32, 32)).shape == (2, 10)


def test_rates():
    """From 1e-6 up to 5e-4 in 20 epochs, along a cosine to 5e-6 at 310, and there until 320."""
    recipe = VisionRecipe()
    assert recipe.total_epochs == 320
    rates = [recipe.learning_rate * recipe.learning_rate_factor(epoch) for epoch in (0, 10, 20, 155, 310, 320)]
    top = 5e-6 + (5e-4 - 5e-6) * (1 + torch.cos(torch.tensor(torch.pi * 20 / 310)).item()) / 2
    assert rates == pytest.approx([1e-6, 2.505e-4, top, 2.525e-4, 5e-6, 5e-6])


def test_digits():
    seen, unseen = Digits(16), Digits(16, held_out=True)
    assert (len(seen), len(unseen)) == (1437, 360)
    assert seen[0]["pixel_values"].shape == (1, 16, 16)
    assert not {tuple(x.flatten().tolist()) for x in unseen.images} & {tuple(x.flatten().tolist()) for x in seen.images}
    assert abs(float(seen.images.mean())) < 0.1 and abs(float(seen.images.std()) - 1) < 0.2
    shifted = Digits(16, shift=3)
    torch.manual_seed(0)
    assert len({shifted[0]["pixel_values"].sum().item() for _ in range(20)}) > 1
    assert shifted[0]["pixel_values"].shape == (1, 16, 16)


@pytest.fixture
def folder(tmp_path):
    """Create twelve images of several sizes, in two classes of different colour."""
    for split in ("train", "val"):
        for name, colour in (("apple", (200, 30, 30)), ("lime", (30, 200, 30))):
            (tmp_path / split / name).mkdir(parents=True)
            for n in range(3):
                Image.new("RGB", (40 + 10 * n, 50), colour).save(tmp_path / split / name / f"{n}.png")
            (tmp_path / split / name / "notes.txt").write_text("not an image")
    return tmp_path


def test_folder(folder, tmp_path):
    recipe = replace(SMALL, images=str(folder), epochs=1, batch_size=2, mixup=0.8, cutmix=1.0)
    seen, unseen = load_images(recipe)
    assert seen.classes == ["apple", "lime"] and len(seen) == len(unseen) == 6
    torch.manual_seed(0)
    for data in (seen, unseen):
        for n in range(6):
            image = data[n]["pixel_values"]
            assert image.shape == (3, 32, 32) and data[n]["labels"] == n // 3
            assert (image[n // 3] > image[1 - n // 3]).all()
    run = train(recipe, tmp_path / "run")
    assert 0 <= run.accuracy <= 1 and run.model.in_chans == 3 and run.model.num_classes == 2


def test_centre():
    """The shorter side is resized, and the longer one is cropped on both sides."""
    image = Image.new("RGB", (60, 30), (0, 0, 0))
    image.paste((255, 255, 255), (15, 0, 45, 30))
    found = eval_transform(10)(image)
    assert found.shape == (3, 10, 10)
    torch.testing.assert_close(
        found[:, 5, 5], (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    )
    assert (found[0, :, 1:-1] > 2).all()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: Folder(path / "nothing", eval_transform(8)), "has no images"),
        (lambda path: VisionRecipe(learning_rate=0.0), "learning_rate"),
        (lambda path: VisionRecipe(warmup=400), "warmup"),
        (lambda path: VisionRecipe(drop_path=1.0), "drop_path"),
        (lambda path: VisionRecipe.load(path), "unreadable"),
    ],
)
def test_mistakes(make, says, tmp_path):
    with pytest.raises(ArgumentError, match=says):
        make(tmp_path)


def test_augmentation_without_timm(monkeypatch):
    monkeypatch.setattr("kalmix_bench.experiments.vision.data.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=r"kalmix\[vision\]"):
        train_transform(VisionRecipe())
    with pytest.raises(ArgumentError, match="scikit-learn"):
        Digits(8)


def test_mixed():
    """Labels equal the shares of the mixed images; label smoothing spreads a tenth."""
    labels = torch.tensor([0, 1, 2, 3])
    images = labels[:, None, None, None].float().expand(4, 1, 20, 20)
    plain, shown = mix_images(images, labels, 5, replace(SMALL, mixup=0.0, cutmix=0.0, label_smoothing=0.1))
    assert torch.equal(plain, images)
    torch.testing.assert_close(shown, 0.9 * torch.eye(5)[:4] + 0.02)
    torch.manual_seed(0)
    for kind in ("mixup", "cutmix"):
        recipe = replace(SMALL, **{"mixup": 0.0, "cutmix": 0.0, "label_smoothing": 0.0, kind: 1.0})
        shares = []
        for _ in range(50):
            found, shown = mix_images(images, labels, 5, recipe)
            torch.testing.assert_close(shown.sum(-1), torch.ones(4))
            torch.testing.assert_close(shown @ torch.arange(5.0), found.mean((1, 2, 3)))
            assert kind == "mixup" or set(found[0].unique().tolist()) <= {0.0, 3.0}
            shares.append(shown[0, 0].item())
        assert max(shares) - min(shares) > 0.4


def test_augmentation_by_timm():
    pytest.importorskip("timm", reason="timm is in an extra of its own, as it brings another torch")
    transform = train_transform(VisionRecipe())
    image = Image.effect_noise((300, 260), 60).convert("RGB")
    torch.manual_seed(0)
    first, second = transform(image), transform(image)
    assert first.shape == (3, 224, 224) and first.dtype == torch.float32 and not torch.equal(first, second)


def test_crops_are_a_part_of_the_image_between_3_4_and_4_3():
    boxes = []

    class Image:
        size = (6000, 6000)

        def resize(self, size, resample, box):
            boxes.append(box)
            return self

        def transpose(self, method):
            return self

    torch.manual_seed(0)
    for _ in range(300):
        vision_data._random_crop(Image(), 8)
    shapes = torch.tensor([(right - left, bottom - top) for left, top, right, bottom in boxes])
    ratios, areas = shapes[:, 0] / shapes[:, 1], shapes.prod(1) / 6000**2
    assert 0.74 < float(ratios.min()) < 0.78 and 1.28 < float(ratios.max()) < 1.34
    assert 0.07 < float(areas.min()) < 0.15 and float(areas.max()) <= 1


@pytest.mark.slow
def test_the_example_trains(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_vision.py", "--mixer", "attention", "--epochs", "1"])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train_vision.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert len(re.findall(r"epoch +\d+ +loss \d", said)) == 1
    assert float(re.search(r"accuracy ([0-9.]+)%$", said.strip())[1]) > 20
