"""Tables and figures of the four papers, with a status that is computed from committed results."""
