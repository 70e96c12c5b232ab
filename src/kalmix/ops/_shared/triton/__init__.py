"""Triton code that several ops share."""
