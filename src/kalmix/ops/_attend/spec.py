"""Specification of the op `attend`."""

from kalmix.beliefs import HistoryBelief
from kalmix.designs.kinds import LAG, STATE, Algebra
from kalmix.ops._attend.api import attend
from kalmix.ops._attend.kernels import KERNELS
from kalmix.ops._attend.lowering import lower
from kalmix.ops._attend.oracle import RECURSION
from kalmix.ops._shared.op_spec import OpSpec

SPEC = OpSpec(
    algebra=Algebra(
        op="attend",
        evidence=STATE,
        covariance=LAG,
        decays=("time",),
        update="r_ij = |q_i - e^(lambda tau) k_j|^2 / V,  weight = 1 / (1 + r_ij / nu),  "
        "mean_i = sum_j A_ij e^(lambda tau) v_j,  A_ij ~ (weight / V)^temperature",
        supports_diffusion=True,
        options=("nu", "temperature", "value_dynamics", "weight", "window", "floor"),
    ),
    function=attend,
    kernels=KERNELS,
    belief=HistoryBelief,
    lower=lower,
    recursion=RECURSION,
    least_noise=1e-5,
)
