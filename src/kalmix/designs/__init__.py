"""Designs: the assumptions of a filter as data. `spec` defines their parts, `catalog` lists published ones."""

from kalmix.designs.catalog import (
    AFA,
    BAYESIAN,
    CATALOGUE,
    DELTANET,
    GATED_DELTANET,
    GATED_KALMANET,
    GLA,
    KDA,
    KLA,
    LINEAR_ATTENTION,
    LONGHORN,
    MAMBA2,
    RETNET,
)
from kalmix.designs.spec import Covariance, Design, Evidence, Transition

__all__ = [
    "AFA",
    "BAYESIAN",
    "CATALOGUE",
    "DELTANET",
    "GATED_DELTANET",
    "GATED_KALMANET",
    "GLA",
    "KDA",
    "KLA",
    "LINEAR_ATTENTION",
    "LONGHORN",
    "MAMBA2",
    "RETNET",
    "Covariance",
    "Design",
    "Evidence",
    "Transition",
]
