"""Train small vision models."""
