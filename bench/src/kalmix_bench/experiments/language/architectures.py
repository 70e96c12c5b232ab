"""Models by name, with MLPs or numbers of blocks that give all of them the same number of parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch

from kalmix.errors import ArgumentError, unknown_name

Block = dict[str, Any]  # entry of `Recipe.layers`
ATTENTION = "attention"
HYBRID = f"+{ATTENTION}"  # suffix of a hybrid's name
WITH_MLP = "+mlp"  # suffix of a layer that replaces MLPs, but has one behind it here
EVERY = 4  # every fourth block of a hybrid is attention
MLP_STEP = 8  # widths of MLPs are multiples of it

OPTIONS: dict[str, Block] = {
    **{name: {"mixer": name} for name in (ATTENTION, "mamba2", "gla", "gated-deltanet", "kda", "kla")},
    "kla-noise-free": {"mixer": "kla", "process_noise": False},
    "bayesian": {"mixer": "bayesian"},
    "bayesian-decay-per-key": {"mixer": "bayesian", "decays_per_head": "key"},
    "gated-kalmanet": {"mixer": "gated-kalmanet"},
    "afa": {"mixer": "afa"},
    "afa-attention-start": {"mixer": "afa", "initial": "attention"},
}
HYBRIDS = tuple(name + HYBRID for name in ("gated-deltanet", "kla", "bayesian", "gated-kalmanet"))
LAYERS = (*OPTIONS, *HYBRIDS, *(name + WITH_MLP for name in ("mamba2", "kla", "kla-noise-free")))


@dataclass(frozen=True)
class ModelSize:
    """Size of the models of a comparison.

    Attributes:
        parameters: number of parameters that all models have, about.
        hidden_size: width of the residual stream.
        depth: blocks of models whose blocks have an MLP. Others get as many blocks as the parameters allow; hybrids of
            such layers get twice the depth.
        vocab_size: rows of the embedding, which the head shares.
        zero_init: whether output projections of layers and MLPs begin with zeros.
        embedding_norm: whether an RMS norm follows the embedding, so that the residual stream begins with variance 1.
    """

    parameters: int
    hidden_size: int
    depth: int
    vocab_size: int
    zero_init: bool = False
    embedding_norm: bool = False


@lru_cache
def make_blocks(name: str, size: ModelSize) -> tuple[Block, ...]:
    """Return the blocks of a model, as `Recipe.layers`.

    The width of all MLPs is fitted to the parameters, or the number of blocks if no block has an MLP: layers with
    `includes_mlp`, such as KLA and Mamba-2, follow each other without one, unless the name asks for MLPs.

    Args:
        name: a name of `OPTIONS`; one with "+attention" behind it, whose every fourth block is attention; or a layer
            with `includes_mlp` and "+mlp" behind it, which has as many blocks as other layers, each with an MLP.
            Options of the layer may follow a colon as a JSON object, such as `bayesian:{"decays_per_head": 1}`.
        size: size of the model.

    Raises:
        ArgumentError: there is no such layer or option, or the blocks without MLPs have too many parameters.

    Example:
        >>> from kalmix_bench.experiments.language.architectures import ModelSize, make_blocks
        >>> size = ModelSize(parameters=50_000_000, hidden_size=512, depth=12, vocab_size=16384)
        >>> blocks = make_blocks("gated-deltanet+attention", size)
        >>> len(blocks), blocks[2]["mixer"], blocks[3]["mixer"]
        (12, 'gated-deltanet', 'attention')
    """
    layer, suffix = _parse(name)
    bare, hybrid = _includes_mlp(layer["mixer"]) and suffix != WITH_MLP, suffix == HYBRID
    if bare and not hybrid:
        one, two = (_count((layer,) * blocks, size) for blocks in (1, 2))
        return _stack(layer, layer, max(1, 1 + round((size.parameters - one) / (two - one))))
    depth = 2 * size.depth if bare else size.depth

    def stack(mlp: int) -> tuple[Block, ...]:
        own = layer if bare else {**layer, "mlp": mlp}
        return _stack(own, {**OPTIONS[ATTENTION], "mlp": mlp} if hybrid else own, depth)

    first, second = (_count(stack(steps * MLP_STEP), size) for steps in (1, 2))
    steps = 1 + round((size.parameters - first) / (second - first))
    if steps < 1:
        expected = f"at least {first:,}, those of {depth} blocks with MLPs of width {MLP_STEP}"
        raise ArgumentError("parameters", got=f"{size.parameters:,} for {name!r}", expected=expected)
    return stack(steps * MLP_STEP)


def _parse(name: str) -> tuple[Block, str]:
    """Return a layer without an MLP, and the suffix of its name: `HYBRID`, `WITH_MLP` or ""."""
    from kalmix.layers import mixer_class  # slow to import

    full, colon, text = name.partition(":")
    suffix = next((each for each in (HYBRID, WITH_MLP) if full.endswith(each)), "")
    base = full.removesuffix(suffix)
    if base not in OPTIONS or (suffix and not _allows(base, suffix)):
        raise unknown_name("layer", full, LAYERS)
    try:
        options = json.loads(text) if colon else {}
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        expected = 'a name, a colon and options as a JSON object, such as bayesian:{"decays_per_head": 1}'
        raise ArgumentError("layer", got=repr(name), expected=expected)
    layer = {**OPTIONS[base], **options}
    mixer_class(layer["mixer"], {key: value for key, value in layer.items() if key != "mixer"})
    return layer, suffix


def _allows(name: str, suffix: str) -> bool:
    """Return whether this suffix changes the model of a layer of `OPTIONS`."""
    return name != ATTENTION if suffix == HYBRID else _includes_mlp(OPTIONS[name]["mixer"])


def layer_name(name: str) -> str:
    """Return the canonical text of a layer, independent of the order and spacing of its options."""
    full, _, text = name.partition(":")
    options = json.loads(text) if text else {}
    return f"{full}:{json.dumps(options, sort_keys=True)}" if options else full


def _stack(block: Block, fourth: Block, depth: int) -> tuple[Block, ...]:
    """Return a model's blocks, every fourth of which may be another."""
    return tuple(dict(fourth if n % EVERY == EVERY - 1 else block) for n in range(depth))


def _includes_mlp(mixer: str) -> bool:
    from kalmix.layers import MIXERS  # slow to import

    return MIXERS[mixer].includes_mlp


def _count(blocks: tuple[Block, ...], size: ModelSize) -> int:
    from kalmix.models import KalmixConfig, KalmixForCausalLM  # imports transformers

    config = KalmixConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        layers=list(blocks),
        tie_word_embeddings=True,
        embedding_norm=size.embedding_norm,
    )
    with torch.device("meta"):
        return sum(value.numel() for value in KalmixForCausalLM(config).parameters())


def count_parameters(name: str, size: ModelSize) -> int:
    """Return the number of parameters of a model, the embedding included. It is built on the device "meta"."""
    return _count(make_blocks(name, size), size)


def compress(blocks: tuple[Block, ...]) -> list[Block]:
    """Return blocks with the key `repeat` in place of equal neighbours, for JSON."""
    groups = ((len(list(group)), json.loads(key)) for key, group in groupby(blocks, json.dumps))
    return [{**block, "repeat": count} for count, block in groups]


def describe(blocks: Sequence[Mapping[str, Any]]) -> str:
    """Return compressed blocks as text, such as "12 blocks, MLP 1,568"."""
    widths = {block["mlp"] for block in blocks if "mlp" in block}
    text = f"{sum(block['repeat'] for block in blocks)} blocks"
    return f"{text}, MLP {widths.pop():,}" if widths else text
