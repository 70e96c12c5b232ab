"""Sequences of the collision experiments (section 4.1 and appendix E of Memory by Design): overlapping keys."""
