"""The op `additive`: a memory that adds what it is given."""
