"""The built wheel in an environment of its own: versions, metadata, the command line, filtering and training."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import kalmix

ROOT = Path(__file__).parents[1]
FILTER = """
import torch, kalmix
from kalmix.layers import KLA
y, state = KLA(8)(torch.randn(1, 9, 8))
print(kalmix.__file__, *y.shape)
"""
EXTRAS = """
from kalmix._extras import packages_of_extras
print(*packages_of_extras())
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def in_wheel(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Install the wheel beside the dependencies of this environment, and return a function that runs commands there."""
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    assert kalmix.__version__ in Path(wheel).name
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    site = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    Path(site.strip(), "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    install = ["install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", "--no-warn-script-location"]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install, wheel], check=True)

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [folder / "env" / "bin" / program, *arguments]
        environment = {"COLUMNS": "80", "OMP_NUM_THREADS": "1"}  # more threads than free cores slow each other down
        return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)

    return run


def test_citation_has_the_version() -> None:
    assert f"\nversion: {kalmix.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.slow
def test_wheel_filters(in_wheel: Run) -> None:
    result = in_wheel("python", "-c", FILTER)
    assert result.returncode == 0, result.stderr
    assert str(ROOT) not in result.stdout and result.stdout.split()[1:] == ["1", "9", "8"]


@pytest.mark.slow
def test_wheel_has_commands_and_extras(in_wheel: Run) -> None:
    assert in_wheel("kalmix", "--version").stdout.startswith(f"kalmix {kalmix.__version__} ")
    for line, word in {"--help": "train", "list layers": "gated-kalmanet", "explain kla": "Kalman"}.items():
        result = in_wheel("kalmix", *line.split())
        assert result.returncode == 0 and word in result.stdout, result.stderr
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(in_wheel("python", "-c", EXTRAS).stdout.split()) == declared.keys() - {"dev", "docs"}


@pytest.mark.slow
def test_wheel_trains_and_inspects(in_wheel: Run, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"Line {n}: {n} and {n} make {2 * n}." for n in range(400)))
    small = ["--hidden-size", "8", "--seq-len", "16", "--batch-size", "2", "--vocab-size", "280", "--steps", "3"]
    text, output = str(tmp_path / "text.txt"), str(tmp_path / "run")
    result = in_wheel("kalmix", "train", "--text", text, "--output", output, "--layers", "kla", *small)
    assert result.returncode == 0, result.stderr
    result = in_wheel("kalmix", "inspect", output, "--text", "Line 3", "--output", str(tmp_path))
    assert result.returncode == 0 and (tmp_path / "beliefs.html").exists(), result.stderr
