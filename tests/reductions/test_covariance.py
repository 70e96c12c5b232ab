"""The reductions of Memory by Design in float64: the filters for a full, reset or absent covariance."""

import math

import pytest
import torch
from torch import Tensor

import kalmix
from kalmix import designs, ops
from kalmix.beliefs import DenseBelief, PointBelief
from kalmix.ops import OPS
from kalmix.ops._dense.kernels import KERNELS

B, T, H, G, K, V = 2, 21, 2, 4, 4, 3
DENSE = [kernel.name for kernel in KERNELS if not kernel.triton]


def kernels(op: str) -> list[str]:
    return [kernel.name for kernel in OPS[op].kernels if not kernel.triton]


def close(got: Tensor, want: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * torch.rand(shape, dtype=torch.float64)


def tokens(heads: int = G, width: int = V) -> dict[str, Tensor]:
    torch.manual_seed(0)
    q, k = torch.randn(2, B, T, H, K, dtype=torch.float64).unbind(0)
    return {"q": q, "k": k, "v": torch.randn(B, T, heads, width, dtype=torch.float64)}


def per_head(x: Tensor) -> Tensor:
    return x.repeat_interleave(G // H, 2)


def noises() -> dict[str, Tensor]:
    return {"obs_noise": uniform(B, T, G, low=0.05, high=2.0), "process_noise": uniform(B, T, G, high=0.3)}


def prior() -> DenseBelief:
    root = torch.randn(B, G, K, K, dtype=torch.float64)
    covariance = root @ root.mT / K + 0.1 * torch.eye(K, dtype=torch.float64)
    return DenseBelief(torch.randn(B, G, K, V, dtype=torch.float64), covariance)


TRANSITIONS = {
    "hold": lambda: {},
    "decay per head": lambda: {"log_decay": -uniform(B, T, G, high=0.3)},
    "decay per key": lambda: {"log_decay": -uniform(B, T, G, K, high=0.3)},
    "damped rotation": lambda: {
        "log_decay": -uniform(B, T, G, K // 2, high=0.3),
        "angle": uniform(B, T, G, K // 2, low=-3.0, high=3.0),
    },
}


def transition(t: int, n: int, g: int, log_decay: Tensor | None = None, angle: Tensor | None = None) -> Tensor:
    """Return A of one token, `[K, K]`: `rho e^{i theta}` of pairs (j, j + K / 2) as 2 x 2 blocks."""
    rho = torch.ones(K, dtype=torch.float64)
    if log_decay is not None:
        rho = log_decay[n, t, g].exp().reshape(-1)
        rho = rho.repeat(K // len(rho))
    if angle is None:
        return rho.diag()
    matrix = torch.zeros(K, K, dtype=torch.float64)
    for j, theta in enumerate(angle[n, t, g].tolist()):
        matrix[j, j] = matrix[j + K // 2, j + K // 2] = math.cos(theta)
        matrix[j + K // 2, j], matrix[j, j + K // 2] = math.sin(theta), -math.sin(theta)
    return rho[:, None] * matrix


@pytest.mark.parametrize("kernel", DENSE)
@pytest.mark.parametrize("moves", TRANSITIONS)
def test_dense_is_the_textbook_filter_of_the_whole_memory(moves, kernel):
    """Appendix C: a Kalman filter on vec(S), KV x KV, keeps its covariance I (x) P, with the P of `dense`."""
    x, moved, belief = tokens() | noises(), TRANSITIONS[moves](), prior()
    if "angle" in moved:
        x |= {name: torch.cat([x[name][..., : K // 2], torch.zeros_like(x[name][..., : K // 2])], -1) for name in "qk"}
    got = ops.dense(**x, **moved, belief=belief, variance=True, kernel=kernel)
    columns, diffuses = torch.eye(V, dtype=torch.float64), torch.ones(K, dtype=torch.float64)
    diffuses[K // 2 :] = 0 if "angle" in moved else 1
    for n in range(B):
        for g in range(G):
            mean = belief.mean[n, g].T.flatten()  # vec: columns end to end
            covariance = torch.kron(columns, belief.covariance[n, g])
            for t in range(T):
                step = torch.kron(columns, transition(t, n, g, **moved))
                mean = step @ mean
                noise = torch.kron(columns, (x["process_noise"][n, t, g] * diffuses).diag())
                covariance = step @ covariance @ step.T + noise
                key, query = (per_head(x[name])[n, t, g] for name in "kq")
                sight, read = torch.kron(columns, key[None]), torch.kron(columns, query[None])
                innovation = sight @ covariance @ sight.T + x["obs_noise"][n, t, g] * columns
                gain = torch.linalg.solve(innovation, sight @ covariance).T
                mean = mean + gain @ (x["v"][n, t, g] - sight @ mean)
                covariance = covariance - gain @ innovation @ gain.T
                close(got.mean[n, t, g], read @ mean)
                close(got.variance[n, t, g] * columns, read @ covariance @ read.T)
            close(got.belief.mean[n, g], mean.reshape(V, K).T)
            close(torch.kron(columns, got.belief.covariance[n, g].contiguous()), covariance)


def gains(x: dict[str, Tensor], log_decay: Tensor, covariance: Tensor) -> Tensor:
    """Return c = P k / (r^2 + k'P k) of the predicted P (equations 9 to 11), which does not depend on values."""
    found = []
    for t in range(T):
        decay, key = log_decay[:, t].exp(), per_head(x["k"])[:, t]
        covariance = decay[..., None] * covariance * decay[..., None, :]
        covariance = covariance + x["process_noise"][:, t, :, None, None] * torch.eye(K, dtype=torch.float64)
        cov_keys = torch.einsum("ngij,ngj->ngi", covariance, key)
        precision = 1 / (x["obs_noise"][:, t] + (key * cov_keys).sum(-1))
        found.append(precision[..., None] * cov_keys)
        covariance = covariance - precision[..., None, None] * cov_keys[..., None] * cov_keys[..., None, :]
    return torch.stack(found, 1)


@pytest.mark.parametrize("kernel", DENSE)
def test_dense_is_delta_fed_with_its_own_gains(kernel):
    """Equation 31."""
    x, log_decay, belief = tokens() | noises(), TRANSITIONS["decay per key"]()["log_decay"], prior()
    got = ops.dense(**x, log_decay=log_decay, belief=belief, kernel=kernel)
    gain = gains(x, log_decay, belief.covariance)
    for other in kernels("delta"):
        same = ops.delta(*(x[n] for n in "qkv"), gain=gain, log_decay=log_decay, belief=PointBelief(belief.mean),
                         kernel=other)  # fmt: skip
        close(got.mean, same.mean)
        close(got.belief.mean, same.belief.mean)


@pytest.mark.parametrize("kernel", DENSE)
def test_static_dense_is_ridge_regression_over_the_whole_past(kernel):
    """Without transition and noise, solve the weighted normal equations with the prior's precision at every token."""
    x, scale = tokens() | noises(), 2.5
    x["process_noise"] = torch.zeros_like(x["process_noise"])
    eye = torch.eye(K, dtype=torch.float64)
    belief = DenseBelief(torch.zeros(B, G, K, V, dtype=torch.float64), (scale * eye).expand(B, G, K, K))
    got = ops.dense(**x, belief=belief, variance=True, kernel=kernel)
    key, query, weight = per_head(x["k"]), per_head(x["q"]), 1 / x["obs_noise"]
    gram = torch.einsum("btg,btgi,btgj->btgij", weight, key, key).cumsum(1) + eye / scale
    cross = torch.einsum("btg,btgi,btgv->btgiv", weight, key, x["v"]).cumsum(1)
    memory = torch.linalg.solve(gram, cross)
    close(got.mean, torch.einsum("btgi,btgiv->btgv", query, memory))
    close(got.variance[..., 0], torch.einsum("btgi,btgij,btgj->btg", query, torch.linalg.inv(gram), query))
    close(got.belief.mean, memory[:, -1])
    close(got.belief.covariance, torch.linalg.inv(gram[:, -1]))


def recur(x: dict[str, Tensor], decay: Tensor | float, write: Tensor, corrects: bool) -> tuple[Tensor, Tensor]:
    """Run Table 1 as printed: M = A M + write (v - (A M)'k)', or without the correction."""
    memory, reads = torch.zeros(B, G, K, x["v"].shape[-1], dtype=torch.float64), []
    decay = torch.as_tensor(decay, dtype=torch.float64).expand(B, T, G, K)
    for t in range(T):
        memory = decay[:, t, ..., None] * memory
        error = x["v"][:, t]
        if corrects:
            error = error - torch.einsum("bgkv,bgk->bgv", memory, per_head(x["k"])[:, t])
        memory = memory + write[:, t, ..., None] * error[..., None, :]
        reads.append(torch.einsum("bgkv,bgk->bgv", memory, per_head(x["q"])[:, t]))
    return torch.stack(reads, 1), memory


DELTA_FAMILY = {designs.DELTANET: (), designs.GATED_DELTANET: (G,), designs.KDA: (G, K)}
ADDITIVE_FAMILY = {
    designs.LINEAR_ATTENTION: (),
    designs.RETNET: (G,),
    designs.GLA: (G, K),
    designs.MAMBA2: (G,),
}


def decays(design: designs.Design, shape: tuple[int, ...]) -> dict[str, Tensor]:
    if not shape:
        return {}
    drawn = -uniform(B, T, *shape, high=0.3)
    return {"log_decay": drawn[:1, :1].expand_as(drawn) if design is designs.RETNET else drawn}  # RetNet's is constant


def decay_of(signals: dict[str, Tensor]) -> Tensor | float:
    log_decay = signals.get("log_decay")
    return 1.0 if log_decay is None else log_decay.exp().reshape(B, T, G, -1)


@pytest.mark.parametrize("design", DELTA_FAMILY, ids=lambda design: design.name)
def test_covariance_reset_is_the_delta_family(design):
    """Proposition 2: `dense` with its predicted covariance reset to lambda I, equation 17, and the op agree."""
    x, moved = tokens(), decays(design, DELTA_FAMILY[design])
    noise, reset = uniform(B, T, G, low=0.05, high=2.0), uniform(B, T, G, low=0.1, high=3.0)
    eta = reset / (noise + reset * per_head(x["k"]).square().sum(-1))
    mean, memory = recur(x, decay_of(moved), eta[..., None] * per_head(x["k"]), corrects=True)
    for kernel in kernels("delta"):
        got = kalmix.filter(design, **x, **moved, obs_noise=noise, reset=reset, kernel=kernel)
        close(got.mean, mean)
        close(got.belief.mean, memory)
    unsure = torch.zeros(B, G, K, K, dtype=torch.float64)
    belief = DenseBelief(torch.zeros_like(memory), unsure)
    for t in range(T):
        current = {
            name: y[:, t : t + 1] for name, y in (x | moved | {"obs_noise": noise, "process_noise": reset}).items()
        }
        read = ops.dense(**current, belief=DenseBelief(belief.mean, unsure))  # reset to lambda I
        belief = read.belief
        close(read.mean, mean[:, t : t + 1])


def test_longhorn_is_delta_with_a_noise_a_column():
    x = tokens(heads=G * V, width=1)
    noise, reset = uniform(B, T, G * V, low=0.05, high=2.0), uniform(B, T, G * V, low=0.1, high=3.0)
    key, query = (x[name].repeat_interleave(G * V // H, 2) for name in "kq")
    eta = reset / (noise + reset * key.square().sum(-1))
    memory, reads = torch.zeros(B, G * V, K, dtype=torch.float64), []
    for t in range(T):  # Table 1: column j of M is corrected by its own eta
        error = x["v"][:, t, :, 0] - (memory * key[:, t]).sum(-1)
        memory = memory + (eta[:, t] * error)[..., None] * key[:, t]
        reads.append((memory * query[:, t]).sum(-1, keepdim=True))
    for kernel in kernels("delta"):
        got = kalmix.filter(designs.LONGHORN, **x, obs_noise=noise, reset=reset, kernel=kernel)
        close(got.mean, torch.stack(reads, 1))
        close(got.belief.mean[..., 0], memory)


@pytest.mark.parametrize("design", ADDITIVE_FAMILY, ids=lambda design: design.name)
def test_the_latent_input_model_is_the_additive_family(design):
    """Appendix A: the filter of (write, memory) given v, the gain of equation 19, and the op agree."""
    x, moved = tokens(), decays(design, ADDITIVE_FAMILY[design])
    noise, variance = uniform(B, T, G, low=0.05, high=2.0), uniform(B, T, G, low=0.1, high=3.0)
    # The write is one more latent row, new at every token and observed separately: `dense` with a key of width 1.
    alone = torch.ones(B, T, G, 1, dtype=torch.float64)
    nothing = DenseBelief(torch.zeros(B, G, 1, V, dtype=torch.float64), torch.zeros(B, G, 1, 1, dtype=torch.float64))
    writes = []
    for t in range(T):
        current = {"q": alone[:, t : t + 1], "k": alone[:, t : t + 1], "v": x["v"][:, t : t + 1]}
        current |= {"obs_noise": noise[:, t : t + 1], "process_noise": variance[:, t : t + 1]}
        writes.append(ops.dense(**current, belief=nothing).mean)
    observed = torch.cat(writes, 1)
    close(observed, (variance / (variance + noise))[..., None] * x["v"])
    mean, memory = recur(x | {"v": observed}, decay_of(moved), per_head(x["k"]), corrects=False)
    for kernel in kernels("additive"):
        got = kalmix.filter(design, **x, **moved, obs_noise=noise, write_variance=variance, kernel=kernel)
        close(got.mean, mean)
        close(got.belief.mean, memory)


@pytest.mark.parametrize("kernel", DENSE)
def test_heads_that_share_a_key_are_grouped_noise(kernel):
    """Appendix D: with R = diag(r_1^2 I, r_2^2 I) the textbook filter on vec(S) is one filter per group."""
    groups = G // H
    x = tokens() | noises() | TRANSITIONS["decay per key"]()
    for name in ("process_noise", "log_decay"):  # groups share the transition of their memory
        x[name] = x[name][:, :, ::groups].repeat_interleave(groups, 2)
    got = ops.dense(**x, variance=True, kernel=kernel)
    columns = torch.eye(groups * V, dtype=torch.float64)
    for n in range(B):
        for h in range(H):
            own_gains = slice(h * groups, (h + 1) * groups)
            mean, covariance = torch.zeros(groups * V * K).double(), torch.eye(groups * V * K).double()
            for t in range(T):
                step = torch.kron(columns, x["log_decay"][n, t, h * groups].exp().diag())
                mean = step @ mean
                covariance = (
                    step @ covariance @ step + x["process_noise"][n, t, h * groups] * torch.eye(len(mean)).double()
                )
                sight, read = (torch.kron(columns, x[name][n, t, h][None]) for name in "kq")
                noise = x["obs_noise"][n, t, own_gains].repeat_interleave(V).diag()
                gain = torch.linalg.solve(sight @ covariance @ sight.T + noise, sight @ covariance).T
                mean = mean + gain @ (x["v"][n, t, own_gains].flatten() - sight @ mean)
                covariance = covariance - gain @ sight @ covariance
                close(got.mean[n, t, own_gains].flatten(), read @ mean)
                spread = (read @ covariance @ read.T).diagonal().reshape(groups, V)
                close(got.variance[n, t, own_gains].expand(groups, V), spread)
