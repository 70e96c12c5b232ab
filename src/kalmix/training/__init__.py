"""Training of language models with the Hugging Face Trainer: recipes, data, runs, checkpoints and evaluation."""

from kalmix.training.recipe import Recipe, parse_layers

__all__ = ["Recipe", "parse_layers"]
