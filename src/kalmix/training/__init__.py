"""Training on the Hugging Face Trainer: recipes, the runner, and what a trained model is judged by."""

from kalmix.training.recipe import Recipe, parse_layers

__all__ = ["Recipe", "parse_layers"]
