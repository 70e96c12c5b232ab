"""Triton kernels of `dense`."""
