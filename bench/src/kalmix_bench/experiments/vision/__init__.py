"""Training of small image classifiers."""
