"""MAD's in-context recall and noisy recall: keys, each followed by the value it has in this row.

Tokens: keys, values, noise, in this order of ids. Noise comes as pairs among the pairs. Traps:

- Training asks for every next token, keys and noise among them, which nobody can know; tests ask for values of keys
  that came before, alone.
- `multi_query=False` keeps the last id for a token that is put before the last pair, the only one that tests ask for;
  rows are then a token longer.
- Whether noise comes or not, `noise_vocab_size` ids are taken from the vocabulary: 32 of the noisy task are 16 and 16.
"""

from __future__ import annotations

from kalmix.errors import ArgumentError
from kalmix.validation import require
from kalmix_bench.datasets.mad.draws import Draws
from kalmix_bench.datasets.mad.settings import Instances, Settings, task
from kalmix_bench.datasets.metrics import IGNORED


def instances(settings: Settings, seed: int) -> Instances:
    """Rows of T / 2 pairs, the last of them one whose key came before."""
    s = settings
    s.need_noise_vocabulary()
    require(s.seq_len >= 4 and s.seq_len % 2 == 0, "seq_len", s.seq_len, "even, and at least 4")
    free = s.vocab_size - s.noise_vocab_size - (not s.multi_query)
    require(free >= 2, "vocab_size", s.vocab_size, f"at least {s.vocab_size - free + 2}, for a key and a value")
    keys = free // 2
    draws = Draws(seed)
    below = draws.below

    def draw(training: bool) -> tuple[list[int], list[int]]:
        pairs, held = s.seq_len // 2, {}
        certain = below(pairs)  # a pair that is not noise
        inputs, asked = [], []
        for pair in range(pairs - 1):
            if s.frac_noise > 0 and pair != certain and draws.fraction() < s.frac_noise:
                inputs += free + below(s.noise_vocab_size), free + below(s.noise_vocab_size)
                asked += IGNORED, IGNORED
                continue
            key = below(keys)
            again = key in held
            if not again:
                held[key] = keys + below(free - keys)
            inputs += key, held[key]
            asked += IGNORED, held[key] if again and s.multi_query else IGNORED
        if not held:
            raise ArgumentError("frac_noise", got=f"{s.frac_noise}, which made a row of noise only", expected="less")
        key = list(held)[below(len(held))]
        if not s.multi_query:
            inputs.append(s.vocab_size - 1)
            asked.append(IGNORED)
        inputs += key, held[key]
        asked += IGNORED, held[key]
        return inputs[:-1], (inputs if training else asked)[1:]

    return Instances(s.seq_len - s.multi_query, draw)


_LENGTHS = (256, 512, 1024)
_ROWS = (6400, 3200, 1600, 800)

IN_CONTEXT = task(
    "in-context-recall",
    "in-context-recall",
    instances,
    Settings(vocab_size=16, seq_len=128),
    sweeps={"vocab_size": (32, 64, 128), "seq_len": _LENGTHS, "train": _ROWS},
)
NOISY = task(
    "noisy-recall",
    "noisy-in-context-recall",
    instances,
    Settings(vocab_size=32, seq_len=128, frac_noise=0.2, noise_vocab_size=16),
    sweeps={"vocab_size": (48, 80, 144), "seq_len": _LENGTHS, "train": _ROWS, "frac_noise": (0.4, 0.6, 0.8)},
)
