"""Results that are damaged or made to do harm: each gives one clear line and the status of a mistake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

OTHER_KEYS = b'{"seconds": 1, "versions": {}, "parts": 3}\n'
CONTENTS = {"FIFO": None, "not UTF-8": b"\xff\xfe", "nested deep": b"[" * 100_000, "numbers": b"1\n2\n"}
CASES = [("beliefs", name, content) for name, content in (CONTENTS | {"other keys": OTHER_KEYS}).items()]
CASES += [("report", name, content) for name, content in CONTENTS.items()]


@pytest.mark.parametrize(("command", "content"), [pytest.param(c, b, id=f"{c} {name}") for c, name, b in CASES])
def test_hostile_results_are_one_clear_line(
    kalmix, in_time, tmp_path: Path, command: str, content: bytes | None
) -> None:
    results = tmp_path / "results.jsonl"
    os.mkfifo(results) if content is None else results.write_bytes(content)
    result = kalmix("bench", command, tmp_path)
    line = result.errors.strip()
    assert result.status == 2, result
    assert line.startswith("error: ") and "\n" not in line and "results" in line, line
    assert len(line.replace(str(tmp_path), "")) < 400 and "Traceback" not in result.output + result.errors
