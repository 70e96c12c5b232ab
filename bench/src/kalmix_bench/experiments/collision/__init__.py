"""The learned collision experiments (appendix E.5): train, ask beyond the training range, write one line a seed."""

from kalmix_bench.experiments.collision.protocol import PRESETS, STUDIES, Cell, Protocol
from kalmix_bench.experiments.collision.results import run

__all__ = ["PRESETS", "STUDIES", "Cell", "Protocol", "run"]
