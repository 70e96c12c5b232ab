"""Triton kernels of linear memories and their custom op, for `additive`, `delta` and `dense`."""
