"""A full disk ends a command with one error that names the path; with space the command can continue."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from full_disk import KIB, SIZES, check_refusal

from .conftest import SMALL


@pytest.mark.parametrize(("size", "mount"), SIZES)
@pytest.mark.slow
def test_full_disk_ends_training_with_one_error(kalmix, disk, text_file: Path, size: int, mount: bool) -> None:
    space = disk(size, mount=mount)
    output = space.folder / "run"
    train = ("train", "--text", text_file, *SMALL, "--layers", "kla", "--steps", 6, "--output", output)
    check_refusal(kalmix(*train), output)
    space.grow()
    result = kalmix(*(("train", "--resume", "--output", output) if (output / "recipe.json").exists() else train))
    assert result.status == 0, result.errors


@pytest.mark.slow
def test_full_disk_ends_a_report_with_one_error(kalmix, disk, run_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    space = disk(8 * KIB, mount=False)
    check_refusal(kalmix("report", tmp_path / "run"), tmp_path / "run")
    space.grow()
    assert kalmix("report", tmp_path / "run").status == 0
