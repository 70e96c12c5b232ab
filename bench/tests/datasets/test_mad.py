"""MAD's rows equal those of its public code; settings without valid rows are refused."""

from itertools import pairwise

import numpy as np
import pytest

from kalmix import ArgumentError
from kalmix_bench.datasets import TASKS, make
from kalmix_bench.datasets.mad.draws import ScalarGenerator

from .rows import digest, ids, wanted

SHIFTED = {"mad/in-context-recall", "mad/noisy-recall", "mad/fuzzy-recall"}

# name, settings, digest of 24 train and 12 test rows of seed 12345, as the code of athms/mad-lab (0f49a45) makes them
ORIGINAL = [
    ("mad/in-context-recall", {}, "2d5cd3e8f0d58bd4"),
    ("mad/in-context-recall", {"vocab_size": 128, "seq_len": 1024}, "cc20e4dd53a9bda3"),
    (
        "mad/in-context-recall",
        {"multi_query": False, "noise_vocab_size": 5, "frac_noise": 0.5, "vocab_size": 30},
        "c019bfeac7faf12e",
    ),
    ("mad/noisy-recall", {}, "0ed0aa8d401d65e7"),
    ("mad/noisy-recall", {"vocab_size": 144, "frac_noise": 0.8}, "a6bc957c0250f87f"),
    ("mad/fuzzy-recall", {}, "bbfba21e2c152004"),
    ("mad/fuzzy-recall", {"seq_len": 512}, "8b2633226207e2e5"),
    (
        "mad/fuzzy-recall",
        {"multi_query": False, "noise_vocab_size": 3, "frac_noise": 0.3, "k_motif_size": 2},
        "8e0e06f6c4914b59",
    ),
    ("mad/fuzzy-recall", {"vocab_size": 32}, "d07371a8b983f105"),
    ("mad/selective-copying", {}, "f51d590b8dc5b782"),
    ("mad/selective-copying", {"vocab_size": 128, "num_tokens_to_copy": 96}, "34e9ec13a24058cb"),
    ("mad/compression", {}, "f18d9460721ef4b1"),
    (
        "mad/compression",
        {"vocab_size": 128, "seq_len": 256, "noise_vocab_size": 4, "frac_noise": 0.3},
        "3d9c45921e04394f",
    ),
    ("mad/memorization", {}, "01a2b06e63734efd"),
    ("mad/memorization", {"vocab_size": 8192}, "acf69ed47b766b0a"),
    ("mad/memorization", {"vocab_size": 21, "noise_vocab_size": 4, "frac_noise": 0.3}, "7f9ab16a501bb469"),
]

# name, settings, train rows before it, inputs, targets of a test row
WORKED = [
    (
        "mad/in-context-recall",
        {"seq_len": 24},
        8,
        "2 9 2 9 0 11 4 14 4 14 0 11 5 8 1 15 1 15 4 14 5 8 1",
        ids(". . 9 . . . . . 14 . 11 . . . . . 15 . 14 . 8 . 15"),
    ),
    (
        "mad/noisy-recall",
        {"seq_len": 24},
        8,
        "3 13 3 13 1 13 7 15 7 15 6 14 5 8 5 8 0 14 30 27 24 22 3",
        wanted(23, "13@2 15@8 8@14 13@22"),
    ),
    (
        "mad/fuzzy-recall",
        {"seq_len": 40},
        8,
        "15 15 15 15 5 4 1 11 10 12 2 5 3 10 13 12 1 6 3 7 0 1 5 9 8 5 2 1 14 13 8 0 2 1 13 7 0 2 1 13",
        wanted(40, "13@38 7@39"),
    ),
    (
        "mad/selective-copying",
        {"seq_len": 24, "num_tokens_to_copy": 4},
        8,
        "14 14 14 14 14 6 14 14 14 14 14 9 14 14 14 2 14 14 4 15 14 14 14 14",
        wanted(24, "6@20 9@21 2@22 4@23"),
    ),
    (
        "mad/compression",
        {"seq_len": 16},
        0,
        "10 3 11 4 3 11 9 10 14 5 12 4 8 8 3 15",
        ids("10 3 11 4 3 11 9 10 14 5 12 4 8 8 3 15"),
    ),
    (
        "mad/memorization",
        {"vocab_size": 32, "seq_len": 16},
        0,
        "6 31 9 31 4 31 6 31 9 31 0 31 2 31 13 31",
        ids(". 23 . 16 . 18 . 23 . 16 . 19 . 28 . 25"),
    ),
]


@pytest.mark.parametrize(("name", "settings", "want"), ORIGINAL)
def test_rows_are_the_originals(name, settings, want):
    assert digest(make(name, seed=12345, train=24, test=12, **settings)) == want


@pytest.mark.parametrize(("name", "settings", "before", "inputs", "targets"), WORKED)
def test_worked_rows(name, settings, before, inputs, targets):
    data = make(name, seed=12345, train=before, test=1, **settings)
    assert data.test.inputs[0].tolist() == ids(inputs)
    assert data.test.targets[0].tolist() == targets


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("mad/")])
def test_training_and_test_rows_are_drawn_in_the_same_way(name):
    """Rows depend on the generator's state only, not on the split; in fuzzy recall, test keys are longer."""
    alone, after = make(name, seed=3, train=0, test=5), make(name, seed=3, train=4, test=1)
    assert len(alone.train) == 0 and alone.train.inputs.shape[1] == alone.test.inputs.shape[1]
    if name != "mad/fuzzy-recall":
        assert np.array_equal(alone.test.inputs[:4], after.train.inputs)
        assert np.array_equal(alone.test.inputs[4], after.test.inputs[0])
    if name in SHIFTED:
        assert np.array_equal(after.train.inputs[:, 1:], after.train.targets[:, :-1])
    scored = alone.test.targets != -100
    assert scored.any(1).all()
    if name in SHIFTED:
        nxt = np.roll(alone.test.inputs, -1, 1)
        assert np.array_equal(alone.test.targets[:, :-1][scored[:, :-1]], nxt[:, :-1][scored[:, :-1]])


