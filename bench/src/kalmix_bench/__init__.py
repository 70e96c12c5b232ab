"""Benchmarks of kalmix: the papers' experiments, and timings beside other libraries."""
