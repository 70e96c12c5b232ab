"""Print the docstrings of 20 public objects, picked by a fixed seed, for a reader who has not seen the code.

    python tests/sample_docstrings.py --seed 0 --count 20

The reader writes down inputs, outputs and errors of each object; a second reader compares them with the code.
"""

import argparse
import importlib
import inspect
import random

MODULES = (
    "kalmix",
    "kalmix.ops",
    "kalmix.layers",
    "kalmix.models",
    "kalmix.designs",
    "kalmix.training",
    "kalmix.testing",
)


def public_objects() -> dict[str, object]:
    """Return public functions and classes by qualified name, without repetitions."""
    found: dict[str, object] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for attribute in sorted(getattr(module, "__all__", ())):
            value = getattr(module, attribute)
            if (inspect.isclass(value) or callable(value)) and all(value is not x for x in found.values()):
                found[f"{name}.{attribute}"] = value
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
