"""A full disk ends a command with one sentence that names the path; once there is space, the command goes on."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kalmix_bench.experiments.recall import Part, Protocol, Shape, presets
from kalmix_bench.experiments.recall import evaluation_callback as judge

from .conftest import SMALL

KIB = 1024
STUDY = presets.Study(
    "mad/selective-copying",
    (Part.of(8, 4, seq_len=12, num_tokens_to_copy=2),),
    (Shape(8, state=32, heads=2),),
    Protocol(epochs=3, batch=4, rate=1e-3),
    ("kla",),
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.BENCHES["mad"], "laptop", (STUDY,))
    monkeypatch.setattr(judge, "SAVED", 0.0)


class Disk:
    """A folder in which space runs out: a small file system where one can be mounted, else a limit on file sizes."""

    def __init__(self, folder: Path, size: int, mount: bool) -> None:
        self.folder = folder
        folder.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        self.mounted = mount and os.geteuid() == 0 and not subprocess.run(["mount", *options], check=False).returncode
        self.former = resource.getrlimit(resource.RLIMIT_FSIZE)
        if not self.mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, self.former[1]))

    def grow(self) -> None:
        """Give back all space."""
        if self.mounted:
            subprocess.run(["mount", "-o", "remount,size=64m", str(self.folder)], check=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, self.former)

    def close(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.former)
        if self.mounted:
            subprocess.run(["umount", str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    disks: list[Disk] = []

    def make(size: int, *, mount: bool) -> Disk:
        disks.append(Disk(tmp_path / "disk", size, mount))
        return disks[-1]

    yield make
    for each in disks:
        each.close()


QUICK = [(12 * KIB, False), (16 * KIB, True)]
SLOW = [(100, False), (2 * KIB, False), (40 * KIB, False), (4 * KIB, True), (96 * KIB, True)]
SIZES = [*QUICK, *(pytest.param(*size, marks=pytest.mark.slow) for size in SLOW)]


def check_refusal(told, folder: Path) -> None:
    assert told.status == 1, told.errors
    said = [line for line in told.errors.splitlines() if "rror" in line]
    assert len(said) == 1 and said[0].startswith("error: ") and str(folder) in said[0], told.errors
    assert "Traceback" not in told.output + told.errors


@pytest.mark.parametrize(("size", "mount"), SIZES)
def test_a_full_disk_ends_training_with_a_sentence(kalmix, disk, text_file: Path, size: int, mount: bool) -> None:
    space = disk(size, mount=mount)
    output = space.folder / "run"
    train = ("train", "--text", text_file, *SMALL, "--layers", "kla", "--steps", 6, "--output", output)
    check_refusal(kalmix(*train), output)
    space.grow()
    told = kalmix(*(("train", "--resume", "--output", output) if (output / "recipe.json").exists() else train))
    assert told.status == 0, told.errors


@pytest.mark.parametrize(("size", "mount"), SIZES)
def test_a_full_disk_ends_a_sweep_with_a_sentence(kalmix, disk, size: int, mount: bool) -> None:
    space = disk(size, mount=mount)
    bench = ("bench", "mad", "--device", "cpu", "--output", space.folder / "run")
    check_refusal(kalmix(*bench), space.folder / "run")
    space.grow()
    told = kalmix(*bench)
    assert told.status == 0 and "report.md" in told.output, told.errors


def test_a_full_disk_ends_a_report_with_a_sentence(kalmix, disk, run_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    space = disk(8 * KIB, mount=False)
    check_refusal(kalmix("report", tmp_path / "run"), tmp_path / "run")
    space.grow()
    assert kalmix("report", tmp_path / "run").status == 0
