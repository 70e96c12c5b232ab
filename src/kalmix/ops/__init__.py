"""Ops: filters of linear state space models, one public function each.

Every op takes queries, keys, values and further signals, an optional prior belief and optional `Segments`, and returns
`Filtered`: the read-out and the final belief. The package of each op registers its `OpSpec` in `OPS` on import.
"""

from kalmix.ops._additive import additive as additive
from kalmix.ops._attend import Dynamics as Dynamics
from kalmix.ops._attend import Weight as Weight
from kalmix.ops._attend import attend as attend
from kalmix.ops._attend import attend_radial as attend_radial
from kalmix.ops._attend import kappa as kappa
from kalmix.ops._delta import delta as delta
from kalmix.ops._dense import LEAST_NOISE as LEAST_NOISE
from kalmix.ops._dense import dense as dense
from kalmix.ops._diagonal import KalmanMatrix as KalmanMatrix
from kalmix.ops._diagonal import diagonal as diagonal
from kalmix.ops._diagonal import diagonal_matrix as diagonal_matrix
from kalmix.ops._ridge import Adaptive as Adaptive
from kalmix.ops._ridge import Chebyshev as Chebyshev
from kalmix.ops._ridge import ConjugateGradient as ConjugateGradient
from kalmix.ops._ridge import Exact as Exact
from kalmix.ops._ridge import Fixed as Fixed
from kalmix.ops._ridge import Ridge as Ridge
from kalmix.ops._ridge import Sketch as Sketch
from kalmix.ops._ridge import Solver as Solver
from kalmix.ops._ridge import ridge as ridge
from kalmix.ops._shared.custom_op import recomputed_op as recomputed_op
from kalmix.ops._shared.op_spec import OPS as OPS
from kalmix.ops._shared.op_spec import OpSpec as OpSpec
from kalmix.ops._shared.step_loop import run_steps as run_steps
