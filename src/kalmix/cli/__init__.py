"""Command line: `kalmix train`, `report`, `generate`, `inspect`, `list`, `explain`, `doctor` and `bench`."""

from kalmix.cli.app import main

__all__ = ["main"]
