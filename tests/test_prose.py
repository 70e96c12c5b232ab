"""Docstrings of both packages open with a verb or a noun phrase, not with a relative or a preposition."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPENINGS = re.compile(r"(What|How|Of|As|Where|Whose|The same)\b")


def test_docstrings_open_plainly() -> None:
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    docstrings: dict[str, str] = {}
    for folder in ("src", "bench/src"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
            found = [(node, ast.get_docstring(node)) for node in nodes]
            name = str(path.relative_to(ROOT))
            docstrings |= {f"{name}:{getattr(node, 'lineno', 1)}": text for node, text in found if text}
    assert len(docstrings) > 2000
    refused = {place: text.splitlines()[0] for place, text in docstrings.items() if OPENINGS.match(text)}
    assert not refused
