"""Models to time, their sizes, and the rows of the table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from kalmix.errors import unknown_name
from kalmix.layers import MIXERS
from kalmix.validation import check_choice, check_positive_int

# The first eight are those of the aims in report.py.
FIRST = ("kla", "bayesian", "gated-kalmanet", "afa", "gated-deltanet", "kda", "mamba2", "attention")
PEERS = ("fla gated-deltanet", "fla kda", "llama")
# The layers of kalmix, without those that other modules register, and without "design", which is several layers.
OURS = (*FIRST, *(x for x, y in MIXERS.items() if y.__module__.startswith("kalmix.") and x not in (*FIRST, "design")))
MODELS = (*FIRST, *PEERS, *(name for name in OURS if name not in FIRST))
MODES = {
    "eager": "not compiled",
    "compiled": "by `torch.compile`",
    "blocks": "each block compiled; blocks of one kind share code",
    "captured": "compiled, and launched as CUDA graphs",
}


@dataclass(frozen=True)
class ModelSize:
    """Size of the models and of a training batch.

    Attributes:
        layers: blocks. Models whose parameters would differ by more than `SPREAD` from those of the attention model
            with as many blocks get more or fewer.
        hidden_size: width of the residual stream.
        batch_size: sequences of a batch.
        seq_len: tokens of a sequence.
        vocab_size: words.
        dtype: dtype of autocast; "float32" for none. Weights are float32.

    Raises:
        ArgumentError: a size is not a positive integer.
    """

    layers: int = 24
    hidden_size: int = 1024
    batch_size: int = 8
    seq_len: int = 2048
    vocab_size: int = 32000
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in SIZES:
            check_positive_int(name, getattr(self, name))
        check_choice("dtype", self.dtype, DTYPES)

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of width {self.hidden_size:,}, {self.batch_size} x {self.seq_len:,} tokens, "
            f"{self.vocab_size:,} words, {self.dtype}"
        )


SIZES = ("layers", "hidden_size", "batch_size", "seq_len", "vocab_size")
DTYPES = ("bfloat16", "float16", "float32")
SPREAD = (0.92, 1.14)  # parameters relative to the attention model: 340 to 420 million with the preset `paper`
PRESETS = {
    "paper": ModelSize(),
    "laptop": ModelSize(layers=2, hidden_size=128, batch_size=2, seq_len=128, vocab_size=512, dtype="float32"),
}


@dataclass(frozen=True)
class ModelCell:
    """One row of the table: a model that trains eagerly or compiled, at one size, of one commit, on one device.

    Raises:
        ArgumentError: the model or the mode is unknown.
    """

    modes: ClassVar[tuple[str, ...]] = tuple(MODES)
    model: str
    mode: str
    size: ModelSize
    steps: int
    hardware: str
    commit: str | None

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise unknown_name("rows", self.model, MODELS)
        check_choice("modes", self.mode, self.modes)

    def __str__(self) -> str:
        return f"{self.model}, {self.mode}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything that defines the row."""
        return asdict(self)
