"""The op `dense`: a memory with a full covariance between its keys (the Bayesian Layer)."""

from kalmix.ops._dense.api import LEAST_NOISE as LEAST_NOISE
from kalmix.ops._dense.api import dense as dense
from kalmix.ops._dense.spec import SPEC
from kalmix.ops._shared.op_spec import register

register(SPEC)
