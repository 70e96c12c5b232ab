"""Zoology's rows equal those of its public code; rows with one vocabulary follow the specification."""

import numpy as np
import pytest
import torch

from kalmix import ArgumentError
from kalmix_bench.datasets import TASKS, make
from kalmix_bench.datasets.mqar import shared, zoology
from kalmix_bench.datasets.mqar.settings import MqarSettings, UpdateSettings

from .rows import digest, ids, wanted

# name, settings, digest of 24 rows of seed 123, as the code of HazyResearch/zoology (d88d6f5) makes them
ORIGINAL = [
    ("mqar", {}, "0aa6c1ac6c9ccecc"),
    ("mqar", {"input_seq_len": 512, "num_kv_pairs": 64, "random_non_queries": True}, "19ec3bd2f6faeeb1"),
    ("mqar", {"vocab_size": 131, "input_seq_len": 60, "num_kv_pairs": 15, "power_a": 1.0}, "00c88134e1db4815"),
    ("mqar/forgetting", {}, "876e6139d7f2b6eb"),
    (
        "mqar/forgetting",
        {"input_seq_len": 128, "num_kv_pairs": 16, "num_updates": 8, "random_non_queries": True},
        "bc3bdc698e892e66",
    ),
]


@pytest.mark.parametrize(("name", "settings", "want"), ORIGINAL)
def test_rows_are_the_originals(name, settings, want):
    assert digest(make(name, seed=123, train=24, test=0, **settings)) == want


@pytest.mark.parametrize(
    ("name", "seed", "rows", "settings", "inputs", "targets"),
    [
        (
            "mqar",
            0,
            3,
            {"vocab_size": 12, "num_kv_pairs": 2, "input_seq_len": 10},
            "3 9 1 11 1 0 0 0 3 0",
            ". . . . 11 . . . 9 .",
        ),
        (
            "mqar",
            123,
            6,
            {"vocab_size": 40, "num_kv_pairs": 4, "input_seq_len": 24},
            "19 24 6 22 5 27 17 31 6 0 19 0 17 0 5 0 0 0 0 0 0 0 0 0",
            ". . . . . . . . 22 . 24 . 31 . 27 . . . . . . . . .",
        ),
        (
            "mqar/forgetting",
            42,
            4,
            {"vocab_size": 40, "num_kv_pairs": 4, "num_updates": 2, "input_seq_len": 28},
            "1 22 6 20 12 25 2 36 12 27 6 37 1 0 6 0 0 0 2 0 0 0 0 0 12 0 0 0",
            ". . . . . . . . . . . . 22 . 37 . . . 36 . . . . . 27 . . .",
        ),
    ],
)
def test_worked_rows(name, seed, rows, settings, inputs, targets):
    """The first of a segment of `rows`: how many there are changes the first."""
    data = make(name, seed=seed, train=rows, test=0, **settings)
    assert data.train.inputs[0].tolist() == ids(inputs)
    assert data.train.targets[0].tolist() == ids(targets)


def test_worked_rows_of_one_vocabulary():
    """The three of the specification came one after the other from one generator."""
    rng = np.random.default_rng(0)
    small = {"vocab_size": 16, "input_seq_len": 24, "num_kv_pairs": 4}
    base, update, block = (
        shared.draw_rows(settings, write, rng, 1)
        for settings, write in (
            (MqarSettings(**small), shared._base),
            (UpdateSettings(**small, num_updates=2), shared._update),
            (shared.BlockSettings(**small), shared._block),
        )
    )
    assert base.inputs[0].tolist() == ids("3 3 12 12 4 15 11 6 0 0 12 0 3 0 0 0 0 0 0 0 11 0 4 0")
    assert base.targets[0].tolist() == wanted(24, "12@10 3@12 6@20 15@22")
    assert update.inputs[0].tolist() == ids("5 8 13 12 3 1 15 11 15 13 5 7 5 0 3 0 15 0 0 0 13 0 0 0")
    assert update.targets[0].tolist() == wanted(24, "7@12 1@14 13@16 12@20")
    assert block.inputs[0].tolist() == ids("5 7 14 6 11 15 12 2 0 0 5 0 7 0 0 0 0 0 0 0 15 0 11 0")
    assert block.targets[0].tolist() == wanted(24, "14@10 6@12 2@20 12@22")
    first = make("mqar/shared", seed=0, train=1, test=1, **small)
    assert np.array_equal(first.train.inputs, base.inputs)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mqar", {"vocab_size": 80, "num_kv_pairs": 8}),
        ("mqar/forgetting", {"vocab_size": 80, "num_updates": 3}),
        ("mqar/shared", {"vocab_size": 16, "num_kv_pairs": 15}),
        ("mqar/update", {"vocab_size": 16, "num_kv_pairs": 6, "num_updates": 4}),
        ("mqar/rewrite", {"vocab_size": 16, "num_kv_pairs": 6, "num_updates": 4}),
        ("mqar/block", {"vocab_size": 16, "num_kv_pairs": 6, "block_size": 3}),
    ],
)
@pytest.mark.parametrize("filled", [False, True])
def test_a_query_asks_for_the_value_last_written(name, settings, filled):
    data = make(name, seed=9, train=150, test=150, random_non_queries=filled, **settings)
    told = TASKS[name].configure(**settings)
    size, context, block = told.num_kv_pairs, told.context_len, data.settings.get("block_size", 1)
    assert not np.array_equal(data.train.inputs, data.test.inputs)
    for inputs, targets in zip(data.test.inputs, data.test.targets, strict=True):
        pairs = inputs[: 2 * size].reshape(-1, 2, block)
        first = list(zip(pairs[:, 0].ravel(), pairs[:, 1].ravel(), strict=True))
        again = inputs[2 * size : context].reshape(-1, 2)
        held = dict(first)
        assert len(held) == size and 0 not in held
        if name == "mqar/update":
            assert len(set(again[:, 0])) == len(again)
        for key, value in again:
            assert name == "mqar/forgetting" or held[key] != value
            held[int(key)] = value
        places = np.flatnonzero(targets != -100)
        assert len(held) == len(places) == size and (places >= context).all() and (places % 2 == 0).all()
        assert sorted(inputs[places]) == sorted(held) and [held[i] for i in inputs[places]] == targets[places].tolist()
        rest = np.delete(inputs[context:], places - context)
        assert rest.any() if filled else not rest.any()


