"""Evaluation of language models by lm-eval: suites of tasks, and the papers' printed figures beside the scores."""
