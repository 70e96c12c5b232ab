"""Tasks of multi-query associative recall: Zoology's, and those of Memory by Design."""

from kalmix_bench.datasets.mqar.shared import BLOCK, REWRITE, SHARED, UPDATE
from kalmix_bench.datasets.mqar.zoology import FORGETTING, MQAR

ALL = (MQAR, FORGETTING, SHARED, UPDATE, REWRITE, BLOCK)
