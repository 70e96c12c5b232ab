"""Examples in docstrings (`>>>`) of both packages run and print what they show, without a network."""

from __future__ import annotations

import doctest
import socket
from importlib import import_module
from pathlib import Path

import pytest
import torch

import kalmix

ROOT = Path(__file__).parents[1]
SOURCES = (ROOT / "src", ROOT / "bench" / "src")
EXTRAS = {  # packages that an extra of kalmix installs; an example that needs an absent one is skipped
    *("accelerate", "datasets", "lm_eval", "matplotlib", "numpy", "rich", "safetensors", "sklearn", "statsmodels"),
    *("timm", "tokenizers", "torchvision", "transformers", "triton", "typer"),
}


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
        if (error.name or "").partition(".")[0] in EXTRAS:
            pytest.skip(f"{error.name} is not installed")
        raise
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    examples = [x for x in doctest.DocTestFinder(exclude_empty=True).find(module, name) if x.examples]
    assert examples, f"{name} shows an example in a comment or a private place, where doctest does not find it"
    for example in examples:
        example.globs = {"torch": torch, "kalmix": kalmix, "__name__": name}
        torch.manual_seed(0)
        runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)
