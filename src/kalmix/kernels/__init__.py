"""Kernels: the ways to compute each op, by name."""
