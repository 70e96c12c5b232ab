"""Examples in docstrings (`>>>`) of both packages run and print what they show, without a network."""

from __future__ import annotations

import doctest
import inspect
import re
import socket
from importlib import import_module
from pathlib import Path

import pytest
import torch
from sample_docstrings import public_objects

import kalmix
from kalmix._extras import missing_package

ROOT = Path(__file__).parents[1]
SOURCES = (ROOT / "src", ROOT / "bench" / "src")
RUNS = re.compile(r"^\s*>>> (?!.*doctest: \+SKIP)(?!from |import )", re.MULTILINE)
# They load a folder that the reader has to download.
NOT_RUN = {"kalmix.models.convert.load_gated_deltanet", "kalmix.models.convert_kalmanet.load_gated_kalmanet"}


def modules_with_examples() -> list[str]:
    """Return the names of modules whose source holds an example."""
    found = [(root, path) for root in SOURCES for path in sorted(root.rglob("*.py")) if ">>> " in path.read_text()]
    names = [".".join(path.relative_to(root).with_suffix("").parts) for root, path in found]
    return [name.removesuffix(".__init__") for name in names]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("an example must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("name", modules_with_examples())
@pytest.mark.usefixtures("no_network")
def test_examples_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each docstring runs by itself, in an empty folder; only `torch` and `kalmix` are imported for it."""
    monkeypatch.chdir(tmp_path)
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if missing_package(error.name) is None:
            raise
        pytest.skip(f"{error.name} is not installed")
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    examples = [x for x in doctest.DocTestFinder(exclude_empty=True).find(module, name) if x.examples]
    assert examples, f"{name} shows an example in a comment or a private place, where doctest does not find it"
    for example in examples:
        example.globs = {"torch": torch, "kalmix": kalmix, "__name__": name}
        torch.manual_seed(0)
        runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)


def test_every_public_object_has_an_example_that_runs() -> None:
    """Each class or function that a module or an API page exports shows at least one call in its docstring."""
    objects = public_objects()
    assert len(objects) > 80
    lacking = {name for name, value in objects.items() if not RUNS.search(inspect.getdoc(value) or "")}
    assert lacking == NOT_RUN
