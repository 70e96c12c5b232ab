"""The op `ridge`: a ridge regression over all past tokens, solved at every token (Gated KalmaNet, MesaNet)."""

from kalmix.ops._ridge.api import ridge as ridge
from kalmix.ops._ridge.solvers import Adaptive as Adaptive
from kalmix.ops._ridge.solvers import Chebyshev as Chebyshev
from kalmix.ops._ridge.solvers import ConjugateGradient as ConjugateGradient
from kalmix.ops._ridge.solvers import Exact as Exact
from kalmix.ops._ridge.solvers import Fixed as Fixed
from kalmix.ops._ridge.solvers import Ridge as Ridge
from kalmix.ops._ridge.solvers import Sketch as Sketch
from kalmix.ops._ridge.solvers import Solver as Solver
from kalmix.ops._ridge.spec import SPEC
from kalmix.ops._shared.op_spec import register

register(SPEC)
