"""Cells of the comparison: layer, size, learning rate and seed; recipes and presets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from kalmix.errors import ArgumentError, any_of
from kalmix.training.batching import plan_batches
from kalmix.training.recipe import Recipe
from kalmix.validation import check_choice
from kalmix_bench.experiments.language.architectures import (
    LAYERS,
    ModelSize,
    compress,
    layer_name,
    make_blocks,
)
from kalmix_bench.runner.cells import Row

if TYPE_CHECKING:
    from kalmix.training.estimates import Estimate

TUNE, MAIN = "tune", "main"
STAGES = (TUNE, MAIN)
ANY_CORPUS = "any"
TUNE_HINT = "Run the stage `tune` with lower `--rates`"
LONGER = 4  # the longest test sequences have so many times the tokens of the training sequences
# Settings of every run. Learning rates are given for a width of 512 and 2^18 tokens a step.
OPTIMIZER: dict[str, Any] = {
    "schedule": "cosine",
    "final_learning_rate": 0.1,
    "weight_decay": 0.1,
    "betas": (0.9, 0.95),
    "clip": 1.0,
    "reference_width": 512,
    "reference_batch": 1 << 18,
    "packing": "stream",
}


@dataclass(frozen=True)
class RunSize:
    """Sizes of a model and of its training.

    Attributes:
        model: size of the model.
        seq_len: tokens of a training sequence.
        tokens: training tokens.
        batch_tokens: tokens of an optimizer step.
        batch_size: largest number of sequences at once.
        eval_tokens: held-out tokens of each of the ten evaluations during training.
        probe_rows: sequences of each test after training.
        bf16: train and test under bfloat16 autocast.
        warmup: fraction of the steps in which the learning rate rises.
    """

    model: ModelSize
    seq_len: int
    tokens: int
    batch_tokens: int
    batch_size: int
    eval_tokens: int
    probe_rows: int
    bf16: bool
    warmup: float = 0.03


class Preset(NamedTuple):
    """Sizes of both stages, layers and learning rates."""

    tune: RunSize
    main: RunSize
    layers: tuple[str, ...]
    rates: tuple[float, ...]

    def size(self, stage: str) -> RunSize:
        """Return the size of a stage."""
        return self.tune if stage == TUNE else self.main

    def with_zero_init(self, zero_init: bool) -> Preset:
        """Return this preset with output projections that begin with zeros in both stages, or with random numbers."""
        return self._map(lambda size: replace(size, model=replace(size.model, zero_init=zero_init)))

    def with_embedding_norm(self, embedding_norm: bool) -> Preset:
        """Return this preset with a norm of embedded tokens in both stages, or without it."""
        return self._map(lambda size: replace(size, model=replace(size.model, embedding_norm=embedding_norm)))

    def with_warmup(self, warmup: float) -> Preset:
        """Return this preset with a warmup of this fraction of the steps in both stages."""
        return self._map(lambda size: replace(size, warmup=warmup))

    def _map(self, change: Callable[[RunSize], RunSize]) -> Preset:
        return self._replace(tune=change(self.tune), main=change(self.main))


_MAIN = RunSize(
    ModelSize(parameters=50_000_000, hidden_size=512, depth=12, vocab_size=16_384),
    seq_len=1024,
    tokens=300_000_000,
    batch_tokens=1 << 18,
    batch_size=64,
    eval_tokens=1 << 20,
    probe_rows=64,
    bf16=True,
)
_SMALL = RunSize(
    ModelSize(parameters=300_000, hidden_size=64, depth=2, vocab_size=512),
    seq_len=128,
    tokens=400_000,
    batch_tokens=4096,
    batch_size=32,
    eval_tokens=16_384,
    probe_rows=16,
    bf16=False,
)
_SHORT = replace(
    _MAIN,
    model=replace(_MAIN.model, parameters=10_200_000, hidden_size=256, depth=8),
    tokens=20_000_000,
    batch_tokens=1 << 16,
    eval_tokens=1 << 18,
)
PRESETS = {
    "laptop": Preset(
        tune=replace(_SMALL, model=replace(_SMALL.model, parameters=100_000, hidden_size=32), tokens=100_000),
        main=_SMALL,
        layers=("gated-deltanet", "attention"),
        rates=(1e-2, 2e-2, 4e-2),
    ),
    "short": Preset(
        tune=_SHORT,
        main=_SHORT,
        layers=('bayesian:{"decays_per_head": "key"}', 'bayesian:{"decays_per_head": 1}', "gated-deltanet"),
        rates=(2e-3, 4e-3),
    ),
    "medium": Preset(
        tune=replace(_SHORT, tokens=10_000_000, batch_tokens=1 << 15, eval_tokens=1 << 17),
        main=replace(_MAIN, tokens=30_000_000, batch_tokens=1 << 16, eval_tokens=6 << 16),
        layers=(  # the first ones are those to repeat with further seeds
            *("kla", "kla-noise-free", "bayesian", "kda", "gated-deltanet", "afa-attention-start", "mamba2"),
            *("gated-kalmanet", "attention", "gla", "gated-kalmanet+attention", "gated-deltanet+attention", "afa"),
            *("kla+mlp", "kla-noise-free+mlp"),
        ),
        rates=(2e-3, 4e-3, 8e-3, 16e-3),
    )
    .with_zero_init(True)
    .with_warmup(0.2),
    "paper": Preset(
        tune=replace(_MAIN, model=_SHORT.model, tokens=50_000_000, batch_tokens=1 << 17),
        main=_MAIN,
        layers=LAYERS,
        rates=(1e-3, 2e-3, 4e-3),
    )
    .with_zero_init(True)
    .with_warmup(0.2),
}


@dataclass(frozen=True)
class LanguageCell:
    """One training run.

    Attributes:
        stage: "tune", which compares learning rates at a smaller size, or "main".
        layer: layer as `architectures.make_blocks` takes it, stored in the form of `layer_name`.
        size: sizes of the run.
        learning_rate: peak learning rate at the reference width and batch of `OPTIMIZER`.
        seed: seed of weights and of the order of the data.
        corpus: digest of the token shards.

    Raises:
        ArgumentError: the stage or the layer is unknown, or the layer does not fit the number of parameters.
    """

    stage: str
    layer: str
    size: RunSize
    learning_rate: float
    seed: int
    corpus: str

    def __post_init__(self) -> None:
        check_choice("stage", self.stage, STAGES)
        make_blocks(self.layer, self.size.model)
        object.__setattr__(self, "layer", layer_name(self.layer))

    def __str__(self) -> str:
        return f"{self.stage}  {self.layer}  rate {self.learning_rate:g}  seed {self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything that defines the cell."""
        size = asdict(self.size)
        warmup = size.pop("warmup")
        for option in ("zero_init", "embedding_norm"):
            if not size["model"][option]:  # rows from before this option lack it
                del size["model"][option]
        return {
            "language": self.layer,
            "stage": self.stage,
            "blocks": compress(make_blocks(self.layer, self.size.model)),
            "size": size,
            "optimizer": {**OPTIMIZER, "betas": list(OPTIMIZER["betas"]), "warmup": warmup},
            "learning_rate": self.learning_rate,
            "seed": self.seed,
            "corpus": self.corpus,
        }

    def recipe(self, shards: str) -> Recipe:
        """Return the recipe of the run, for `kalmix.training.run.train`.

        Args:
            shards: folder of token shards.
        """
        size = self.size
        return Recipe(
            shards=shards,
            layers=make_blocks(self.layer, size.model),
            hidden_size=size.model.hidden_size,
            vocab_size=size.model.vocab_size,
            model={
                "tie_word_embeddings": True,
                "zero_init": size.model.zero_init,
                "embedding_norm": size.model.embedding_norm,
            },
            seq_len=size.seq_len,
            tokens=size.tokens,
            batch_tokens=size.batch_tokens,
            batch_size=size.batch_size,
            eval_tokens=size.eval_tokens,
            bf16=size.bf16,
            learning_rate=self.learning_rate,
            save_minutes=60.0,
            keep_checkpoints=1,
            warmup=size.warmup,
            seed=self.seed,
            **OPTIMIZER,
        )

    def estimate(self) -> Estimate:
        """Return the size and the work of the run on one device."""
        from kalmix.training.estimates import estimate  # imports transformers

        recipe = self.recipe("shards")
        return estimate(recipe, plan_batches(recipe, 1))


