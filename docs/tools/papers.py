"""Papers and code behind each layer, for its page."""

_GITHUB = "https://github.com/"
_KLA = ("Kalman Linear Attention", "https://arxiv.org/abs/2602.10743")
_AFA = ("Attention as an Adaptive Filter", "https://arxiv.org/abs/2509.04154")
_DELTANET = ("Linear Transformers Are Secretly Fast Weight Programmers", "https://arxiv.org/abs/2102.11174")
_PARALLEL = ("Parallelizing Linear Transformers with the Delta Rule", "https://arxiv.org/abs/2406.06484")
_MEMORY = ("Memory by Design: Probabilistic Sequence Layers (Dowling et al., 2026)", "")

# Title and link of each paper, by the name of the layer in `kalmix.layers.MIXERS`.
PAPERS: dict[str, list[tuple[str, str]]] = {
    "kla": [_KLA],
    "bayesian": [_MEMORY],
    "gated-kalmanet": [("Gated KalmaNet", "https://arxiv.org/abs/2511.21016")],
    "afa": [_AFA],
    "rt-afa": [_AFA],
    "recurrent-afa": [_AFA],
    "afa-transformer": [_AFA],
    "controlled-afa": [_AFA],
    "filter-conv2d": [_AFA],
    "deltanet": [_DELTANET, _PARALLEL],
    "gated-deltanet": [("Gated Delta Networks", "https://arxiv.org/abs/2412.06464")],
    "kda": [("Kimi Linear", "https://arxiv.org/abs/2510.26692")],
    "linear-attention": [("Transformers are RNNs", "https://arxiv.org/abs/2006.16236")],
    "retnet": [("Retentive Network", "https://arxiv.org/abs/2307.08621")],
    "gla": [("Gated Linear Attention Transformers", "https://arxiv.org/abs/2312.06635")],
    "mamba2": [("Transformers are SSMs", "https://arxiv.org/abs/2405.21060")],
    "attention": [("Attention Is All You Need", "https://arxiv.org/abs/1706.03762")],
    "design": [_MEMORY],
}

CODE: dict[str, tuple[str, ...]] = {
    "kla": (f"{_GITHUB}vaisakh-shaj/kalman-linear-attention",),
    "gated-kalmanet": (f"{_GITHUB}awslabs/hybrid-model-factory",),
    "deltanet": (f"{_GITHUB}fla-org/flash-linear-attention",),
    "gated-deltanet": (f"{_GITHUB}NVlabs/GatedDeltaNet", f"{_GITHUB}fla-org/flash-linear-attention"),
    "kda": (f"{_GITHUB}MoonshotAI/Kimi-Linear", f"{_GITHUB}fla-org/flash-linear-attention"),
    "linear-attention": (f"{_GITHUB}idiap/fast-transformers",),
    "retnet": (f"{_GITHUB}microsoft/torchscale",),
    "gla": (f"{_GITHUB}fla-org/flash-linear-attention",),
    "mamba2": (f"{_GITHUB}state-spaces/mamba",),
}
