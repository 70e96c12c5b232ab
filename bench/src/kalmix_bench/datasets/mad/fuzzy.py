"""MAD's fuzzy recall: keys and values are words of one to three tokens without separators.

Ids: letters of keys, letters of values, a padding id (with `multi_query=False` also a token before the last pair). No
letter occurs twice in a word.

Differences to know:

- Test rows only have keys of the largest size; training rows have keys of all sizes.
- The pair that is queried last is inserted at a random position. If it is short, the row may end before that position,
  and then its value cannot be known: in one test row of forty at the baseline settings.
- Rows end with that pair and are padded at the left. About four tokens per test row are scored.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np

from kalmix.validation import require
from kalmix_bench.datasets.mad.settings import MadSettings, RowGenerator, make_task
from kalmix_bench.datasets.metrics import IGNORE_INDEX

Word = tuple[int, ...]


def row_generator(settings: MadSettings, seed: int) -> RowGenerator:
    """Return a generator of rows of T tokens.

    For each row the original code shuffles all words. This function shuffles only their order, which draws the same
    numbers: 20 microseconds per row at a vocabulary of 16, some milliseconds at 128 (3.5 s in the original).
    """
    s = settings
    s.check_noise_vocabulary()
    pad = s.vocab_size - 1 - (not s.multi_query)
    free = pad - s.noise_vocab_size
    require(
        free // 2 >= s.k_motif_size and free - free // 2 >= s.v_motif_size,
        "vocab_size",
        s.vocab_size,
        f"at least {s.vocab_size - free + max(2 * s.k_motif_size, 2 * s.v_motif_size - 1)}, for the longest words",
    )
    longest = s.k_motif_size + s.v_motif_size
    require(s.seq_len > 2 * longest, "seq_len", s.seq_len, f"above {2 * longest} (for two pairs of the longest words)")
    keys = {size: _words(range(free // 2), size) for size in range(1, s.k_motif_size + 1)}
    values = {size: _words(range(free // 2, free), size) for size in range(1, s.v_motif_size + 1)}
    rng = np.random.default_rng(seed)
    integers = rng.integers

    def draw(training: bool) -> tuple[list[int], list[int]]:
        key_sizes = range(1 if training else s.k_motif_size, s.k_motif_size + 1)
        spelled = {size: _shuffled(keys[size], rng) for size in key_sizes}
        valued = {size: _shuffled(values[size], rng) for size in values}

        def key_size() -> int:
            return 1 + int(integers(s.k_motif_size)) if training else s.k_motif_size

        def value_size() -> int:
            return 1 + int(integers(s.v_motif_size))

        sizes = key_size(), value_size()
        key, value = _pick(spelled[sizes[0]], rng), _pick(valued[sizes[1]], rng)
        last = s.seq_len - sum(sizes)
        position = integers(last - sum(sizes))
        bindings: dict[Word, Word] = {}
        inputs: list[int] = []
        targets: list[int] = []
        while len(inputs) < last - longest:
            sizes = key_size(), value_size()
            if len(inputs) >= position and key not in bindings:
                bindings[key] = value
                inputs += key + value
                targets += [IGNORE_INDEX] * len(key + value)
            elif s.frac_noise > 0 and rng.random() < s.frac_noise:
                inputs += integers(free, pad, size=sum(sizes)).tolist()
                targets += [IGNORE_INDEX] * sum(sizes)
            else:
                word = _pick(spelled[sizes[0]], rng)
                is_repeat = word in bindings
                if not is_repeat:
                    bindings[word] = value if word == key else _pick(valued[sizes[1]], rng)
                inputs += word + bindings[word]
                targets += [IGNORE_INDEX] * len(word)
                targets += bindings[word] if is_repeat and s.multi_query else [IGNORE_INDEX] * len(bindings[word])
        if not s.multi_query:
            inputs.append(s.vocab_size - 1)
            targets.append(IGNORE_INDEX)
        inputs += key + value
        targets += [IGNORE_INDEX] * len(key) + list(value)
        missing = s.seq_len + 1 - len(inputs)
        inputs, targets = [pad] * missing + inputs, [IGNORE_INDEX] * missing + targets
        return inputs[:-1], (inputs if training else targets)[1:]

    return RowGenerator(s.seq_len, draw)


def _words(letters: range, size: int) -> np.ndarray:
    return np.array(list(permutations(letters, size)))


def _shuffled(words: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    order = np.arange(len(words))
    rng.shuffle(order)
    return words, order


def _pick(shuffled: tuple[np.ndarray, np.ndarray], rng: np.random.Generator) -> Word:
    words, order = shuffled
    return tuple(words[order[rng.integers(len(order))]].tolist())


FUZZY = make_task(
    "fuzzy-recall",
    "fuzzy-in-context-recall",
    row_generator,
    MadSettings(vocab_size=16, seq_len=128, k_motif_size=3, v_motif_size=3),
    sweeps={"vocab_size": (32, 64, 128), "seq_len": (256, 512, 1024), "train": (6400, 3200, 1600, 800)},
)
