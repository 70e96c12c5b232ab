"""The published designs: a paper is a row. A row enters with the test that proves its reduction."""

from kalmix.designs.parts import Covariance, Design, Evidence, Transition

KLA = Design(
    name="kla",
    transition=Transition(decay="cell", diffusion=True),
    evidence=Evidence(of="cell"),
    covariance=Covariance(kept="diagonal"),
    equations="7 to 9 (model), 16 to 20 (update), 22 and 23 (with slots)",
    citation="Shaj, Barker, Scannell, Szecsenyi, Crowley, Storkey. Kalman Linear Attention: Parallel Bayesian "
    "Filtering For Efficient Language Modelling and State Tracking. arXiv:2602.10743, 2026",
)

CATALOGUE = {design.name: design for design in (KLA,)}
