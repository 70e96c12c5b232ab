"""Name of a file of results: its date, the machine, and what was measured."""

from __future__ import annotations

import datetime
import re
from pathlib import Path


def dated_file(folder: Path, machine: str, name: str) -> Path:
    """Return the path of today's results of a machine, such as FOLDER/2026-11-27-nvidia-h200-delta.json.

    Args:
        folder: folder of the file.
        machine: name of the machine or device; other characters than letters and digits become hyphens.
        name: what was measured.
    """
    machine = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    return folder / f"{datetime.date.today()}-{machine}-{name}.json"
