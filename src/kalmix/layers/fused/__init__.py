"""Parts around the ops, each of which runs as one kernel on a GPU: norms, short convolution, gates.

A part is a public function with an eager form, which is plain PyTorch, and a Triton form (`triton/`), which is a custom
op. `dispatch.py` chooses the form. Layers use the functions; keys of their state dicts do not depend on the form.
"""

from kalmix.layers.fused.activations import ACTIVATIONS as ACTIVATIONS
from kalmix.layers.fused.cell_dynamics import cell_dynamics as cell_dynamics
from kalmix.layers.fused.cell_inputs import GatedSkip as GatedSkip
from kalmix.layers.fused.cell_inputs import RawCellSignals as RawCellSignals
from kalmix.layers.fused.cell_step import can_fuse_cells as can_fuse_cells
from kalmix.layers.fused.cell_step import cell_step as cell_step
from kalmix.layers.fused.convolution import Packing as Packing
from kalmix.layers.fused.convolution import convolve_qkv as convolve_qkv
from kalmix.layers.fused.convolution import short_convolution as short_convolution
from kalmix.layers.fused.convolution_step import convolve_qkv_step as convolve_qkv_step
from kalmix.layers.fused.convolution_step import short_convolution_step as short_convolution_step
from kalmix.layers.fused.cross_entropy import linear_cross_entropy as linear_cross_entropy
from kalmix.layers.fused.gating import can_fuse_swiglu as can_fuse_swiglu
from kalmix.layers.fused.gating import swiglu as swiglu
from kalmix.layers.fused.gating import swiglu_linear as swiglu_linear
from kalmix.layers.fused.head_signals import HeadSignal as HeadSignal
from kalmix.layers.fused.head_signals import can_fuse_signals as can_fuse_signals
from kalmix.layers.fused.head_signals import head_signals as head_signals
from kalmix.layers.fused.linear_nll import linear_nll as linear_nll
from kalmix.layers.fused.positive import positive as positive
from kalmix.layers.fused.precision import softplus_precision as softplus_precision
from kalmix.layers.fused.recompute import without_storing as without_storing
from kalmix.layers.fused.residual import add_rms_norm as add_rms_norm
from kalmix.layers.fused.rms import Gate as Gate
from kalmix.layers.fused.rms import Norm as Norm
from kalmix.layers.fused.rms import rms_norm as rms_norm
from kalmix.layers.fused.skip import gated_skip as gated_skip
from kalmix.layers.fused.step_decay import step_decay as step_decay
from kalmix.layers.fused.unit_norm import QueryKeyColumns as QueryKeyColumns
from kalmix.layers.fused.unit_norm import UnitNorm as UnitNorm
from kalmix.layers.fused.unit_norm import l2_normalize as l2_normalize
