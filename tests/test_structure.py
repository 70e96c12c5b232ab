"""The source tree: no circles of imports, no long files, no long lists of parameters."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from inspect import isfunction
from pathlib import Path

import grimp
import pytest

import kalmix
from kalmix import ops
from kalmix.ops import experimental

ROOT = Path(__file__).parents[1]
MOST_LINES = 400
SUFFIXES = {".py", ".cu", ".cuh"}
MOST_PARAMETERS = 8
FLAT = {"triton", "custom_op", "cli"}  # folders and files of Triton kernels, custom ops and commands
# What users call may have many options: ops, constructors, and the `forward` that transformers prescribes.
OPS = [x for package in (kalmix, ops, experimental) for x in vars(package).values() if isfunction(x)]
PUBLIC = {(x.__module__, x.__name__) for x in OPS} | {
    (f"kalmix.models.{x}", "forward") for x in ("backbone", "huggingface")
}


def test_no_modules_import_each_other_in_a_circle():
    graph = grimp.build_graph("kalmix", "kalmix_bench", exclude_type_checking_imports=True)
    assert len(graph.modules) > 300
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_no_file_is_long():
    sources = [x for folder in ("src", "bench/src") for x in (ROOT / folder).rglob("*") if x.suffix in SUFFIXES]
    lines = {str(x.relative_to(ROOT)): len(x.read_text().splitlines()) for x in sources}
    assert len(lines) > 300
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}


def test_functions_take_few_parameters():
    """Signals, dynamics and options travel as objects; only custom ops take their tensors one by one."""
    found = {}
    for path in (ROOT / "src").rglob("*.py"):
        module = path.relative_to(ROOT / "src").with_suffix("").parts
        if FLAT.intersection(module):
            continue
        tree = ast.parse(path.read_text())
        skipped = {"__init__"} | _custom_ops(tree)
        for x in ast.walk(tree):
            if not isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if x.name not in skipped and (".".join(module), x.name) not in PUBLIC:
                every = ast.walk(x.args)
                count = sum(isinstance(y, ast.arg) and y.arg not in ("self", "cls") for y in every)
                found[f"{'.'.join(module)}.{x.name}:{x.lineno}"] = count
    assert len(found) > 900
    assert not {name: count for name, count in found.items() if count > MOST_PARAMETERS}


def test_named_tuples_are_not_changed_by_replace():
    """Compiled with torch 2.11, a graph returns an empty tuple for `x._replace(...)`; see `replace_fields`."""
    files = [x for x in (ROOT / "src").rglob("*.py") if "triton" not in x.parts]  # Triton kernels are custom ops
    assert len(files) > 180
    assert not [str(x.relative_to(ROOT)) for x in files if "._replace(" in x.read_text()]


def _custom_ops(tree: ast.Module) -> set[str]:
    """Return the names of functions that a module registers as custom ops, and their fakes."""
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call) and isinstance(x.func, ast.Name)]
    made = [x for x in calls if x.func.id in ("custom_op", "register_filter_op")]  # pyright: ignore[reportAttributeAccessIssue]
    return {y.id for x in made for y in ast.walk(x) if isinstance(y, ast.Name)}
