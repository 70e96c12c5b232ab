"""The six tasks of MAD, and the long-context recall task of Kalman Linear Attention, which MAD's generator makes."""

from kalmix_bench.datasets.mad.compression import COMPRESSION
from kalmix_bench.datasets.mad.copying import SELECTIVE_COPYING
from kalmix_bench.datasets.mad.fuzzy import FUZZY
from kalmix_bench.datasets.mad.long import LONG
from kalmix_bench.datasets.mad.memorization import MEMORIZATION
from kalmix_bench.datasets.mad.recall import IN_CONTEXT, NOISY

ALL = (IN_CONTEXT, NOISY, FUZZY, SELECTIVE_COPYING, COMPRESSION, MEMORIZATION, LONG)
