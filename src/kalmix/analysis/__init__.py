"""Diagnostics and figures: what a trained model believes while it reads."""
