"""RULER's synthetic tasks, named as in `kalmix_bench.datasets.make`; `prompts` of each has them under any tokenizer."""

from kalmix_bench.datasets.ruler.counting import COUNTING
from kalmix_bench.datasets.ruler.needles import NEEDLES
from kalmix_bench.datasets.ruler.prompts import Prompts, TextTask
from kalmix_bench.datasets.ruler.tracking import TRACKING

ALL = (*NEEDLES, TRACKING, *COUNTING)

__all__ = ["ALL", "COUNTING", "NEEDLES", "TRACKING", "Prompts", "TextTask"]
