"""Calls in which the host reads from the device, so that it waits. A CUDA graph cannot be captured around them."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
HOST_READS = (
    *(aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten._linalg_check_errors, aten.linalg_eigh),
    *(aten.nonzero, aten.masked_select, aten._unique2, aten.bincount, aten.histc, aten.repeat_interleave.Tensor),
)
BY_INDEX = (aten.index, aten.index_put, aten.index_put_)


class NoHostReads(TorchDispatchMode):
    """Mode in which a call that reads from the device is an error.

    It sees neither what custom ops do inside (those of CPUs are others than those of GPUs), nor reads that call no
    operator, such as `tolist` and `numpy` of tensors on CPUs.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        read = func in HOST_READS or func.overloadpacket in HOST_READS
        masks = func.overloadpacket in BY_INDEX and any(x is not None and x.dtype == torch.bool for x in args[1])
        assert not read and not masks, f"the host waits for {func}"
        return func(*args, **(kwargs or {}))
