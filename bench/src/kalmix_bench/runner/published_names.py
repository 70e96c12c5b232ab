"""Names of layers and other methods as papers print them, for legends of figures."""

from __future__ import annotations

import json

NAMES = {
    "kla": "KLA",
    "kla-noise-free": "KLA, no process noise",
    "kla-plus": "KLA+",
    "kla-zoh": "KLA, zero-order hold",
    "bayesian": "Bayesian Layer",
    "bayesian-one-decay": "Bayesian Layer, one decay per head",
    "bayesian-decay-per-key": "Bayesian Layer, a decay per key",
    "bayesian-decay-per-head": "Bayesian Layer, a decay per head",
    "bayesian-slow": "Bayesian Layer, one slow decay per head",
    "bayesian-no-conv": "Bayesian Layer, no convolution",
    "gated-kalmanet": "Gated KalmaNet",
    "kalmanet-bare": "KalmaNet, no gates",
    "mesanet": "MesaNet, constant ridge",
    "afa": "AFA",
    "afa-attention-start": 'AFA, start "attention"',
    "rt-afa": "RT-AFA",
    "recurrent-afa": "recurrent AFA",
    "afa-transformer": "AFA transformer",
    "controlled-afa": "controlled AFA",
    "deltanet": "DeltaNet",
    "gated-deltanet": "Gated DeltaNet",
    "gated-deltanet-no-conv": "Gated DeltaNet, no convolution",
    'gated-deltanet:{"negative_eigenvalues": true}': "Gated DeltaNet, negative eigenvalues",
    "kda": "KDA",
    "linear-attention": "linear attention",
    "retnet": "RetNet",
    "gla": "GLA",
    "mamba2": "Mamba-2",
    "mamba2-no-conv": "Mamba-2, no convolution",
    "mamba-1": "Mamba",
    "mamba-1-no-conv": "Mamba, no convolution",
    "mlstm": "mLSTM",
    "mlstm-no-conv": "mLSTM, no convolution",
    "rwkv-7": "RWKV-7",
    "rwkv-7-no-shift": "RWKV-7, no token shift",
    "mlp": "MLPs",
    "reset": "covariance reset",
    "softmax": "softmax attention",
    "softmax-2": "softmax attention, 2 layers",
    "kalman": "Kalman filter",
    "kalman, mean noise": "Kalman filter, mean noise",
    "kalman, known outliers": "Kalman filter, known outliers",
}


def published_name(text: str) -> str:
    """Return the published name of a layer; options are appended, such as "KLA (slots 8)".

    Args:
        text: a name, optionally with a colon and options as a JSON object; or two names joined by a plus, of a hybrid.
            Unknown names are returned unchanged.
    """
    if text in NAMES:
        return NAMES[text]
    if "+" in text.partition(":")[0]:
        return " + ".join(published_name(name) for name in text.split("+"))
    name, colon, options = text.partition(":")
    published = NAMES.get(name, name)
    if not colon:
        return published
    return f"{published} ({', '.join(f'{key} {value}' for key, value in json.loads(options).items())})"
