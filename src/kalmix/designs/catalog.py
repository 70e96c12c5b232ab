"""Catalogue of published designs. Each has a test that its filter equals the published recurrence."""

import kalmix.ops  # noqa: F401 - each op registers the designs that it filters
from kalmix.designs.spec import Covariance, Design, Evidence, Transition

_TABLE = "Memory by Design (Dowling et al., 2026), Table 1"

LINEAR_ATTENTION = Design(
    name="linear-attention",
    transition=Transition(),
    evidence=Evidence(kind="input"),
    covariance=Covariance(kind="none"),
    equations=f"19, {_TABLE}",
    citation="Katharopoulos, Vyas, Pappas, Fleuret. Transformers are RNNs: Fast Autoregressive Transformers with "
    "Linear Attention. ICML 2020, arXiv:2006.16236",
)
"""Linear attention: a constant memory that sums writes. Op `additive`.

Signals: `write_variance` and `obs_noise`, `[B, T, G]`, > 0; the write gain is write_variance / (write_variance +
obs_noise).
"""

RETNET = Design(
    name="retnet",
    transition=Transition(decay="head"),
    evidence=Evidence(kind="input"),
    covariance=Covariance(kind="none"),
    equations=f"19, {_TABLE}",
    citation="Sun, Dong, Huang, Ma, Xia, Xue, Wang, Wei. Retentive Network: A Successor to Transformer for Large "
    "Language Models. arXiv:2307.08621, 2023",
)
"""Retention: writes are summed, with one decay per head. Op `additive`.

Signals: `log_decay` `[B, T, G]`, <= 0; `write_variance` and `obs_noise`, `[B, T, G]`, > 0.
"""

GLA = Design(
    name="gla",
    transition=Transition(decay="key"),
    evidence=Evidence(kind="input"),
    covariance=Covariance(kind="none"),
    equations=f"19, {_TABLE}",
    citation="Yang, Wang, Shen, Panda, Kim. Gated Linear Attention Transformers with Hardware-Efficient Training. "
    "ICML 2024, arXiv:2312.06635 (the diagonal form)",
)
"""Gated linear attention: writes are summed, with one decay per key. Op `additive`.

Signals: `log_decay` `[B, T, G, K]`, <= 0; `write_variance` and `obs_noise`, `[B, T, G]`, > 0.
"""

MAMBA2 = Design(
    name="mamba2",
    transition=Transition(decay="head"),
    evidence=Evidence(kind="input"),
    covariance=Covariance(kind="none"),
    equations=f"19, {_TABLE}",
    citation="Dao, Gu. Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State "
    "Space Duality. ICML 2024, arXiv:2405.21060",
)
"""Mamba-2: writes are summed, with one decay per head. Op `additive`.

Signals: `log_decay` `[B, T, G]`, <= 0; `write_variance` and `obs_noise`, `[B, T, G]`, > 0.
"""

DELTANET = Design(
    name="deltanet",
    transition=Transition(),
    evidence=Evidence(kind="memory"),
    covariance=Covariance(kind="reset"),
    equations=f"17, {_TABLE}",
    citation="Schlag, Irie, Schmidhuber. Linear Transformers Are Secretly Fast Weight Programmers. ICML 2021, "
    "arXiv:2102.11174; Yang, Wang, Zhang, Shen, Kim. Parallelizing Linear Transformers with the Delta Rule over "
    "Sequence Length. NeurIPS 2024, arXiv:2406.06484",
)
"""DeltaNet: a constant memory observed along keys, with a covariance that is reset at every token. Op `delta`.

Signals: `obs_noise` `[B, T, G]`, > 0; `reset` `[B, T, G]` or `[B, T, G, K]`, > 0.
"""

GATED_DELTANET = Design(
    name="gated-deltanet",
    transition=Transition(decay="head"),
    evidence=Evidence(kind="memory"),
    covariance=Covariance(kind="reset"),
    equations=f"17, {_TABLE}",
    citation="Yang, Kautz, Hatamizadeh. Gated Delta Networks: Improving Mamba2 with Delta Rule. ICLR 2025, "
    "arXiv:2412.06464",
)
"""Gated DeltaNet: DeltaNet with one decay per head. Op `delta`.

Signals: `log_decay` `[B, T, G]`, <= 0; `obs_noise` `[B, T, G]`, > 0; `reset` `[B, T, G]` or `[B, T, G, K]`, > 0.
"""

