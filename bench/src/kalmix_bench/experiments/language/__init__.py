"""Language models of every layer at equal numbers of parameters and tokens."""
