"""The op `delta`: a memory that corrects its errors."""

from kalmix.ops._delta.api import delta as delta
from kalmix.ops._delta.spec import SPEC
from kalmix.ops._shared.op_spec import register

register(SPEC)
