"""Provenance of a result: versions, device and commit."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import kalmix


def provenance(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Return the provenance of a result, for JSON.

    Args:
        device: device that computed the result.
        commit: commit of kalmix, for a machine without git. Default: that of the work tree.

    Returns:
        "versions" of kalmix, Python and libraries; name of the "device"; "commit" of kalmix, or `None` if unknown.
    """
    return {
        "versions": {
            "kalmix": kalmix.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: _version(name) for name in ("triton", "transformers", "flash-linear-attention")},
        },
        "device": _device_name(device),
        "commit": commit or _commit(),
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
    """Return the commit of the work tree that contains this package, marked if files differ; `None` outside one."""
    folder = Path(kalmix.__file__).parent
    git = ("git", "-C", str(folder))
    try:
        subprocess.run((*git, "ls-files", "--error-unmatch", "__init__.py"), check=True, capture_output=True)
        describe = (*git, "describe", "--always", "--dirty", "--abbrev=12")
        completed = subprocess.run(describe, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return completed.stdout.decode().strip()
