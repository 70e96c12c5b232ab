"""Noisy observations of linear stochastic differential equations, and the optimal estimates of their states.

`systems` and `trajectories` simulate and sample systems. `references` has the Kalman filter and smoother that know the
system. `co2` is a real time series and `structural` a model fitted to it. `settings` lists the prediction tasks.
`scores` computes errors of predictions and coverage of variances.
"""
