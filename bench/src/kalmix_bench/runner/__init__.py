"""Run cells of any experiment, store their results and report them."""
