"""Steps: decoding of one token for each row of a batch, in place on a pool of states.

A server decodes sequences that start and end at different times. It keeps their states in a pool and, for each token,
says which slot each row of the batch reads and which it writes. `steps.<op>(signals, pool, slots)` filters one token
per row. Row b runs the op on one token, from the belief in slot `slots.read[b]`, and stores the new belief in slot
`slots.write[b]`.

- **Signals** are the op's, with one token: `[B, 1, ...]`. Each op has a `NamedTuple` of them, such as `DeltaSignals`.
- A **pool** is a belief whose first axis is slots; `belief.take(torch.zeros(n, dtype=torch.int64))` makes one of n
  slots. It is updated in place. The tensors of a slot must be contiguous; slots may be apart, in a pool of many layers.
- **Slots** that differ for reading and writing fork a sequence: from a prefix that is kept, or for draft tokens that
  may be rejected. See `Slots`, also for rows of padding.
- **`out`** is the result of an earlier step. Its mean and variance are overwritten, so kernel "triton" allocates
  nothing, apart from partial sums of `attend`. Steps copy nothing to the host and can be captured in a CUDA graph.

The result of a row depends on its signals and its slot only. In kernel "triton" its bits do not depend on the size of
the batch or on other rows; in kernel "torch", the rounding of matrix products may. Steps check nothing, have no
gradients, and compute in the dtype of the pool: float32, or float64.
"""

from kalmix.ops._additive.signals import AdditiveSignals as AdditiveSignals
from kalmix.ops._additive.step import additive as additive
from kalmix.ops._attend.dynamics import Weighting as Weighting
from kalmix.ops._attend.signals import AttendSignals as AttendSignals
from kalmix.ops._attend.step import attend as attend
from kalmix.ops._delta.signals import DeltaSignals as DeltaSignals
from kalmix.ops._delta.step import delta as delta
from kalmix.ops._dense.signals import DenseSignals as DenseSignals
from kalmix.ops._dense.step import dense as dense
from kalmix.ops._diagonal.signals import DiagonalSignals as DiagonalSignals
from kalmix.ops._diagonal.step import diagonal as diagonal
from kalmix.ops._ridge.signals import RidgeSignals as RidgeSignals
from kalmix.ops._ridge.step import ridge as ridge
from kalmix.ops._shared.step import NO_SEQUENCE as NO_SEQUENCE
from kalmix.ops._shared.step import Slots as Slots
from kalmix.ops._shared.step import check_slots as check_slots
from kalmix.ops._shared.step import history_pool as history_pool
from kalmix.ops._shared.step import store as store
from kalmix.ops._shared.step import store_rows as store_rows
