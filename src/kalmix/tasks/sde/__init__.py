"""Linear stochastic differential equations, seen through noise, and what can be known of them at best.

`systems` and `trajectories`: what moves, and how it is sampled and seen; `co2`: a real series. `references`: the Kalman
filter and smoother that know the system. `independence` and `calibration`: how far Adaptive Filter Attention is from
them with nothing learned, and what its variance is worth. `settings`: what is to be predicted; `models`: what learns
to; `scores`: how good predictions and variances are.
"""
