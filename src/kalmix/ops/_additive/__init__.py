"""Op `additive`: linear attention with decays and gains."""

from kalmix.ops._additive.api import additive as additive
from kalmix.ops._additive.spec import SPEC
from kalmix.ops._shared.op_spec import register

register(SPEC)
