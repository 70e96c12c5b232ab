"""Benchmarks of kalmix: the papers' experiments, and timings next to other libraries."""
