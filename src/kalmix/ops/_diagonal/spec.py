"""Registered description of the op `diagonal`."""

from kalmix.beliefs import DiagonalBelief
from kalmix.designs.kinds import CELL, DIAGONAL, Algebra
from kalmix.ops._diagonal.api import default_prior, diagonal
from kalmix.ops._diagonal.kernels import KERNELS
from kalmix.ops._diagonal.lowering import lower
from kalmix.ops._diagonal.oracle import RECURSION
from kalmix.ops._diagonal.update import diagonal as update
from kalmix.ops._shared.op_spec import OpSpec

SPEC = OpSpec(
    algebra=Algebra(
        op="diagonal",
        evidence=CELL,
        covariance=DIAGONAL,
        decays=("none", "cell"),
        update="1 / s_t = 1 / (a^2 s + p) + k_n^2 precision_d,  mu_t = a mu + s_t k_n precision_d (v_d - k_n a mu)",
        supports_diffusion=True,
    ),
    function=diagonal,
    kernels=KERNELS,
    belief=DiagonalBelief,
    lower=lower,
    recursion=RECURSION,
    least_noise=1e-4,
    update=update,
    prior=default_prior,
)