def tuning_cells(
    preset: Preset, layers: Sequence[str], rates: Sequence[float], corpus: str, seeds: int = 1
) -> list[LanguageCell]:
    """Return the cells that compare learning rates, seed by seed and rate by rate.

    Cells that run side by side then have different layers, so that few of them compile the same kernels.
    """
    return [
        LanguageCell(TUNE, layer, preset.tune, rate, seed, corpus)
        for seed in range(seeds)
        for rate in rates
        for layer in layers
    ]


def main_cells(
    preset: Preset, layers: Sequence[str], rates: dict[str, float], seeds: int, corpus: str
) -> list[LanguageCell]:
    """Return the cells of the table, seed by seed, so that every layer has an early result.

    Layers without a learning rate in `rates` are left out.
    """
    return [
        LanguageCell(MAIN, layer, preset.main, rates[layer], seed, corpus)
        for seed in range(seeds)
        for layer in layers
        if layer in rates
    ]


def shared_device(row: Row) -> bool:
    """Return whether other models ran on the device of a row's model at the same time."""
    return "jobs_per_device" in row


def speed(row: Row, name: str) -> float | None:
    """Return a measure of speed; `None` if the row has none, or its model shared the device."""
    return None if shared_device(row) else row.get(name)


def best_rates(rows: Iterable[Row], layers: Sequence[str]) -> dict[str, float]:
    """Return the learning rate of the lowest held-out loss of each layer, averaged over seeds.

    Args:
        rows: rows of the stage "tune" on one corpus; a rate at which one diverged does not count.
        layers: layers that need one. Layers without a run, or whose every run diverged, are left out.

    Raises:
        ArgumentError: no layer is left.
    """
    return _require_rates(_lowest_losses(rows, layers), layers)


