"""RULER's synthetic tasks, by the names of `kalmix.tasks.make`; `prompts` of each has them under any tokenizer."""

from kalmix.tasks.ruler.counting import COUNTING
from kalmix.tasks.ruler.needles import NEEDLES
from kalmix.tasks.ruler.prompts import Prompts, TextTask
from kalmix.tasks.ruler.tracking import TRACKING

ALL = (*NEEDLES, TRACKING, *COUNTING)

__all__ = ["ALL", "COUNTING", "NEEDLES", "TRACKING", "Prompts", "TextTask"]
