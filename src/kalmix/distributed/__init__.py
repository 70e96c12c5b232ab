"""Spread one model or one sequence over several devices: context parallelism and sharding plans. Empty so far."""
