"""Check of the CPU time that a command takes to start."""

from __future__ import annotations

import json
import subprocess
import sys

TRIALS = 5  # other work may share the machine
# Runs a command; writes the CPU time until torch is imported, that until the end, and the imported modules.
MEASURE = """
import json, time
import torch
imported = time.process_time()
import runpy, sys
try:
    runpy.run_module("kalmix.cli", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    assert not ended.code, ended.code
print(json.dumps([imported, time.process_time(), [*sys.modules]]), file=sys.stderr)
"""


def check_start_time(line: str) -> set[str]:
    """Check that `kalmix LINE` takes less than 1 s of CPU time beyond `import torch` in one of five trials.

    On a busy machine all CPU times are longer; then it may take as much as `import torch`. Returns the names of the
    modules that it imports.
    """
    command, tried = [sys.executable, "-c", MEASURE, *line.split()], []
    for _ in range(TRIALS):
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
        torch, whole, modules = json.loads(ended.stderr.splitlines()[-1])
        if whole - torch < max(1, torch):
            return set(modules)
        tried.append((torch, whole))
    raise AssertionError(f"{line}: seconds of `import torch` and of the command: {tried}")
