"""Diagnostics and figures of trained models: variances, write gains and attention maps."""
