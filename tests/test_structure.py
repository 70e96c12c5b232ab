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
    (f"kalmix.models.{x}", "forward") for x in ("backbone", "classification", "huggingface")
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


def test_variables_that_a_triton_loop_changes_start_as_different_values():
    """Triton does not carry `b` through a loop that changes `a` and `b` after `b = a`; its interpreter does."""
    assert not [
        f"{path.relative_to(ROOT)}:{loop.lineno}: {', '.join(names)} start as one value"
        for path in (ROOT / "src").rglob("*.py")
        for function in _triton_functions(ast.parse(path.read_text()))
        for loop in ast.walk(function)
        if isinstance(loop, ast.While) or (isinstance(loop, ast.For) and "static_range" not in ast.unparse(loop.iter))
        for names in _aliases_changed_by(loop, function)
    ]


def _triton_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    functions = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)]
    return [x for x in functions if any("triton.jit" in ast.unparse(y) for y in x.decorator_list)]


def _aliases_changed_by(loop: ast.For | ast.While, function: ast.FunctionDef) -> list[list[str]]:
    """Return groups of variables that begin as the same variable and that the loop assigns."""
    changed = {x.id for x in ast.walk(loop) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    groups: dict[str, set[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and node.lineno < loop.lineno:
            (target,), value = node.targets, node.value
            names, values = (x.elts if isinstance(x, ast.Tuple) else [x] for x in (target, value))
            for name, source in zip(names, values, strict=False):
                if isinstance(name, ast.Name) and isinstance(source, ast.Name):
                    groups.setdefault(source.id, {source.id}).add(name.id)
    return [sorted(group & changed) for group in groups.values() if len(group & changed) > 1]


def _custom_ops(tree: ast.Module) -> set[str]:
    """Return the names of functions that a module registers as custom ops, and their fakes."""
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call) and isinstance(x.func, ast.Name)]
    made = [x for x in calls if x.func.id in ("custom_op", "register_filter_op")]  # pyright: ignore[reportAttributeAccessIssue]
    return {y.id for x in made for y in ast.walk(x) if isinstance(y, ast.Name)}
