"""Linear stochastic differential equations, seen through noise, and what can be known of them at best.

`systems` and `trajectories`: what moves, and how it is sampled and seen. `references`: the Kalman filter and smoother
that know the system. `co2` and `structural`: a real series, and a model that is fitted to it. `settings`: what is to be
predicted. `scores`: how good predictions and variances are.
"""
