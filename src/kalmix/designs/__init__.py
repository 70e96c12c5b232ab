"""Designs: what is assumed, as data. The parts, and the catalogue of published rows."""

from kalmix.designs.catalogue import CATALOGUE, KLA
from kalmix.designs.parts import Covariance, Design, Evidence, Transition

__all__ = ["CATALOGUE", "KLA", "Covariance", "Design", "Evidence", "Transition"]
