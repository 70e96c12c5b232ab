"""Specification of the op `ridge` for the rest of the library."""

from kalmix.beliefs import RidgeBelief
from kalmix.designs.kinds import INFORMATION, MEMORY, Algebra
from kalmix.ops._ridge.api import default_prior, ridge
from kalmix.ops._ridge.kernels import KERNELS
from kalmix.ops._ridge.lowering import lower
from kalmix.ops._ridge.oracle import RECURSION
from kalmix.ops._ridge.update import ridge as update
from kalmix.ops._shared.op_spec import OpSpec

SPEC = OpSpec(
    algebra=Algebra(
        op="ridge",
        evidence=MEMORY,
        covariance=INFORMATION,
        decays=("none", "forgetting"),
        update="H_t = a H_{t-1} + k k' / r^2,  U_t = a U_{t-1} + k v' / r^2,  x = (H_t + ridge I)^-1 q,  "
        "mean = U_t' (mix x + (1 - mix) q)",
        no_diffusion_reason="it takes no process noise",
        optional=("mix",),
        options=("ridge", "solver"),
    ),
    function=ridge,
    kernels=KERNELS,
    belief=RidgeBelief,
    lower=lower,
    recursion=RECURSION,
    least_noise=1e-4,
    update=update,
    prior=default_prior,
)
