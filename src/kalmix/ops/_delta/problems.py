"""Test problems of `delta` for the laws."""

from __future__ import annotations

from functools import partial

from kalmix.designs import GATED_DELTANET, KDA
from kalmix.ops._delta.spec import SPEC
from kalmix.testing.problems import STILL, Problem, draw_memory, noise_ranges

_MEMORY = partial(Problem, idle=STILL, evidence_signal="k", ranges=noise_ranges(SPEC.least_noise))

PROBLEMS = {
    "delta": _MEMORY(GATED_DELTANET, draw_memory(obs_noise="B T G", reset="B T G", log_decay="B T G")),
    "delta-keys": _MEMORY(KDA, draw_memory(obs_noise="B T G", reset="B T G K", log_decay="B T G K")),
}