@pytest.mark.slow
def test_a_key_may_be_written_again_more_than_once():
    """The probability of a row with four different keys of four is 4! / 4^4: 9%."""
    rows = make("mqar/rewrite", seed=1, train=2000, test=0).train.inputs
    assert sum(len(set(row[8:16:2])) == 4 for row in rows) == pytest.approx(2000 * 24 / 256, rel=0.2)


def test_query_positions_follow_the_power_law():
    """a = 1 is uniform, and 0.01 nearly 1 / g: the median query of N = 512, D = 16 is at token 80 or so, of 512."""
    settings = {"vocab_size": 8192, "input_seq_len": 512, "num_kv_pairs": 16}
    near, even = (
        np.nonzero(make("mqar", seed=1, train=300, test=0, power_a=a, **settings).train.targets != -100)[1]
        for a in (0.01, 1.0)
    )
    assert 70 < np.median(near) < 88 and 255 < np.median(even) < 290


def test_ids_of_one_vocabulary_do_not_reveal_their_role():
    """Chi-square of id against role, 14 degrees of freedom: above 36.1 once in a thousand times. Of two it is 5,000."""

    def statistic(data):
        keys, values = data.train.inputs[:, 0:8:2], data.train.inputs[:, 1:8:2]
        counts = np.array([np.bincount(x.ravel(), minlength=17)[1:] for x in (keys, values)])
        mean = counts.mean(0).clip(1e-9)
        return float(((counts - mean) ** 2 / mean).sum())

    settings = {"vocab_size": 16, "input_seq_len": 16, "num_kv_pairs": 4}
    assert statistic(make("mqar/shared", seed=2, train=1500, test=0, **settings)) < 36.1
    two = make("mqar", seed=2, train=1500, test=0, **(settings | {"vocab_size": 17, "num_kv_pairs": 4}))
    assert statistic(two) > 1000


def test_global_generators_are_left_alone():
    np.random.seed(4)
    torch.manual_seed(4)
    states = np.random.get_state()[1].copy(), torch.get_rng_state()
    for name in ("mqar", "mqar/update", "mad/selective-copying"):
        make(name, seed=8, train=2, test=2)
    make("mqar", seed=8, train=2, test=2, random_non_queries=True)
    assert np.array_equal(np.random.get_state()[1], states[0]) and torch.equal(torch.get_rng_state(), states[1])


def test_segments_are_seeded_as_zoology_does():
    """Its DataConfig of seed 123 with one segment each: 843828734 and 3062119789."""
    train, test = zoology.segments([(MqarSettings(), 3)], [(MqarSettings(), 2)])
    for rows, seed, count in ((train, 843828734, 3), (test, 3062119789, 2)):
        assert np.array_equal(rows[0].inputs, zoology.segment(MqarSettings(), seed, count).inputs)
    seeds = {zoology.test_seed(seed) for seed in range(200)}
    assert len(seeds) == 200 and min(seeds) >= 2**31


def test_rows_have_metadata():
    data = make("mqar/update", seed=0, train=3, test=0)
    assert {key: value.tolist() for key, value in data.train.metadata.items()} == {
        "num_kv_pairs": [4] * 3,
        "input_seq_len": [64] * 3,
        "num_updates": [4] * 3,
    }


def test_published_settings_fit():
    for name in TASKS:
        if name.startswith("mqar"):
            for change in TASKS[name].published.difficulties:
                make(name, seed=0, train=1, test=0, **change)


@pytest.mark.parametrize(
    ("name", "settings", "complaint"),
    [
        ("mqar", {"input_seq_len": 63}, "input_seq_len.*even"),
        ("mqar", {"num_kv_pairs": 17}, "input_seq_len.*at least 68"),
        ("mqar", {"vocab_size": 64}, "vocab_size.*above 64 .*input_seq_len"),
        ("mqar", {"power_a": 0}, "power_a.*positive"),
        ("mqar/forgetting", {"num_updates": 5}, "num_updates.*from 0 to 4 .*num_kv_pairs"),
        ("mqar/update", {"num_kv_pairs": 16, "num_updates": 2}, "input_seq_len.*at least 68"),
        ("mqar/block", {"block_size": 3}, "block_size.*divisor"),
        ("mqar/shared", {"vocab_size": 4}, "vocab_size.*at least 5"),
    ],
)
def test_settings_that_do_not_fit_are_refused(name, settings, complaint):
    with pytest.raises(ArgumentError, match=complaint):
        make(name, seed=0, train=1, test=0, **settings)


def test_the_smallest_settings_are_valid():
    make("mqar", seed=0, train=1, test=0, num_kv_pairs=1)
    make("mqar/block", seed=0, train=1, test=0, num_kv_pairs=2, block_size=1)


def test_update_settings_equal_the_papers_grid():
    grid = [tuple(change.values()) for change in TASKS["mqar/update"].published.difficulties]
    assert {(length, pairs) for length, pairs, _ in grid} == {(64, 4), (128, 4), (128, 16)}
    assert all(pairs % updates == 0 for _, pairs, updates in grid)
