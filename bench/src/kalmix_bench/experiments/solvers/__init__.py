"""Numerical studies of solvers of a ridge regression (Figures 1, 5 and 9 of Gated KalmaNet)."""

from kalmix_bench.experiments.solvers.protocol import PRESETS, STUDIES, SolverCell, SolverPreset

__all__ = ["PRESETS", "STUDIES", "SolverCell", "SolverPreset"]