def tuned_rates(rows: Iterable[Row], layers: Sequence[str], tuned_on: str) -> dict[str, float]:
    """Return the learning rates that a corpus chooses, as `best_rates` does.

    Args:
        rows: rows of the stage "tune" at one size. Losses of different corpora are not compared.
        layers: layers that need one. Layers without a run, or whose every run diverged, are left out.
        tuned_on: name of the corpus, or its beginning if no other begins so; or "any", for layers whose corpora all
            choose the same rate.

    Raises:
        ArgumentError: no corpus or several have this name; corpora choose different rates; or no layer is left.
    """
    rows_by_corpus: dict[str, list[Row]] = {}
    for row in rows:
        rows_by_corpus.setdefault(row["corpus"], []).append(row)
    if tuned_on != ANY_CORPUS:
        return best_rates(rows_by_corpus[_full_name(tuned_on, rows_by_corpus)], layers)
    choices = {corpus: _lowest_losses(of_corpus, layers) for corpus, of_corpus in rows_by_corpus.items()}
    disputed = [layer for layer in layers if len({found[layer] for found in choices.values() if layer in found}) > 1]
    if disputed:
        raise _different_rates(choices, disputed)
    return _require_rates({layer: rate for found in choices.values() for layer, rate in found.items()}, layers)


def _full_name(given: str, corpora: Iterable[str]) -> str:
    """Return the corpus of this name, or the only one whose name begins so."""
    names = list(corpora)
    found = [given] if given in names else [name for name in names if given and name.startswith(given)]
    if len(found) == 1:
        return found[0]
    problem = f"is {given!r}" + (", which begins several names" if found else "")
    known = any_of(names) if names else "there is none"
    raise ArgumentError("tuned_on", problem=problem, expected=f"a corpus with rows of tune at this size ({known})")


def _different_rates(choices: Mapping[str, Mapping[str, float]], layers: Sequence[str]) -> ArgumentError:
    """Return the error for layers for which corpora choose different rates."""
    by_corpus = {
        corpus: ", ".join(f"{layer} {rates[layer]:g}" for layer in layers if layer in rates)
        for corpus, rates in choices.items()
    }
    listed = [f"{corpus!r} ({rates})" for corpus, rates in by_corpus.items() if rates]
    problem = f"is {ANY_CORPUS!r}, but corpora choose different rates for {', '.join(map(repr, layers))}"
    return ArgumentError("tuned_on", problem=problem, expected=f"one of the corpora {' or '.join(listed)}")


def _lowest_losses(rows: Iterable[Row], layers: Sequence[str]) -> dict[str, float]:
    """Return the rate of the lowest mean loss of each of the layers that have one."""
    losses: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        of_rate = losses.setdefault(row["language"], {}).setdefault(row["learning_rate"], [])
        of_rate.append(row.get("loss", inf))
    best: dict[str, float] = {}
    for name, by_rate in losses.items():
        means = {rate: fmean(values) for rate, values in by_rate.items() if max(values) < inf}
        if means:
            best[name] = min(means, key=lambda rate: means[rate])
    return {layer: best[layer] for layer in layers if layer in best}


def _require_rates(found: dict[str, float], layers: Sequence[str]) -> dict[str, float]:
    """Return `found`; raise an error if it has no layer."""
    if not found:
        problem = f"has no run of {', '.join(map(repr, layers))} that did not diverge"
        raise ArgumentError("rates", problem=problem, expected="a rate with a finite loss", hint=TUNE_HINT)
    return found
