"""Presets of the benchmarks: small ones for a laptop, and those of the papers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kalmix.errors import ArgumentError, any_of, unknown_name
from kalmix_bench.datasets import get_task
from kalmix_bench.experiments.recall.layers import layer_name
from kalmix_bench.experiments.recall.model_shape import ModelShape
from kalmix_bench.experiments.recall.protocol import Part, RecallCell, RecallProtocol


@dataclass(frozen=True)
class RecallStudy:
    """Task with the models and protocols that a benchmark runs on it.

    Attributes:
        task: a name of `kalmix_bench.datasets.make`.
        parts: its rows.
        shapes: model shapes; each is run by itself.
        protocol: training protocol.
        layers: default layers, as names or names with options.
        learning_rates, weight_decays: values of which all pairs are run, and the best pair counts; the protocol's value
            if empty.
    """

    task: str
    parts: tuple[Part, ...]
    shapes: tuple[ModelShape, ...]
    protocol: RecallProtocol
    layers: tuple[str, ...]
    learning_rates: tuple[float, ...] = ()
    weight_decays: tuple[float, ...] = ()

    def make_cells(self, layers: Sequence[str], seeds: int) -> Iterator[RecallCell]:
        """Yield cells of these layers, or of its own if there are none, seed by seed so that all have early results."""
        for seed in range(seeds):
            for shape in self.shapes:
                for name in layers or self.layers:
                    for protocol in self.protocols():
                        yield RecallCell(self.task, self.parts, name, shape, protocol, seed)

    def with_depths(self, depths: Sequence[int]) -> RecallStudy:
        """Return the study with each of its shapes at each depth; the study itself if there are none."""
        shapes = (replace(shape, depth=depth) for depth in depths for shape in self.shapes)
        return replace(self, shapes=tuple(dict.fromkeys(shapes))) if depths else self

    def protocols(self) -> list[RecallProtocol]:
        """Return the protocol with each learning rate and weight decay."""
        rates, decays = (
            self.learning_rates or (self.protocol.learning_rate,),
            self.weight_decays or (self.protocol.weight_decay,),
        )
        return [replace(self.protocol, learning_rate=rate, weight_decay=decay) for rate in rates for decay in decays]


RecallPreset = tuple[RecallStudy, ...]

# Appendix G of Kalman Linear Attention: KLA with a state of 2,048 elements, hidden size 128. Inferences: in every
# task, the encoder (an MLP of 120) precedes the block and the decoder (240, 120) follows it; the best epoch counts.
# Section F.1.2 names the decoder for compression only: `encoder` has none in the other tasks.
_G = RecallProtocol(
    epochs=750, batch_size=172, learning_rate=1e-3, patience=70, max_grad_norm=5.0, data_seed=12345, cuda_graph=True
)
_SINGLE = ModelShape(128, state_size=2048, encoder=120, decoder=(240, 120))
_RIVALS = ("kla", "kla-noise-free", "gated-deltanet", "gla", "mamba-1", "mlstm")
MAD = ("in-context-recall", "noisy-recall", "fuzzy-recall", "selective-copying", "compression", "memorization")


def _mad(name: str) -> RecallStudy:
    return RecallStudy(f"mad/{name}", (Part(256 if name == "memorization" else 12_800, 1280),), (_SINGLE,), _G, _RIVALS)


def _encoder_only(name: str) -> RecallStudy:
    return replace(_mad(name), shapes=(replace(_SINGLE, decoder=()),), layers=("kla", "kla-noise-free"))


def long_deltanet(width: int) -> str:
    """Return Gated DeltaNet with the heads of Table 12, whose state is 9/8 of that of the other layers."""
    return layer_name(f'gated-deltanet:{{"heads": {width // 32}, "head_dim": 24, "expand_v": 2.0}}')


def _long(width: int, batch: int, epochs: int, *others: str) -> RecallStudy:
    """Return long-context recall (Tables 9 and 12). No MLPs: section G.2 does not say whether it has them."""
    shape, protocol = ModelShape(width, depth=2, state_size=32 * width), replace(_G, batch_size=batch, epochs=epochs)
    return RecallStudy(
        "recall/long", (Part(12_800, 1280),), (shape,), protocol, ("kla", long_deltanet(width), "gla", *others)
    )


# MAD's code (athms/mad-lab): each task at its baseline and at every step of difficulty, two blocks of mixer and SwiGLU.
# It requires equal state sizes without specifying one; this is KLA's default. The epoch of the lowest test loss counts.
_LAB = RecallProtocol(
    epochs=200,
    batch_size=128,
    learning_rate=1e-3,
    stop_score=0.999,
    schedule="cosine",
    min_learning_rate=1e-6,
    bf16=True,
    select_epoch="loss",
    data_seed=12345,
    cuda_graph=True,
)
_BLOCKS_OF_TWO = ModelShape(128, depth=2, state_size=4096, mlp=352)


def _lab(name: str) -> Iterator[RecallStudy]:
    task = get_task(f"mad/{name}")
    shape = replace(_BLOCKS_OF_TWO, decoder=(128, 128) if task.from_last else ())
    for change in ({}, *task.published.difficulties):
        part = Part.of(**{"train": task.published.train, "test": task.published.test, **change})
        layers = ("attention", *_RIVALS)
        yield RecallStudy(
            task.name, (part,), (shape,), _LAB, layers, learning_rates=(1e-4, 5e-4, 1e-3), weight_decays=(0.0, 0.1)
        )


# Figure 2 of Zoology (ICLR 2024): a grid of learning rates; training stops at 99%.
_ZOOLOGY = RecallProtocol(
    epochs=64,
    batch_size=512,
    learning_rate=1e-3,
    weight_decay=0.1,
    schedule="cosine",
    stop_score=0.99,
    shuffle=False,
    data_seed=123,
    cuda_graph=True,
)
_TIED = ModelShape(64, depth=2, norm="layer", head="tied", add_norm=True, dropout=0.1, zoology_init=True)
_GRID = (1e-4, 10**-3.3333333333333335, 10**-2.6666666666666665, 1e-2)
_ATTENTIVE = ("attention", "kla", "gated-kalmanet", "bayesian", "gated-deltanet", "mamba2", "linear-attention")


_FIGURE_2A = replace(  # our reduction: two small widths, one rate of the grid, a quarter of the epochs
    _ZOOLOGY, epochs=16, batch_size=256, learning_rate=_GRID[2], stop_score=0.999
)
_SOLVERS = ("kalmanet-bare", "gated-deltanet", "mamba2", "deltanet", "mesanet")


def _figure_2(length: int, pairs: int, batch: int, widths: tuple[int, ...], layers: tuple[str, ...]) -> RecallStudy:
    part = Part.of(100_000, 3000, input_seq_len=length, num_kv_pairs=pairs)
    shapes = tuple(replace(_TIED, hidden_size=width) for width in widths)
    return RecallStudy("mqar", (part,), shapes, replace(_ZOOLOGY, batch_size=batch), layers, _GRID)


# Appendix F of Memory by Design. It does not state learning rate and epochs; these are ours. With 20,000 to 50,000
# rows a setting, most models memorized them (docs/results/recall.md).
_BAYES = RecallProtocol(
    epochs=16,
    batch_size=256,
    learning_rate=1e-3,
    weight_decay=0.1,
    schedule="warmup",
    warmup=1024,
    data_seed=0,
    cuda_graph=True,
)
_MATCHED = ModelShape(128, depth=2, state_size=8192, value_expansion=2.0)
# "bayesian" has a decay per key, as in the paper (`layers.LAYERS`).
_BAYESIAN = ("bayesian", "bayesian-no-conv", "gated-deltanet", "gated-deltanet-no-conv", "mamba2", "mamba2-no-conv")


def _by_design(task: str, parts: tuple[Part, ...], epochs: int = _BAYES.epochs) -> RecallStudy:
    protocol = replace(_BAYES, epochs=epochs)
    return RecallStudy(f"mqar/{task}", parts, (_MATCHED,), protocol, _BAYESIAN, learning_rates=(1e-3, 3e-3))


def _shared(test: int = 3000) -> tuple[Part, ...]:
    """Return three of Zoology's sizes, since the paper names none."""
    return tuple(Part.of(100_000, test, input_seq_len=16 * pairs, num_kv_pairs=pairs) for pairs in (4, 8, 16))


