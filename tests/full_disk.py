"""Folders in which space runs out, and how a command must report that."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

import pytest

KIB = 1024


QUICK = [(12 * KIB, False), (16 * KIB, True)]
SLOW = [(100, False), (2 * KIB, False), (40 * KIB, False), (4 * KIB, True), (96 * KIB, True)]
SIZES = [*QUICK, *(pytest.param(*size, marks=pytest.mark.slow) for size in SLOW)]


def check_refusal(result, folder: Path) -> None:
    assert result.status == 1, result.errors
    said = [line for line in result.errors.splitlines() if "rror" in line]
    assert len(said) == 1 and said[0].startswith("error: ") and str(folder) in said[0], result.errors
    assert "Traceback" not in result.output + result.errors


class Disk:
    """A folder in which space runs out: a small file system where one can be mounted, else a limit on file sizes."""

    def __init__(self, folder: Path, size: int, mount: bool) -> None:
        self.folder = folder
        folder.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        self.mounted = mount and os.geteuid() == 0 and not subprocess.run(["mount", *options], check=False).returncode
        self.former = resource.getrlimit(resource.RLIMIT_FSIZE)
        if not self.mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, self.former[1]))

    def grow(self) -> None:
        """Give back all space."""
        if self.mounted:
            subprocess.run(["mount", "-o", "remount,size=64m", str(self.folder)], check=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, self.former)

    def close(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.former)
        if self.mounted:
            subprocess.run(["umount", str(self.folder)], check=True)
