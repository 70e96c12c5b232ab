"""Op `delta`: the delta rule with decays and gains."""

from kalmix.ops._delta.api import delta as delta
from kalmix.ops._delta.spec import SPEC
from kalmix.ops._shared.op_spec import register

register(SPEC)
