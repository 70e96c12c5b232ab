"""The learned collision experiments (appendix E.5): train, ask beyond the training range, write one line a seed."""

from kalmix.training.collision.protocol import PRESETS, STUDIES, Cell, Protocol
from kalmix.training.collision.results import Follow, Results, run
from kalmix.training.collision.trainer import Tell

__all__ = ["PRESETS", "STUDIES", "Cell", "Follow", "Protocol", "Results", "Tell", "run"]
