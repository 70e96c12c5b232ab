"""Experiments of the papers, one per folder: models, training and report."""
