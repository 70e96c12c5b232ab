"""The op `attend`: Adaptive Filter Attention."""

from kalmix.ops._attend.api import Weight as Weight
from kalmix.ops._attend.api import attend as attend
from kalmix.ops._attend.dynamics import Dynamics as Dynamics
from kalmix.ops._attend.dynamics import kappa as kappa
from kalmix.ops._attend.radial import attend_radial as attend_radial
from kalmix.ops._attend.spec import SPEC
from kalmix.ops._shared.op_spec import register

register(SPEC)