def _updates(test: int = 3000) -> tuple[Part, ...]:
    """Return the settings of the paper's grid that fit: 2 (D + U) tokens of pairs and 2 per query, at most N."""
    sizes = [(n, d, d // part) for n in (64, 128) for d in (4, 16) for part in (1, 2, 4, 8) if d // part]
    return tuple(
        Part.of(100_000, test, input_seq_len=n, num_kv_pairs=d, num_updates=u)
        for n, d, u in sizes
        if 2 * (d + u) + 2 * d <= n
    )


def _blocks(test: int = 3000) -> tuple[Part, ...]:
    return tuple(Part.of(100_000, test, input_seq_len=128, num_kv_pairs=d, block_size=2) for d in (2, 4, 6, 8))


# Appendix G.5 of Kalman Linear Attention, with clipping and weight decay of Table 10, on the training rows of the word
# problem's code: all words of two elements (3,600) and four fifths of those of length k.
_WORDS = RecallProtocol(
    epochs=500,
    batch_size=512,
    learning_rate=3e-4,
    patience=50,
    max_grad_norm=5.0,
    stop_score=0.99,
    data_seed=0,
    cuda_graph=True,
)


def _words(task: str, k: int, depth: int) -> RecallStudy:
    parts = (Part.of(800_000, 10_000, k=k), Part.of(3600, 0, k=2))
    shape = ModelShape(1024, depth=depth, state_size=32 * 1024)
    return RecallStudy(task, parts, (shape,), _WORDS, ("kla", "kla-noise-free", "mamba2", "gated-deltanet"))


# A quarter of the width and of the rows, and fewer epochs. Test rows of several lengths, also longer than those of
# training, show at which length a layer loses the state.
_SHORT_WORDS = RecallStudy(
    "words/a5",
    (
        Part.of(200_000, 1000, k=20),
        Part.of(3600, 0, k=2),
        *(Part.of(0, 1000, k=k) for k in (4, 6, 10, 15, 25, 30, 40)),
    ),
    (ModelShape(256, state_size=32 * 256),),
    replace(_WORDS, epochs=20, learning_rate=1e-3),
    ("kla", "mamba2", 'gated-deltanet:{"negative_eigenvalues": true}', "attention"),
)

# No paper trains on RULER alone (Memory by Design distils a model of 340 million parameters and evaluates that). This
# protocol is ours: models are trained on bytes at one length and tested at others.
_NEEDLES = RecallProtocol(
    epochs=20,
    batch_size=32,
    learning_rate=1e-3,
    weight_decay=0.1,
    max_grad_norm=1.0,
    schedule="warmup",
    warmup=200,
    bf16=True,
    data_seed=0,
)


def _bytes(length: int, train: int, test: int) -> Part:
    return Part.of(train, test, max_seq_length=length, tokens_to_generate=16, words="builtin")


# Laptop: the smallest sizes that still show the papers' orderings.
_SMALL = RecallProtocol(epochs=40, batch_size=32, learning_rate=3e-3, max_grad_norm=5.0, data_seed=12345)
_NARROW = ModelShape(64, state_size=1024)
_SLOTS = ModelShape(64, state_size=256, decoder=(128, 128))  # two slots per channel, so that a filter has few decays

BENCHES: dict[str, dict[str, RecallPreset]] = {
    "mad": {
        "laptop": (
            RecallStudy(
                "mad/selective-copying",
                (Part.of(1600, 256, seq_len=32, num_tokens_to_copy=4),),
                (_NARROW,),
                _SMALL,
                ("kla", "kla-noise-free"),
            ),
            RecallStudy(
                "mad/compression",
                (Part.of(12_800, 256, seq_len=16),),
                (_SLOTS,),
                replace(_SMALL, batch_size=64, learning_rate=6e-3),
                ("kla", "kla-noise-free"),
            ),
        ),
        "paper": (
            *map(_mad, MAD),
            *(
                _long(width, batch, _G.epochs, 'mamba-1:{"expand": 2, "state_dim": 16}')
                for width, batch in ((64, 64), (128, 32), (256, 16))
            ),
        ),
        "short": tuple(  # the same models on the same rows, for fewer epochs
            _long(width, batch, 20) for width, batch in ((64, 64), (128, 32))
        ),
        "encoder": tuple(_encoder_only(name) for name in MAD if name != "compression"),
        "mad-lab": tuple(study for name in MAD for study in _lab(name)),
    },
    "mqar": {
        "laptop": (
            RecallStudy(
                "mqar",
                (Part.of(8000, 256, vocab_size=96, input_seq_len=80, num_kv_pairs=20),),
                (ModelShape(16, depth=2, state_size=512, heads=1),),
                replace(_SMALL, epochs=10, batch_size=64, learning_rate=1e-2),
                ("kalmanet-bare", "linear-attention"),
            ),
            RecallStudy(  # only some keys are updated: if all are, the layers do not differ
                "mqar/update",
                (Part.of(24_000, 256, vocab_size=256, input_seq_len=128, num_kv_pairs=16, num_updates=4),),
                (replace(_TIED, state_size=2048, value_expansion=2.0, dropout=0.0),),
                replace(_SMALL, epochs=4, weight_decay=0.1, schedule="warmup", warmup=100),
                ("bayesian", "gated-deltanet"),
            ),
        ),
        "paper": (
            _figure_2(64, 4, 512, (64, 128, 256, 512), _ATTENTIVE),
            _figure_2(128, 8, 512, (64, 128, 256, 512), _ATTENTIVE),
            _figure_2(256, 16, 256, (64, 128, 256, 512), _ATTENTIVE),
            _figure_2(512, 64, 128, (64, 128, 256, 512), _ATTENTIVE),
            _figure_2(512, 64, 128, (16, 32), ("kalmanet-bare", "linear-attention", "gated-deltanet", "mamba2")),
            _by_design("shared", _shared()),
            _by_design("update", _updates()),
            _by_design("rewrite", _updates()),
            _by_design("block", _blocks()),
        ),
        "short": (  # the same models and training rows, for about 12,000 steps, or twice as many where keys repeat
            _by_design("shared", _shared(1000), epochs=10),
            _by_design("update", _updates(1000), epochs=6),
            _by_design("rewrite", _updates(1000), epochs=6),
            _by_design("block", _blocks(1000), epochs=8),
            RecallStudy(  # Figure 2a of Gated KalmaNet: fewer dimensions than pairs, or as many
                "mqar",
                (Part.of(100_000, 3000, input_seq_len=256, num_kv_pairs=64),),
                tuple(replace(_TIED, hidden_size=width) for width in (32, 64)),
                _FIGURE_2A,
                _SOLVERS,
            ),
        ),
    },
    "needle": {
        "laptop": (
            RecallStudy(
                "needle/single-1",
                (_bytes(512, 640, 64), _bytes(768, 0, 64)),
                (ModelShape(64, depth=2, state_size=2048),),
                replace(_SMALL, epochs=4),
                ("gated-deltanet", "attention"),
            ),
        ),
        "paper": tuple(
            RecallStudy(
                f"needle/{name}",
                (_bytes(2048, 20_000, 500), *(_bytes(length, 0, 200) for length in (1024, 4096, 8192, 16_384))),
                (ModelShape(512, depth=6, state_size=32_768, heads=8, mlp=1536),),
                _NEEDLES,
                ("bayesian", "gated-deltanet", "gated-kalmanet", "kla", "mamba2", "attention"),
            )
            for name in ("single-1", "single-2", "single-3", "multikey-1", "multivalue", "multiquery")
        ),
    },
    "a5": {
        "laptop": (
            RecallStudy(
                "words/a5",
                (Part.of(40_000, 512, k=3), Part.of(3600, 0, k=2)),
                (ModelShape(64, state_size=2048),),
                replace(_SMALL, epochs=8, batch_size=128),
                ("kla", "mamba2"),
            ),
        ),
        "paper": tuple(_words("words/a5", k, depth) for depth in (1, 2) for k in (6, 10, 15, 20)),
        "short": (_SHORT_WORDS,),
    },
}


def make_cells(
    studies: RecallPreset,
    tasks: Sequence[str],
    layers: Sequence[str],
    seeds: int,
    widths: Sequence[int] = (),
    depths: Sequence[int] = (),
) -> list[RecallCell]:
    """Return the cells of the studies whose tasks are selected.

    Args:
        studies: studies of a preset.
        tasks: task names, with or without the prefix before the slash; all if empty.
        layers: layers as `layers.parse_layer` takes them; each study's own if empty.
        seeds: number of seeds.
        widths: hidden sizes to keep; all if empty.
        depths: numbers of blocks that replace the studies' own; none if empty.

    Raises:
        ArgumentError: no study has the task or the hidden size, or there is no such layer.
    """
    known = {study.task: None for study in studies}
    short = {name.rpartition("/")[2]: name for name in known} | {name: name for name in known}
    for name in tasks:
        if name not in short:
            raise unknown_name("task", name, short)
    task_names = {short[name] for name in tasks} or set(known)
    selection = [study.with_depths(depths) for study in studies if study.task in task_names]
    cells = list(dict.fromkeys(cell for study in selection for cell in study.make_cells(layers, seeds)))
    sizes = {cell.shape.hidden_size for cell in cells}
    for width in widths:
        if width not in sizes:
            raise ArgumentError("hidden-size", got=width, expected=any_of(sorted(sizes)))
    return [cell for cell in cells if cell.shape.hidden_size in (widths or sizes)]
