"""Op `diagonal`: independent scalar Kalman filters (Kalman Linear Attention)."""

from kalmix.ops._diagonal.api import diagonal as diagonal
from kalmix.ops._diagonal.matrix import KalmanMatrix as KalmanMatrix
from kalmix.ops._diagonal.matrix import diagonal_matrix as diagonal_matrix
from kalmix.ops._diagonal.spec import SPEC
from kalmix.ops._shared.op_spec import register

register(SPEC)
