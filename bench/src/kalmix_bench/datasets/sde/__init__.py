"""Linear stochastic differential equations, seen through noise, and what can be known of them at best.

`systems` and `trajectories`: what moves, and how it is sampled and seen. `references`: the Kalman filter and smoother
that know the system. `co2` and `structural`: a real series, and a model that is fitted to it. `independence` and
`calibration`: how far Adaptive Filter Attention is from the optimum with nothing learned, and what its variance is
worth. `settings`: what is to be predicted; `models`: what learns to; `scores`: how good predictions and variances are.
"""
