"""Random signals and priors of ops with a linear memory, on a GPU if there is one."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def arguments(gain, decay, batch, length, heads, keys, width, sequences=None, dtype=torch.float32):
    """Return random signals and a prior by name: keys of norm 1, log-decays above -0.3; absent signals are omitted."""
    draw = torch.Generator().manual_seed(0)
    shared, own = heads
    shape = (batch, length, own)
    q, k = (torch.randn(batch, length, shared, keys, generator=draw) for _ in range(2))
    q, k = (torch.nn.functional.normalize(x, dim=-1).to(dtype) for x in (q, k))
    strength, fade = torch.rand(shape, generator=draw), -0.3 * torch.rand(*shape, keys, generator=draw)
    inputs = {
        "q": q,
        "k": k,
        "v": torch.randn(*shape, width, generator=draw).to(dtype),
        "gain": strength if gain == "head" else strength[..., None] * k.float().repeat_interleave(own // shared, 2),
        "log_decay": fade[..., 0] if decay == "head" else fade,
        "mean": torch.randn(batch if sequences is None else sequences, own, keys, width, generator=draw),
    }
    absent = {name for name, kind in (("gain", gain), ("log_decay", decay)) if kind is None}
    return {name: x.to(DEVICE) for name, x in inputs.items() if name not in absent}
