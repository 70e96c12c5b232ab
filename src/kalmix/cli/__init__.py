"""The command line: `kalmix train`, `generate`, `inspect`, `explain` and `doctor`."""

from kalmix.cli.app import main

__all__ = ["main"]
