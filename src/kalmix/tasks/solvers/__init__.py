"""Numerical studies of the solvers of a ridge regression (Gated KalmaNet, sections D, E, J and K), nothing learned.

`tokens`, `systems` and `iterations`: keys of several kinds, the normal equations of every token, and how they are
solved in which arithmetic. `convergence`, `conditions`, `reversal` and `gradients`: the studies.
"""
