"""Calls that wait for the device because the host reads from it. A CUDA graph cannot be captured around them."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
HOST_READS = (
    *(aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten._linalg_check_errors),
    *(aten.nonzero, aten.masked_select, aten._unique2, aten.bincount, aten.histc),
)


class NoHostReads(TorchDispatchMode):
    """Mode in which a call that waits for the device is an error."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in HOST_READS, f"the host waits for {func}"
        return func(*args, **(kwargs or {}))
