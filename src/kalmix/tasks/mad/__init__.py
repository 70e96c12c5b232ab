"""The six tasks of MAD, and one of another paper that its generator makes, by the names of `kalmix.tasks.make`."""

from kalmix.tasks.mad.compression import COMPRESSION
from kalmix.tasks.mad.copying import SELECTIVE_COPYING
from kalmix.tasks.mad.fuzzy import FUZZY
from kalmix.tasks.mad.long import LONG
from kalmix.tasks.mad.memorization import MEMORIZATION
from kalmix.tasks.mad.recall import IN_CONTEXT, NOISY

ALL = (IN_CONTEXT, NOISY, FUZZY, SELECTIVE_COPYING, COMPRESSION, MEMORIZATION, LONG)
