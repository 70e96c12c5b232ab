"""Adapters of other libraries compute what our ops do."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kalmix.ops import Chebyshev, diagonal, ridge
from kalmix_bench.perf import peers
from kalmix_bench.perf.workloads import signals


def naive_gka(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, gk: Tensor, alpha: Tensor, scale: float, num_iter: int
) -> tuple[Tensor, None]:
    """Compute Gated KalmaNet as documented by flash-linear-attention, token by token, with an exact solver."""
    assert num_iter == 30
    outputs, keys, values = [], torch.zeros(()), torch.zeros(())
    for t in range(q.shape[1]):
        query, key, value = (x[:, t, :, :, None] for x in (q, k, v))
        keys = gk[:, t, :, None, None].exp() * keys + key @ key.mT
        values = g[:, t, :, None, None].exp() * values + key @ value.mT
        strength = 0.02 * torch.linalg.matrix_norm(keys)[..., None, None]
        solution = torch.linalg.solve(keys + strength * torch.eye(key.shape[2], dtype=q.dtype), query)
        outputs.append(scale * values.mT @ (query + alpha[:, t, :, None, None] * (solution - query)))
    return torch.stack(outputs, 1)[..., 0], None


def test_gated_kalmanet_of_fla_gets_the_same_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "fla.ops.gka", SimpleNamespace(chunk_gka=naive_gka))
    x = {name: y.detach().double() for name, y in signals("ridge", "head", (1, 9, 2, 4), "cpu", torch.float32).items()}
    (found,) = peers._fla_gka()["fla gka"](x)
    options: dict[str, Any] = {**x, "solver": Chebyshev(200)}
    expected = ridge(**options).mean
    assert float((found - expected).norm() / expected.norm()) < 1e-6


def test_a_missing_peer_is_reported_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    peers._report.cache_clear()
    assert peers._fla_gka() == peers._fla_gka() == {}
    assert capsys.readouterr().out.count("`fla.ops.gka`") == 1


def test_fused_attention_of_pytorch_is_softmax_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = {name: torch.randn(1, 5, 2, 8) for name in "qkv"}
    (found,) = peers.attend()["sdpa (flash)"](x)
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(found, (scores.softmax(-1) @ v).transpose(1, 2))


def test_forms_of_the_authors_kla_get_the_same_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is not installed here, so a stand-in filters by the equations of its documentation."""

    def scan(v: Tensor, precision: Tensor, k: Tensor, q: Tensor, a: Tensor, p: Tensor, **form: str) -> Any:
        forms.append(form)
        state, information, means = torch.ones(*a.shape), torch.zeros(*a.shape), []
        for t in range(v.shape[1]):
            denominator = a.square() + p * state
            information = a / denominator * information + (v * precision)[0, t, :, None] * k[0, t]
            state = state / denominator + precision[0, t, :, None] * k[0, t].square()
            means.append((information / state) @ q[0, t])
        return torch.stack(means)[None], None, None

    forms: list[dict[str, str]] = []
    package = SimpleNamespace(kla_scan=scan, kla_scan_reference=scan, kla_scan_torch=scan)
    monkeypatch.setattr(peers, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "kla", SimpleNamespace(ops=package))
    monkeypatch.setitem(sys.modules, "kla.ops", package)
    x: dict[str, Any] = {
        name: y.detach() for name, y in signals("diagonal", "head", (1, 9, 8, 4), "cpu", torch.float32).items()
    }
    expected = diagonal(**x).mean
    for run in peers.diagonal().values():
        torch.testing.assert_close(run(x)[0].view_as(expected), expected)
    assert forms == [{"backend": "cuda"}, {"backend": "triton"}, {}, {"scan_impl": "associative"}]
