"""Triton kernels of the parts, imported when one of them first runs."""
