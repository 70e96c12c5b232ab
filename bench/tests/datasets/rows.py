"""Notation of rows in these tests, and their digests."""

import hashlib

import numpy as np


def digest(data):
    """Return a hash of all arrays of training and test rows; digests in tests come from the original codes."""
    of = hashlib.sha256()
    for rows in (data.train, data.test):
        for array in (rows.inputs, rows.targets):
            of.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return of.hexdigest()[:16]


def ids(text):
    """`"3 . 7"` is 3, -100, 7."""
    return [-100 if token == "." else int(token) for token in text.split()]


def wanted(length, text):
    """`"7@2"` is -100 -100 7, and -100 from there on."""
    targets = [-100] * length
    for answer in text.split():
        value, place = map(int, answer.split("@"))
        targets[place] = value
    return targets
