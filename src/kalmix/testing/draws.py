"""Random calls of ops for the fuzz script: sizes, dtypes, noises, gates, segments, priors and options."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kalmix.ops import OPS
from kalmix.ops._ridge.solvers import Adaptive, Chebyshev, ConjugateGradient, Exact, Fixed, Sketch
from kalmix.testing.recursions import Run, Tensors
from kalmix.types import belief_dtype

DTYPES = (torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16)
Kernels = Callable[[str], list[str]]  # maps an op to names of its kernels
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 32, 33, 48, 64)
WIDE = (33, 48, 64, 80)  # key widths of the kernel "cuda"
TILE_KERNELS = ("triton", "cuda")  # kernels that compute tiles of tokens by matrix products
MOST_NUMBERS = 400_000  # numbers of all states of a case: limits time and memory
MOST_NOISE = 100.0


@dataclass
class Draw:
    """One random call.

    Attributes:
        x: signals and prior in the kernel's dtypes, on the CPU; a prior's tensors are named "prior.<field>".
        options: other arguments.
        runs: sequences as (batch row, start, stop); `None` if each batch row is one sequence.
    """

    number: int
    op: str
    kernel: str
    dtype: torch.dtype
    sizes: dict[str, int]
    x: Tensors = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    runs: list[Run] | None = None

    @property
    def sequences(self) -> list[Run]:
        return [(b, 0, self.sizes["T"]) for b in range(self.sizes["B"])] if self.runs is None else self.runs

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        prior = "prior" if any(name.startswith("prior.") for name in self.x) else "no prior"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.op} {self.kernel} {dtype} {sizes} runs={self.runs} {prior} {self.options}"


class RandomSource:
    """Source of random choices and tensors for one case."""

    def __init__(self, number: int) -> None:
        self.random: random.Random = random.Random(number)
        self.generator: torch.Generator = torch.Generator().manual_seed(number)

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def choice(self, options: Any) -> Any:
        return self.random.choice(options)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def log_uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return (math.log(low) + (math.log(high) - math.log(low)) * self.uniform(*shape)).exp()

    def noise(self, low: float, *shape: int, high: float = MOST_NOISE) -> Tensor:
        """Draw variances: log-uniform over the range, near one level, or all equal to a limit."""
        kind = self.random.random()
        if kind < 0.5:
            level = float(self.log_uniform(low, high))
            return (level * (0.3 * self.normal(*shape)).exp()).clamp(low, high)
        if kind < 0.8:
            return self.log_uniform(low, high, *shape)
        return torch.full(shape, low if kind < 0.92 else high, dtype=torch.float64)

    def log_decay(self, *shape: int) -> Tensor:
        """Draw log-decays for gates near 1, near 0 and between, of one kind or mixed."""
        kinds = (
            lambda: torch.zeros(shape, dtype=torch.float64),
            lambda: -0.2 * self.normal(*shape).exp(),
            lambda: -self.log_uniform(1e-4, 10.0, *shape),
            lambda: torch.full(shape, -self.choice((30.0, 100.0, 500.0)), dtype=torch.float64),
        )
        if self.chance(0.6):
            return self.random.choices(kinds, (2, 4, 3, 1))[0]()
        return self.mixed(shape, [kind() for kind in kinds])

    def mixed(self, shape: tuple[int, ...], parts: list[Tensor]) -> Tensor:
        which = (self.uniform(*shape) * len(parts)).long().clamp(max=len(parts) - 1)
        return torch.stack(parts).gather(0, which[None])[0]

    def gate(self, *shape: int) -> Tensor:
        """Draw gates from 0 to 1, both included."""
        inside = self.normal(*shape).sigmoid()
        return inside if self.chance(0.5) else self.mixed(shape, [inside, inside.round()])


def draw(
    number: int, kernels: Callable[[str], list[str]], ops: tuple[str, ...] | None = None, small: bool = True
) -> Draw:
    """Draw call `number`; for an op that is not in `SIGNAL_DRAWS`, only sizes and sequences.

    Args:
        kernels: function from an op to the names of its kernels; a name may occur several times as a weight.
        ops: names of ops; all if absent.
        small: whether Triton kernels are interpreted and need small sizes.
    """
    rng = RandomSource(number)
    op = rng.choice(fuzzed_ops() if ops is None else ops)
    kernel = rng.choice(kernels(op))
    triton = kernel in TILE_KERNELS
    dtype = rng.choice(DTYPES[1:4] if triton and small else DTYPES[1:] if triton else DTYPES)
    case = Draw(number, op, kernel, dtype, _sizes(rng, op, kernel, triton and small))
    case.runs = _runs(rng, case.sizes["B"], case.sizes["T"])
    case.sizes["N"] = len(case.sequences)
    if op not in SIGNAL_DRAWS:
        return case
    case.x, case.options = SIGNAL_DRAWS[op](rng, case)
    _tokens(rng, case)
    carried = belief_dtype(dtype)
    gates = dtype if rng.chance(0.25) else carried  # gates and noises come in either dtype
    for name, x in case.x.items():
        kind = dtype if name in ("q", "k", "v") else carried if name.startswith("prior.") else gates
        if x.is_floating_point() and not name.endswith("times"):
            case.x[name] = x.clamp(max=torch.finfo(kind).max).to(kind)
    least = case.options.pop("least_noise", None)
    if least is not None:  # observation noise relative to the squared key; rounding must not lower it
        square = case.x["k"].double().square().sum(-1).repeat_interleave(case.sizes["G"] // case.sizes["H"], 2)
        noise = case.x["obs_noise"]
        low = (least * square.clamp(min=1.0)).to(noise.dtype)
        case.x["obs_noise"] = torch.maximum(noise, low.nextafter(low + 1))
    return case


def _sizes(rng: RandomSource, op: str, kernel: str, small: bool) -> dict[str, int]:
    heads, groups, batch = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3))
    keys, values = rng.choice(WIDE if kernel == "cuda" else WIDTHS), rng.choice(WIDTHS)
    length = rng.choice((0, 1, 2, 3, 15, 16, 17, 31, 33, 64, 65, 127, 129, 200))
    if rng.chance(0.7):
        length = int(rng.log_uniform(4.0, 200.0))
    if small:
        keys, values, length, groups = min(keys, 17), min(values, 17), min(length, 21), min(groups, 2)
        heads, batch = (1, min(batch, 2)) if groups > 1 else (min(heads, 2), 1)
    if op == "attend":
        keys, values = 2 * math.ceil(keys / 2), 2 * math.ceil(values / 2)
        heads, length = min(heads, 2), min(length, 120)
        keys = values if rng.chance(0.4) else keys + 2 * (keys == values)
    elif keys == values:
        keys += 1
    while batch * heads * groups * keys * (keys + values) * max(length, 1) > MOST_NUMBERS and length > 8:
        length = length * 2 // 3
    return {"B": batch, "T": length, "H": heads, "G": heads * groups, "K": keys, "V": values}


def _runs(rng: RandomSource, batch: int, length: int) -> list[Run] | None:
    """Draw sequences: one per row with padding, or several with gaps, some empty, in any order."""
    if rng.chance(0.4):
        return None
    runs = []
    for row in range(batch):
        if rng.chance(0.4):
            start, stop = sorted(rng.random.randint(0, length) for _ in range(2))
            runs.append((row, start, stop))
            continue
        cuts = sorted(rng.random.randint(0, length) for _ in range(rng.choice((2, 3, 4, 6))))
        cuts = [0, *cuts, length] if rng.chance(0.5) else cuts
        runs += [(row, *ends) for ends in itertools.pairwise(cuts) if rng.chance(0.8)]
    rng.random.shuffle(runs)
    return runs[:6]


def _tokens(rng: RandomSource, case: Draw) -> None:
    """Draw queries, keys and values; keys may repeat or be 0 at some tokens."""
    b, t, h, g, k, v = (case.sizes[x] for x in "BTHGKV")
    key = rng.normal(b, t, h, k) / k**0.5
    kind = rng.random.random()
    if kind < 0.15 and t > 0:
        key = key[:, :1].expand_as(key).clone()
    elif kind < 0.3:
        key = key / key.norm(dim=-1, keepdim=True)
    elif kind < 0.4:
        key = key * (rng.uniform(b, t, h, 1) < 0.7)
    tokens = {"q": rng.normal(b, t, h, k), "k": key, "v": rng.normal(b, t, g, v)}
    if case.dtype == torch.float16 and case.op in ("additive", "ridge"):  # sums over tokens of large gains
        tokens["v"] = tokens["v"] / 2**10
    if case.options.get("weight") == "exponential" or (case.op == "attend" and rng.chance(0.5)):
        tokens["q"] = tokens["q"] / k**0.5
    if "angle" in case.x:
        for name in ("q", "k"):
            tokens[name][..., k // 2 :] = 0
    if case.op == "delta":
        _stabilise(rng, case, tokens["k"])
    case.x = tokens | case.x


def _decays(rng: RandomSource, case: Draw, *layouts: str) -> Tensors:
    if rng.chance(0.2):
        return {}
    return {"log_decay": rng.log_decay(*(case.sizes[x] for x in rng.choice(layouts)))}


def _prior(rng: RandomSource, case: Draw, **fields: Callable[[], Tensor]) -> Tensors:
    return {} if rng.chance(0.3) else {f"prior.{name}": make() for name, make in fields.items()}


def _draw_additive(rng: RandomSource, case: Draw) -> tuple[Tensors, dict[str, Any]]:
    b, t, g, k, v, n = (case.sizes[x] for x in "BTGKVN")
    x = _decays(rng, case, "BTG", "BTGK")
    if rng.chance(0.8):
        x["gain"] = rng.gate(b, t, g) if rng.chance(0.6) else 1 / rng.noise(OPS["additive"].least_noise, b, t, g)
    return x | _prior(rng, case, mean=lambda: rng.normal(n, g, k, v)), {}


def _draw_delta(rng: RandomSource, case: Draw) -> tuple[Tensors, dict[str, Any]]:
    g, k, v, n = (case.sizes[x] for x in "GKVN")
    x = _decays(rng, case, "BTG", "BTGK")
    return x | _prior(rng, case, mean=lambda: rng.normal(n, g, k, v)), {}


def _stabilise(rng: RandomSource, case: Draw, key: Tensor) -> None:
    """Draw the gain of `delta`, 0 <= k'c <= 1: a gate, or the gain of a filter whose variance is reset."""
    b, t, g, k = (case.sizes[x] for x in "BTGK")
    key = key.repeat_interleave(g // case.sizes["H"], 2)
    noise = rng.noise(OPS["delta"].least_noise, b, t, g)
    kind = rng.random.random()
    if kind < 0.4:
        case.x["gain"] = rng.gate(b, t, g) / key.square().sum(-1).clamp(min=1.0)
    elif kind < 0.7:
        case.x["gain"] = 1 / (noise + key.square().sum(-1))
    else:
        reset = rng.log_uniform(0.1, 10.0, b, t, g, k)
        key_gain = reset * key
        case.x["gain"] = key_gain / (noise + (key * key_gain).sum(-1))[..., None]


def _draw_diagonal(rng: RandomSource, case: Draw) -> tuple[Tensors, dict[str, Any]]:
    b, t, g, k, v, n = (case.sizes[x] for x in "BTGKVN")
    precision = 1 / rng.noise(OPS["diagonal"].least_noise, b, t, g, v)
    if rng.chance(0.3):
        precision = precision * (rng.uniform(b, t, g, v) < 0.6)
    per_token = case.kernel == "reference" and rng.chance(0.15)
    shape = (b, t, g, k, v) if per_token else (g, k, v)
    noise = torch.zeros(shape, dtype=torch.float64) if rng.chance(0.25) else rng.noise(1e-6, *shape)
    x = {"precision": precision, "log_decay": rng.log_decay(*shape), "process_noise": noise}
    prior = _prior(
        rng,
        case,
        mean=lambda: rng.normal(n, g, k, v),
        variance=lambda: rng.log_uniform(1e-3, 1e2, n, g, k, v) * (rng.uniform(n, g, k, v) < 0.9),
    )
    return x | prior, {}


def _draw_dense(rng: RandomSource, case: Draw) -> tuple[Tensors, dict[str, Any]]:
    rotates = case.kernel not in TILE_KERNELS and rng.chance(0.25)
    if rotates:
        case.sizes["K"] += case.sizes["K"] % 2
        case.sizes["V"] += case.sizes["V"] == case.sizes["K"]
        case.sizes["P"] = case.sizes["K"] // 2
    b, t, g, k, v, n = (case.sizes[x] for x in "BTGKVN")
    x = _decays(rng, case, "BTG", "BTGP" if rotates else "BTGK")
    if rotates:
        x["angle"] = rng.choice((0.01, 1.0, 10.0)) * rng.normal(b, t, g, k // 2)
    root = rng.normal(n, g, k, k) / k**0.5
    covariance = float(rng.log_uniform(1e-2, 1e2)) * (root @ root.mT + 0.1 * torch.eye(k, dtype=torch.float64))
    x |= _prior(rng, case, mean=lambda: rng.normal(n, g, k, v), covariance=lambda: covariance)
    variance = float(torch.linalg.eigvalsh(covariance).max()) if "prior.covariance" in x and n else 1.0
    x["process_noise"] = rng.noise(1e-6, b, t, g) * (not rng.chance(0.3))
    if rng.chance(0.7):  # otherwise float32 resolves little of precise observations
        variance = max(variance, float(x["process_noise"].amax()) if t else 0.0)
    least = OPS["dense"].least_noise * variance
    x["obs_noise"] = rng.noise(least, b, t, g, high=max(MOST_NOISE, 2 * least))
    return x, {"least_noise": least}


def _draw_ridge(rng: RandomSource, case: Draw) -> tuple[Tensors, dict[str, Any]]:
    b, t, g, k, v, n = (case.sizes[x] for x in "BTGKVN")
    x = _decays(rng, case, "BTG")
    if rng.chance(0.8):
        x["gain"] = rng.gate(b, t, g) if rng.chance(0.5) else 1 / rng.noise(OPS["ridge"].least_noise, b, t, g)
    if rng.chance(0.7):
        x["mix"] = rng.gate(b, t, g)
    root = rng.normal(n, g, k, k) / k**0.5
    x |= _prior(rng, case, cross=lambda: rng.normal(n, g, k, v), gram=lambda: root @ root.mT)
    adaptive = Adaptive(rng.choice((0.02, 0.02, 0.1, 1.0, 10.0)))
    ridge = adaptive if rng.chance(0.7) else Fixed(float(rng.log_uniform(0.05, 10.0)))
    return x, {"ridge": ridge, "solver": _solver(rng, case)}


def _solver(rng: RandomSource, case: Draw) -> Any:
    iterations = rng.choice((3, 10, 30, 30, 30, 60))
    enough = max(30, 2 * case.sizes["K"])  # conjugate gradients amplify rounding before they converge
    solvers = [Chebyshev(iterations), Chebyshev(iterations), ConjugateGradient(enough)]
    if case.kernel != "triton":
        solvers.append(Exact())
        inner = rng.choice((Chebyshev(iterations), ConjugateGradient(enough), Exact()))
        solvers.append(Sketch(rng.random.randint(1, case.sizes["K"] + 2), inner, rng.random.randint(0, 9)))
    if case.kernel == "reference":
        solvers.append(Chebyshev(iterations, backward="unrolled"))
    return rng.choice(solvers)


def _draw_attend(rng: RandomSource, case: Draw) -> tuple[Tensors, dict[str, Any]]:
    b, t, h, k, v = (case.sizes[x] for x in "BTHKV")
    causal = not rng.chance(0.2)
    x = _dynamics(rng, h, k // 2, t, causal)
    if k != v or rng.chance(0.3):
        x |= {f"value_dynamics.{name}": part for name, part in _dynamics(rng, h, v // 2, t, causal).items()}
    options: dict[str, Any] = {"causal": causal, "weight": rng.choice(("rational", "exponential"))}
    for name, low, high in (("nu", 0.1, 100.0), ("temperature", 0.5, 2.0), ("floor", 0.01, 1.0)):
        if rng.chance(0.3):
            options[name] = float(rng.log_uniform(low, high))
        elif rng.chance(0.5):
            x[name] = rng.log_uniform(low, high, h)
    if options["weight"] == "exponential":  # exponents that float32 can hold
        options.pop("nu", None)
        x["nu"] = rng.log_uniform(0.2, 10.0, h) / (x["key_noise"] + x["query_noise"])
    if rng.chance(0.4):
        options["window"] = rng.choice((1, 2, 3, 7, 16, 50))
    if rng.chance(0.6):
        step = rng.choice((1e-3, 1.0, 1.0)) * (rng.normal(b, t) + 0.5).clamp(min=0)
        x["times"] = rng.choice((0.0, 0.0, 1000.0)) + exact_in_float64(step).cumsum(1)
    if causal and not rng.chance(0.4):
        x |= _history(rng, case, x)
    return x, options


def exact_in_float64(step: Tensor) -> Tensor:
    """Round steps of time so that float64 adds and subtracts them exactly, in any order."""
    return (step * 2**24).round() / 2**24


def _dynamics(rng: RandomSource, heads: int, channels: int, length: int, causal: bool) -> Tensors:
    log_decay = rng.log_decay(heads)
    names, least = ("process_noise", "key_noise", "query_noise"), OPS["attend"].least_noise
    noises = {name: rng.noise(least, heads) for name in names}
    for name in ("process_noise", "query_noise"):
        if rng.chance(0.2):
            noises[name] = torch.zeros(heads, dtype=torch.float64)
    if not causal or not bool(noises["process_noise"].all()):  # powers of E, or 1 / E where nothing diffuses, must fit
        log_decay = log_decay.clamp(min=-15.0 / max(length, 10))
    return {"log_decay": log_decay, "frequency": rng.choice((0.1, 1.0)) * rng.normal(heads, channels), **noises}


def _history(rng: RandomSource, case: Draw, x: Tensors) -> Tensors:
    """A history with some empty slots, before the first token of its sequence."""
    n, h, g, k, v = (case.sizes[x] for x in "NHGKV")
    slots = rng.choice((1, 3, 8))
    positions = torch.full((n, slots), -1, dtype=torch.int64)
    for row in range(n):
        held = sorted(rng.random.sample(range(slots), rng.random.randint(0, slots)))
        positions[row, held] = torch.arange(len(held)) + rng.random.randint(0, 3)
    first = x["times"][:, :1].amin() if "times" in x and x["times"].numel() else torch.zeros(())
    return {
        "prior.keys": rng.normal(n, slots, h, k),
        "prior.values": rng.normal(n, slots, g, v),
        "prior.times": first - exact_in_float64(rng.normal(n, slots).abs()).cumsum(1).flip(1),
        "prior.positions": positions,
    }


SIGNAL_DRAWS = {
    "additive": _draw_additive,
    "delta": _draw_delta,
    "diagonal": _draw_diagonal,
    "dense": _draw_dense,
    "ridge": _draw_ridge,
    "attend": _draw_attend,
}


def fuzzed_ops() -> tuple[str, ...]:
    """Return the names of all ops, those of `SIGNAL_DRAWS` first: call numbers depend on the order."""
    return *SIGNAL_DRAWS, *(op for op in OPS if op not in SIGNAL_DRAWS)
