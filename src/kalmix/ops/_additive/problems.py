"""Test problems of `additive` for the laws."""

from __future__ import annotations

from functools import partial

from kalmix.designs import GLA, MAMBA2
from kalmix.ops._additive.spec import SPEC
from kalmix.testing.problems import STILL, Problem, draw_memory, noise_ranges

_MEMORY = partial(Problem, idle=STILL, evidence_signal="k", ranges=noise_ranges(SPEC.least_noise))

PROBLEMS = {
    "additive": _MEMORY(MAMBA2, draw_memory(obs_noise="B T G", write_variance="B T G", log_decay="B T G")),
    "additive-keys": _MEMORY(GLA, draw_memory(obs_noise="B T G", write_variance="B T G", log_decay="B T G K")),
}
