"""The command line: `kalmix train`, `generate`, `inspect`, `explain`, `bench` and `doctor`."""

from kalmix.cli.app import main

__all__ = ["main"]
