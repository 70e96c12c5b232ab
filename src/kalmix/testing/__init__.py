"""Conformance suite for kernels: cases, error budgets, laws, self-check and fuzzing."""
