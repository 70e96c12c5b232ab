"""Triton kernels that `additive`, `delta` and `dense` share, and their custom op."""
