"""Registered description of the op `additive`."""

from kalmix.beliefs import PointBelief
from kalmix.designs.kinds import INPUT, NONE, Algebra
from kalmix.ops._additive.api import additive, default_prior
from kalmix.ops._additive.kernels import KERNELS
from kalmix.ops._additive.lowering import lower
from kalmix.ops._additive.oracle import RECURSION
from kalmix.ops._additive.update import additive as update
from kalmix.ops._additive.update import additive_as_filtered
from kalmix.ops._shared.op_spec import OpSpec

SPEC = OpSpec(
    algebra=Algebra(
        op="additive",
        evidence=INPUT,
        covariance=NONE,
        decays=("none", "head", "key"),
        update="M_t = A M_{t-1} + w k v',  w = write_variance / (write_variance + r^2)",
    ),
    function=additive,
    kernels=KERNELS,
    belief=PointBelief,
    lower=lower,
    recursion=RECURSION,
    least_noise=1e-4,
    update=update,
    update_as_filtered=additive_as_filtered,
    prior=default_prior,
)
