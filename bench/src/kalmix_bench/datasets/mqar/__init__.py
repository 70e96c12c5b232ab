"""Multi-query associative recall, by the names of `kalmix_bench.datasets.make`."""

from kalmix_bench.datasets.mqar.shared import BLOCK, SHARED, UPDATE
from kalmix_bench.datasets.mqar.zoology import FORGETTING, MQAR

ALL = (MQAR, FORGETTING, SHARED, UPDATE, BLOCK)
