"""Triton kernels of linear memories."""
