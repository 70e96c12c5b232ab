"""RULER's synthetic tasks. `TextTask.prompts` makes their prompts with any tokenizer."""

from kalmix_bench.datasets.ruler.counting import COUNTING
from kalmix_bench.datasets.ruler.needles import NEEDLES
from kalmix_bench.datasets.ruler.prompts import Prompts, TextTask
from kalmix_bench.datasets.ruler.tracking import TRACKING

ALL = (*NEEDLES, TRACKING, *COUNTING)

__all__ = ["ALL", "COUNTING", "NEEDLES", "TRACKING", "Prompts", "TextTask"]
