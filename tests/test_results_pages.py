"""Pages of docs/results name a command and files of results that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OTHERS = {"index", "first-hour", "docstrings", "huggingface", "robustness", "speed"}  # `speed` has generated tables
PAGES = sorted(path.stem for path in (ROOT / "docs" / "results").glob("*.md") if path.stem not in OTHERS)


@pytest.mark.parametrize("name", PAGES)
def test_page_names_a_command_and_existing_results(name: str) -> None:
    text = (ROOT / "docs" / "results" / f"{name}.md").read_text()
    assert re.search(r"kalmix bench |python -m kalmix|python examples/", text), "no command"
    files = re.findall(r"bench/results/[\w./-]*\w", text)
    assert files and all((ROOT / file).exists() for file in files), files
