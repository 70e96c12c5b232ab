"""Specification of the op `dense` for the rest of the library."""

import torch

from kalmix.beliefs import DenseBelief
from kalmix.designs.kinds import DENSE, MEMORY, Algebra
from kalmix.ops._dense.api import LEAST_NOISE, default_prior, dense
from kalmix.ops._dense.block_sizes import count_spans
from kalmix.ops._dense.kernels import KERNELS
from kalmix.ops._dense.lowering import lower
from kalmix.ops._dense.oracle import RECURSION
from kalmix.ops._dense.update import dense as update
from kalmix.ops._shared.op_spec import OpSpec

SPEC = OpSpec(
    algebra=Algebra(
        op="dense",
        evidence=MEMORY,
        covariance=DENSE,
        decays=("none", "head", "key", "matrix"),
        update="Pb = A P_{t-1} A' + l^2 I,  u = Pb k,  b = 1 / (r^2 + k'u),  "
        "M_t = A M_{t-1} + b u (v - (A M_{t-1})'k)',  P_t = Pb - b u u'",
        supports_diffusion=True,
        supports_rotation=True,
    ),
    function=dense,
    kernels=KERNELS,
    belief=DenseBelief,
    lower=lower,
    recursion=RECURSION,
    least_noise=LEAST_NOISE[torch.float32],
    update=update,
    prior=default_prior,
    count_spans=count_spans,
)
