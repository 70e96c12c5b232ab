"""MAD's in-context recall and noisy recall: key-value pairs, some of whose keys repeat within the row.

Ids: keys, values, noise, in this order. Noise comes in pairs between the other pairs.

Differences to know:

- In training rows every next token is a target, keys and noise included, although they cannot be predicted. In test
  rows only values of repeated keys are targets.
- `multi_query=False` reserves the last id for a token before the last pair, which is then the only target of test
  rows. Rows are one token longer.
- `noise_vocab_size` ids are reserved even without noise: the 32 ids of the noisy task are 16 and 16.
"""

from __future__ import annotations

from kalmix.errors import ArgumentError
from kalmix.validation import require
from kalmix_bench.datasets.mad.draws import ScalarGenerator
from kalmix_bench.datasets.mad.settings import MadSettings, RowGenerator, make_task
from kalmix_bench.datasets.metrics import IGNORE_INDEX


def row_generator(settings: MadSettings, seed: int) -> RowGenerator:
    """Return a generator of rows of T / 2 pairs; the key of the last pair occurs earlier in the row."""
    s = settings
    s.check_noise_vocabulary()
    require(s.seq_len >= 4 and s.seq_len % 2 == 0, "seq_len", s.seq_len, "an even number, at least 4")
    free = s.vocab_size - s.noise_vocab_size - (not s.multi_query)
    require(free >= 2, "vocab_size", s.vocab_size, f"at least {s.vocab_size - free + 2} (for a key and a value)")
    keys = free // 2
    generator = ScalarGenerator(seed)
    integers = generator.integers

    def draw(training: bool) -> tuple[list[int], list[int]]:
        pairs, bindings = s.seq_len // 2, {}
        certain = integers(pairs)  # a pair that is not noise
        inputs, targets = [], []
        for pair in range(pairs - 1):
            if s.frac_noise > 0 and pair != certain and generator.random() < s.frac_noise:
                inputs += free + integers(s.noise_vocab_size), free + integers(s.noise_vocab_size)
                targets += IGNORE_INDEX, IGNORE_INDEX
                continue
            key = integers(keys)
            is_repeat = key in bindings
            if not is_repeat:
                bindings[key] = keys + integers(free - keys)
            inputs += key, bindings[key]
            targets += IGNORE_INDEX, bindings[key] if is_repeat and s.multi_query else IGNORE_INDEX
        if not bindings:
            raise ArgumentError(
                "frac_noise", got=f"{s.frac_noise}, which makes a row of noise only", expected="a smaller one"
            )
        key = list(bindings)[integers(len(bindings))]
        if not s.multi_query:
            inputs.append(s.vocab_size - 1)
            targets.append(IGNORE_INDEX)
        inputs += key, bindings[key]
        targets += IGNORE_INDEX, bindings[key]
        return inputs[:-1], (inputs if training else targets)[1:]

    return RowGenerator(s.seq_len - s.multi_query, draw)


_LENGTHS = (256, 512, 1024)
_ROWS = (6400, 3200, 1600, 800)

IN_CONTEXT = make_task(
    "in-context-recall",
    "in-context-recall",
    row_generator,
    MadSettings(vocab_size=16, seq_len=128),
    sweeps={"vocab_size": (32, 64, 128), "seq_len": _LENGTHS, "train": _ROWS},
)
NOISY = make_task(
    "noisy-recall",
    "noisy-in-context-recall",
    row_generator,
    MadSettings(vocab_size=32, seq_len=128, frac_noise=0.2, noise_vocab_size=16),
    sweeps={"vocab_size": (48, 80, 144), "seq_len": _LENGTHS, "train": _ROWS, "frac_noise": (0.4, 0.6, 0.8)},
)