def test_recall_targets_are_values_of_repeated_keys():
    data = make("mad/in-context-recall", seed=1, train=0, test=50)
    for inputs, targets in zip(data.test.inputs, data.test.targets, strict=True):
        bindings = {}
        for place, key in enumerate(inputs[::2]):
            assert targets[2 * place] == bindings.get(key, -100)
            if 2 * place + 1 < len(inputs):
                assert targets[2 * place + 1] == -100
                assert bindings.setdefault(key, inputs[2 * place + 1]) == inputs[2 * place + 1]


def test_copying_targets_are_the_tokens_shown():
    data = make("mad/selective-copying", seed=5, train=200, test=0, vocab_size=10, seq_len=40, num_tokens_to_copy=7)
    for inputs, targets in zip(data.train.inputs, data.train.targets, strict=True):
        shown = inputs[:32]
        assert shown[shown < 8].tolist() == targets[-7:].tolist()
        assert inputs[32] == 9 and (inputs[33:] == 8).all() and (targets[:33] == -100).all()
        assert shown[-1] != 8  # no blank before the request


def test_difficulties_are_settings():
    for name in TASKS:
        if name.startswith("mad/"):
            for change in TASKS[name].published.difficulties:
                TASKS[name].configure(**{key: value for key, value in change.items() if key != "train"})
    steps = TASKS["mad/noisy-recall"].published.difficulties
    assert {"vocab_size": 144} in steps and {"train": 800} in steps and {"frac_noise": 0.8} in steps
    assert [len(TASKS[name].published.difficulties) for name in TASKS if name.startswith("mad/")] == [
        10,
        13,
        10,
        12,
        10,
        5,
    ]


BAD = [
    ("mad/in-context-recall", {"seq_len": 7}, "seq_len.*even"),
    ("mad/in-context-recall", {"vocab_size": 4, "noise_vocab_size": 3}, "vocab_size.*at least 5"),
    ("mad/in-context-recall", {"frac_noise": 0.2}, "noise_vocab_size.*at least 1"),
    ("mad/in-context-recall", {"frac_noise": 1.0}, "frac_noise.*less than 1"),
    ("mad/fuzzy-recall", {"vocab_size": 6}, "vocab_size.*at least 7"),
    ("mad/fuzzy-recall", {"seq_len": 12}, "seq_len.*above 12"),
    ("mad/selective-copying", {"num_tokens_to_copy": 128}, "seq_len.*above 257"),
    ("mad/selective-copying", {"num_tokens_to_copy": 0}, "num_tokens_to_copy.*at least 1"),
    ("mad/compression", {"vocab_size": 1}, "vocab_size.*at least 2"),
    ("mad/memorization", {"vocab_size": 2}, "vocab_size.*at least 3"),
]


@pytest.mark.parametrize(("name", "settings", "complaint"), BAD)
def test_invalid_settings_are_refused(name, settings, complaint):
    with pytest.raises(ArgumentError, match=complaint):
        make(name, seed=0, train=0, test=0, **settings)


def test_smallest_settings_are_valid():
    make("mad/fuzzy-recall", seed=0, train=3, test=3, vocab_size=7, seq_len=13)
    make("mad/in-context-recall", seed=0, train=3, test=3, vocab_size=2, seq_len=4)
    make("mad/memorization", seed=0, train=3, test=3, vocab_size=3, seq_len=2)
    make("mad/compression", seed=0, train=3, test=3, vocab_size=2, seq_len=1)
    make("mad/selective-copying", seed=0, train=3, test=3, vocab_size=3, seq_len=4, num_tokens_to_copy=1)


def test_scalar_draws_equal_numpys():
    """Check mixed draws: half of a word waits while floats take whole words."""
    order = np.random.default_rng(1)
    generator, want = ScalarGenerator(7), np.random.default_rng(7)
    for bound in order.choice([0, 1, 2, 3, 64, 1000, 2**20 + 1, 3 * 2**30, 2**32 - 1], 4000).tolist():
        if bound:
            assert generator.integers(bound) == want.integers(bound)
        else:
            assert generator.random() == want.random()


def test_long_recall_has_the_published_sizes():
    data = make("recall/long", seed=0, train=1, test=20)
    assert data.vocab_size == 256 and data.test.inputs.shape == (20, 2047)
    assert 885 < (data.test.targets != -100).sum(1).mean() < 905


def test_compression_is_made_harder_by_doubling():
    sweeps = {}
    for change in TASKS["mad/compression"].published.difficulties:
        for name, value in change.items():
            sweeps.setdefault(name, []).append(value)
    assert {name: [max(x, y) / min(x, y) for x, y in pairwise(values)] for name, values in sweeps.items()} == {
        "vocab_size": [2, 2],
        "seq_len": [2, 2],
        "train": [2, 2, 2],
    }


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("mad/")])
def test_published_sizes_are_multiples_of_16(name):
    task = TASKS[name]
    difficulties = [value for change in task.published.difficulties for key, value in change.items() if key in SIZES]
    assert all(size % 16 == 0 for size in (*difficulties, *(getattr(task.baseline, key) for key in SIZES)))


SIZES = ("vocab_size", "seq_len")
