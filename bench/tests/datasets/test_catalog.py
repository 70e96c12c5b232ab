"""Tests of the catalogue of tasks: rows, seeds and errors."""

import json

import numpy as np
import pytest

from kalmix import ArgumentError
from kalmix_bench.datasets import TASKS, make

EVERY = pytest.mark.parametrize("name", TASKS)


@EVERY
def test_rows_are_integers(name):
    data = make(name, seed=1, train=3, test=2)
    for rows, count in ((data.train, 3), (data.test, 2)):
        assert len(rows) == count
        for array in (rows.inputs, rows.targets):
            assert array.dtype == np.int64 and array.shape == (count, data.test.inputs.shape[1])
            assert array.max() < data.vocab_size
        assert rows.inputs.min() >= 0 and set(rows.targets[rows.targets < 0].tolist()) <= {-100}
        assert all(len(fact) == count for fact in rows.metadata.values())
    assert json.loads(json.dumps(data.settings)) == data.settings


@EVERY
def test_rows_depend_only_on_the_seed(name):
    one, same, other = (make(name, seed=seed, train=2, test=2) for seed in (5, 5, 6))
    for split in ("train", "test"):
        assert np.array_equal(getattr(one, split).inputs, getattr(same, split).inputs)
        assert np.array_equal(getattr(one, split).targets, getattr(same, split).targets)
        assert not np.array_equal(getattr(one, split).inputs, getattr(other, split).inputs)


@EVERY
def test_a_split_may_be_empty(name):
    for train, test in ((0, 1), (1, 0), (0, 0)):
        data = make(name, seed=0, train=train, test=test)
        assert data.train.inputs.shape == (train, *data.test.inputs.shape[1:])


@EVERY
def test_correct_predictions_score_one(name):
    rows = make(name, seed=0, train=0, test=3).test
    for score in TASKS[name].scores.values():
        assert score(rows.targets, rows.targets) == 1
        assert score(np.where(rows.targets == 0, 1, 0), rows.targets) < 0.5


def test_mistakes_are_named():
    with pytest.raises(ArgumentError, match=r"'mad/selective-copy'.*mad/selective-copying"):
        make("mad/selective-copy", seed=0, train=1, test=1)
    with pytest.raises(ArgumentError, match=r"expected .*'words/a5'"):
        make("???", seed=0, train=1, test=1)
    with pytest.raises(ArgumentError, match=r"`length` is not a setting of mqar.*'vocab_size', 'input_seq_len'"):
        make("mqar", seed=0, train=1, test=1, length=3)
    for settings in ({"vocab_size": "16"}, {"vocab_size": 16.0}, {"multi_query": 1}, {"seq_len": True}):
        with pytest.raises(ArgumentError, match="of type"):
            make("mad/in-context-recall", seed=0, train=1, test=1, **settings)
    for sizes in ({"train": -1, "test": 1, "seed": 0}, {"train": 1, "test": 1.5, "seed": 0}):
        with pytest.raises(ArgumentError, match="an integer, at least 0"):
            make("mad/compression", **sizes)
    for seed in (-1, 2**32, 0.5):
        with pytest.raises(ArgumentError, match="seed"):
            make("mad/compression", train=1, test=1, seed=seed)


def test_numpy_scalars_are_accepted():
    data = make("mad/noisy-recall", seed=np.int64(1), train=1, test=0, vocab_size=np.int64(20), frac_noise=0)
    assert json.dumps(data.settings) and type(data.settings["frac_noise"]) is float
