"""Benchmarks: what each asks, how it is scored. `kalmix.training` trains on them, `kalmix.cli` shows the scores."""
