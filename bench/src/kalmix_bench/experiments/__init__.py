"""The experiments of the papers, one a folder: models, training and report."""
