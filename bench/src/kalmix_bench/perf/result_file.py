"""Files of results, named by their date, the machine, and what was measured."""

from __future__ import annotations

import argparse
import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kalmix.training.provenance import provenance


def dated_file(folder: Path, machine: str, name: str) -> Path:
    """Return the path of today's results of a machine, such as FOLDER/2026-11-27-nvidia-h200-delta.json.

    Args:
        folder: folder of the file.
        machine: name of the machine or device; other characters than letters and digits become hyphens.
        name: what was measured.
    """
    machine = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    return folder / f"{datetime.date.today()}-{machine}-{name}.json"


def write_rows(rows: Sequence[dict[str, Any]], device: torch.device, name: str, arguments: argparse.Namespace) -> None:
    """Write rows with device, commit, versions and the command's options to a dated file, and print its path.

    Args:
        rows: measurements.
        device: device that was measured.
        name: what was measured.
        arguments: options of the command; `output` is the folder, and `commit` the commit where git is absent.
    """
    origin = provenance(device, arguments.commit)
    options = {option: value for option, value in vars(arguments).items() if option not in ("output", "commit")}
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = dated_file(arguments.output, str(origin["device"]), name)
    file.write_text(json.dumps({**origin, "command": options, "rows": rows}, indent=1) + "\n")
    print(f"wrote {file}")
