"""Triton kernels of `attend`."""
