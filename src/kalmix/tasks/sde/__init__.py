"""Linear stochastic differential equations, seen through noise, and what can be known of them at best.

`systems` and `trajectories`: what moves, and how it is sampled and seen; `co2`: a real series. `references`: the Kalman
filter and smoother that know the system. `independence`: how far Adaptive Filter Attention is from them with nothing
learned. `settings`: what is to be predicted; `models`: what learns to; `scores`: how good predictions are, and what a
variance is worth.
"""
