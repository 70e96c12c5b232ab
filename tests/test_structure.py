"""The source tree: modules import each other without circles, and no file is long."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
MOST_LINES = 400
SUFFIXES = {".py", ".cu", ".cuh"}


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
