"""Sizes and variations of the models of the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

from kalmix.errors import ArgumentError
from kalmix_bench.experiments.recall.layers import Options, parse_layer, sized


@dataclass(frozen=True)
class ModelShape:
    """Sizes and variations of a model, without its layer.

    Attributes:
        hidden_size: D, width of the residual stream.
        depth: number of blocks, all with the same layer.
        state_size: state elements per layer, to which layers are matched; `None` keeps each layer's default sizes.
        heads: number of heads for that matching.
        value_expansion: columns of values per hidden unit for that matching.
        mlp: hidden size of the SwiGLU MLP after each layer; 0 for none.
        norm: "rms" or "layer", before layers, MLPs and head.
        head: "untied", a linear map with bias; or "tied" to the embedding, without bias.
        add_norm: whether a block ends with x + norm(x), as Zoology's blocks without an MLP do (an `Identity` takes the
            MLP's place).
        dropout: dropout of embeddings.
        zoology_init: whether linear maps are initialized as N(0, 0.02), output projections as N(0, 0.02 / sqrt(2
            depth)).
            Otherwise layers use their own initialization, and the head PyTorch's.
        encoder: hidden size of an MLP between embedding and blocks; 0 for none.
        decoder: hidden sizes of an MLP after the blocks; empty for a linear head. In tasks with `from_last` it predicts
            all targets from the last token.
    """

    hidden_size: int
    depth: int = 1
    state_size: int | None = None
    heads: int = 4
    value_expansion: float = 1.0
    mlp: int = 0
    norm: str = "rms"
    head: str = "untied"
    add_norm: bool = False
    dropout: float = 0.0
    zoology_init: bool = False
    encoder: int = 0
    decoder: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("hidden_size", "depth", "heads"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, got=getattr(self, name), expected="at least 1")

    def layer_options(self, name: str) -> Options:
        """Return the options of a layer, with the matched state size.

        Args:
            name: layer as `layers.parse_layer` takes it.
        """
        options = parse_layer(name)
        if self.state_size is None:
            return options
        return sized(options, self.hidden_size, self.state_size, self.heads, self.value_expansion)
