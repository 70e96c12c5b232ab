"""Print the docstrings of 20 public objects, picked by a fixed seed, for a reader who has not seen the code.

    python tests/sample_docstrings.py --seed 0 --count 20

The reader writes down inputs, outputs and errors of each object; a second reader compares them with the code.
"""

import argparse
import importlib
import inspect
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = (
    "kalmix",
    "kalmix.ops",
    "kalmix.ops.experimental",
    "kalmix.layers",
    "kalmix.models",
    "kalmix.designs",
    "kalmix.training",
    "kalmix.analysis.plots",
)
ON_A_PAGE = re.compile(r"^::: (\S+)$", re.MULTILINE)


def public_names() -> Iterator[str]:
    """Yield the names that public modules export, and those that pages of the documentation describe."""
    for name in MODULES:
        module = importlib.import_module(name)
        exported = getattr(module, "__all__", [x for x in vars(module) if not x.startswith("_")])
        yield from (f"{name}.{attribute}" for attribute in sorted(exported))
    for page in sorted((ROOT / "docs").rglob("*.md")):
        yield from ON_A_PAGE.findall(page.read_text(encoding="utf-8"))


def public_objects() -> dict[str, object]:
    """Return public functions and classes of kalmix by qualified name, without repetitions."""
    found: dict[str, object] = {}
    for name in public_names():
        module, _, attribute = name.rpartition(".")
        value = getattr(importlib.import_module(module), attribute)
        known = any(value is x for x in found.values())
        if callable(value) and not known and value.__module__.startswith("kalmix."):
            found[name] = value
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    arguments = parser.parse_args()
    objects = public_objects()
    for name in sorted(random.Random(arguments.seed).sample(sorted(objects), arguments.count)):
        value = objects[name]
        try:
            signature = str(inspect.signature(value))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            signature = ""
        print(f"{'=' * 100}\n{name}{signature}\n\n{inspect.getdoc(value)}\n")


if __name__ == "__main__":
    main()