KDA = Design(
    name="kda",
    transition=Transition(decay="key"),
    evidence=Evidence(kind="memory"),
    covariance=Covariance(kind="reset"),
    equations=f"17, {_TABLE}",
    citation="Kimi Team. Kimi Linear: An Expressive, Efficient Attention Architecture. arXiv:2510.26692, 2025",
)
"""Kimi Delta Attention: DeltaNet with one decay per key. Op `delta`.

Signals: `log_decay` `[B, T, G, K]`, <= 0; `obs_noise` `[B, T, G]`, > 0; `reset` `[B, T, G]` or `[B, T, G, K]`, > 0.
"""

LONGHORN = Design(
    name="longhorn",
    transition=Transition(),
    evidence=Evidence(kind="memory", columns=True),
    covariance=Covariance(kind="reset"),
    equations=f"17, {_TABLE}",
    citation="Liu, Wang, Wu, Feng, Stone, Liu. Longhorn: State Space Models are Amortized Online Learners. ICLR 2025, "
    "arXiv:2407.14207",
)
"""Longhorn: DeltaNet with one observation noise per value column. Op `delta`, with value heads of width 1.

Signals: `obs_noise` `[B, T, G]`, > 0; `reset` `[B, T, G]` or `[B, T, G, K]`, > 0.
"""

KLA = Design(
    name="kla",
    transition=Transition(decay="cell", diffusion=True),
    evidence=Evidence(kind="cell"),
    covariance=Covariance(kind="diagonal"),
    equations="7 to 9 (model), 16 to 20 (update), 22 and 23 (with slots)",
    citation="Shaj, Barker, Scannell, Szecsenyi, Crowley, Storkey. Kalman Linear Attention: Parallel Bayesian "
    "Filtering For Efficient Language Modelling and State Tracking. arXiv:2602.10743, 2026",
)
"""Kalman Linear Attention: an independent Ornstein-Uhlenbeck process per cell, filtered exactly. Op `diagonal`.

Signals: `log_decay` <= 0 and `process_noise` >= 0, `[G, K, V]`; `precision` `[B, T, G, V]`, >= 0.
"""

BAYESIAN = Design(
    name="bayesian",
    transition=Transition(decay="key", diffusion=True, rotation=True),
    evidence=Evidence(kind="memory"),
    covariance=Covariance(kind="dense"),
    equations="5 and 6 (model), 9 to 13 (update), 29 to 31 (in chunks)",
    citation="Dowling, Jeon, Savin, Park. Memory by Design: Probabilistic Sequence Layers. 2026",
)
"""Bayesian Layer: a decaying, optionally rotating memory with an exact covariance between keys. Op `dense`.

Signals: `log_decay` `[B, T, G, K]`, <= 0; `process_noise` `[B, T, G]`, >= 0; `obs_noise` `[B, T, G]`, > 0; optionally
`angle` `[B, T, G, K / 2]`, radians per token.
"""

GATED_KALMANET = Design(
    name="gated-kalmanet",
    transition=Transition(decay="forgetting"),
    evidence=Evidence(kind="memory"),
    covariance=Covariance(kind="information"),
    equations="3 (regression), (CH) and 55 (recurrences and solution)",
    citation="Gated KalmaNet: A Fading Memory Layer Through Test-Time Ridge Regression. CVPR 2026, arXiv:2511.21016",
)
"""Gated KalmaNet: a constant memory with exponential forgetting of information, and a ridge prior. Op `ridge`.

Signals: `log_decay` `[B, T, G]`, <= 0; `obs_noise` `[B, T, G]`, > 0. Options: `ridge` and `solver`; see
`kalmix.ops.ridge`.
"""

AFA = Design(
    name="afa",
    transition=Transition(decay="time", diffusion=True),
    evidence=Evidence(kind="state"),
    covariance=Covariance(kind="lag"),
    equations="section 3.6 and Algorithm 1, as docs/ops/attend.md has them",
    citation="Racioppo. Attention as an Adaptive Filter. arXiv:2509.04154, 2025",
)
"""Adaptive Filter Attention: a complex state that decays, rotates and diffuses in continuous time. Op `attend`.

Signals: `log_decay` `[H]`, <= 0; `frequency` `[H, C]`; `process_noise`, `key_noise` and `query_noise`, `[H]`, >= 0;
optionally `times` `[B, T]`.
"""

_ROWS = (
    *(LINEAR_ATTENTION, RETNET, GLA, MAMBA2),
    *(DELTANET, GATED_DELTANET, KDA, LONGHORN),
    *(KLA, BAYESIAN, GATED_KALMANET, AFA),
)

CATALOGUE = {design.name: design for design in _ROWS}
"""Published designs by name."""
