"""Generation with whole models: time, memory and launches of each token."""
