"""Triton kernels of `ridge`."""
