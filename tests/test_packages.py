"""kalmix does not import kalmix-bench, and each wheel has only its own files."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from hatchling.builders.wheel import WheelBuilder

from kalmix.cli import app

ROOT = Path(__file__).parents[1]
EXPERIMENTS = {"datasets", "experiments", "runner", "perf", "benchmarks", "tasks", "studies"}


def imported(path: Path) -> set[str]:
    """Return the names of the packages that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("folder", ["src", "tests", "examples"])
def test_the_library_does_not_import_kalmix_bench(folder: str) -> None:
    assert not [path for path in (ROOT / folder).rglob("*.py") if "kalmix_bench" in imported(path)]


@pytest.mark.slow
def test_help_lists_bench_and_does_not_import_it() -> None:
    code = "import sys; from kalmix.cli import main; sys.argv[1:] = ['--help']; import atexit;"
    code += "atexit.register(lambda: print('kalmix_bench' in sys.modules)); main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "bench" in result.stdout and result.stdout.splitlines()[-1] == "False"


def test_bench_without_kalmix_bench_says_how_to_install_it(kalmix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "entry_points", lambda **_: ())
    result = kalmix("bench", "all", "--help")
    assert result.status == 1 and not result.output
    assert "needs the package kalmix-bench" in result.errors and "pip install ./bench" in result.errors


def files_of_wheel(project: Path, folder: Path) -> set[str]:
    (wheel,) = WheelBuilder(str(project)).build(directory=str(folder), versions=["standard"])
    return set(ZipFile(wheel).namelist())


def test_the_wheel_of_kalmix_holds_no_experiments(tmp_path: Path) -> None:
    files = files_of_wheel(ROOT, tmp_path)
    assert {"kalmix/__init__.py", "kalmix/py.typed"} <= files
    assert {name.partition("/")[0] for name in files if ".dist-info/" not in name} == {"kalmix"}
    assert not [name for name in files if EXPERIMENTS & set(Path(name).parts)]
    source = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == source


def test_the_wheel_of_kalmix_bench_holds_the_experiments(tmp_path: Path) -> None:
    files = files_of_wheel(ROOT / "bench", tmp_path)
    assert {name.partition("/")[0] for name in files if ".dist-info/" not in name} == {"kalmix_bench"}
    assert "kalmix_bench/experiments/recall/published.toml" in files
    source = {str(path.relative_to(ROOT / "bench" / "src")) for path in (ROOT / "bench" / "src").rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == source
