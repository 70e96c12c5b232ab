"""Where a result comes from: versions, device, and the commit where it is known."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import kalmix


def provenance(device: torch.device) -> dict[str, Any]:
    """Versions of kalmix, Python, torch and Triton, the device by name, and the commit of kalmix; JSON as it is."""
    return {
        "versions": {
            "kalmix": kalmix.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
        },
        "device": _device_name(device),
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {device.type}, {torch.get_num_threads()} threads"


def _commit() -> str | None:
    """The commit whose work tree this package is part of, marked where files differ from it; `None` elsewhere."""
    folder = Path(kalmix.__file__).parent
    git = ("git", "-C", str(folder))
    try:
        subprocess.run((*git, "ls-files", "--error-unmatch", "__init__.py"), check=True, capture_output=True)
        describe = (*git, "describe", "--always", "--dirty", "--abbrev=12")
        completed = subprocess.run(describe, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return completed.stdout.decode().strip()
