"""The op `diagonal`: independent Gaussian cells."""
