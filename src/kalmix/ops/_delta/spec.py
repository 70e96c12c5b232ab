"""Registered description of the op `delta`."""

from kalmix.beliefs import PointBelief
from kalmix.designs.kinds import MEMORY, RESET, Algebra
from kalmix.ops._additive.api import default_prior
from kalmix.ops._delta.api import delta
from kalmix.ops._delta.kernels import KERNELS
from kalmix.ops._delta.lowering import lower
from kalmix.ops._delta.oracle import RECURSION
from kalmix.ops._delta.update import delta as update
from kalmix.ops._delta.update import delta_as_filtered
from kalmix.ops._shared.op_spec import OpSpec

SPEC = OpSpec(
    algebra=Algebra(
        op="delta",
        evidence=MEMORY,
        covariance=RESET,
        decays=("none", "head", "key"),
        update="M_t = A M_{t-1} + h k (v - (A M_{t-1})'k)',  h = reset / (r^2 + reset |k|^2)",
    ),
    function=delta,
    kernels=KERNELS,
    belief=PointBelief,
    lower=lower,
    recursion=RECURSION,
    least_noise=1e-4,
    update=update,
    update_as_filtered=delta_as_filtered,
    prior=default_prior,
)
