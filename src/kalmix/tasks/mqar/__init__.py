"""Multi-query associative recall, by the names of `kalmix.tasks.make`."""

from kalmix.tasks.mqar.shared import BLOCK, SHARED, UPDATE
from kalmix.tasks.mqar.zoology import FORGETTING, MQAR

ALL = (MQAR, FORGETTING, SHARED, UPDATE, BLOCK)
