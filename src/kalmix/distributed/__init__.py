"""Context parallelism and sharding plans. Empty so far."""
