"""Other people's implementations, timed beside ours where they can be imported. None of their code is here."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from torch import Tensor

Run = Callable[[dict[str, Tensor]], tuple[Tensor, ...]]


def diagonal() -> dict[str, Run]:
    """The authors' package `kla` (github.com/vaisakh-shaj/kalman-linear-attention): its fastest kernels."""
    if find_spec("kla") is None:
        return {}
    from kla.ops import kla_scan

    def adapt(backend: str) -> Run:
        def run(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
            v, precision, k, q = (x[name][:, :, 0] for name in ("v", "precision", "k", "q"))
            decay, noise = x["log_decay"][0].T.exp(), x["process_noise"][0].T
            return kla_scan(v, precision, k, q, decay, noise, backend=backend)[:2]

        return run

    return {"kla (CUDA)": adapt("cuda"), "kla (Triton)": adapt("triton")}


PEERS = {"diagonal": diagonal}
