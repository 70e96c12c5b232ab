"""Triton kernels of `diagonal`."""
