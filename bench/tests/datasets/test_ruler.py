"""RULER's prompts equal those of its public code, given its words, its tokenizer and equal sentence splitting."""

import hashlib
import random
import re
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from kalmix import ArgumentError
from kalmix_bench.datasets import TASKS, make
from kalmix_bench.datasets.ruler import Prompts, counting, needles, tracking
from kalmix_bench.datasets.ruler.haystacks import WordPairs, load_words, split_sentences
from kalmix_bench.datasets.ruler.prompts import END_ID, byte_string_match

NEEDLE = needles.NeedleSettings
MANY = {"type_haystack": "essay", "type_needle_k": "numbers", "type_needle_v": "uuids", "num_needle_v": 3}
UUIDS = {"type_haystack": "needle", "type_needle_k": "uuids", "type_needle_v": "uuids", "num_needle_k": 3}

# Writer, settings, digest of six prompts of seed 7 and their answers, as the code of NVIDIA/RULER (c3f5e3b) makes
# them where tokens are those of `tokens`, and sentences those of `sentences`. None of these needs its list of words.
ORIGINAL = [
    (needles.prompts, NEEDLE(1500, type_needle_k="numbers"), "07288cb2d43efba5"),
    (needles.prompts, NEEDLE(5000, type_needle_k="numbers"), "e0410a12ad6f0fa6"),
    (needles.prompts, NEEDLE(1500, num_needle_q=2, **MANY), "be7b5cb0907d8d89"),
    (needles.prompts, NEEDLE(5000, num_needle_q=2, **MANY), "6dcd8d9a6245ebeb"),
    (needles.prompts, NEEDLE(1500, **UUIDS), "21b7fb5838d0800f"),
    (needles.prompts, NEEDLE(5000, **UUIDS), "1b6be5924487d9d2"),
    (tracking.prompts, tracking.TrackingSettings(1500), "3df846625e72e403"),
    (tracking.prompts, tracking.TrackingSettings(1500, num_chains=3, num_hops=2), "b7d0d731d2371404"),
    (counting.frequent_words, counting.CodedSettings(1500), "d401bc241c046609"),
    (counting.frequent_words, counting.CodedSettings(1500, alpha=1.5), "c73d798ef63c9764"),
]
NAMES = [name for name in TASKS if name.startswith("needle/")]


def tokens(text):
    return re.findall(r"\w+|[^\w\s]", text)


@pytest.fixture
def essay(tmp_path):
    path = tmp_path / "essay.txt"
    path.write_text(" ".join(f"Line {i} has {i * i % 97} words, or so." for i in range(700)))
    return str(path)


@pytest.mark.parametrize(("writer", "settings", "want"), ORIGINAL)
def test_prompts_are_the_originals(writer, settings, want, essay):
    if getattr(settings, "type_haystack", "") == "essay":
        settings = replace(settings, essay=essay)
    drawn = list(islice(writer(settings, 7, lambda text: len(tokens(text))), 6))
    assert hashlib.sha256(repr([(p.text, p.answers) for p in drawn]).encode()).hexdigest()[:16] == want
    assert all(len(tokens(p.text)) + settings.tokens_to_generate <= settings.max_seq_length for p in drawn)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_prompts_with_their_answers(name):
    data = make(name, seed=3, train=2, test=3)
    assert isinstance(data.test, Prompts) and data.vocab_size == 257
    everyone = make(name, seed=3, train=0, test=5).test
    assert everyone.texts == (*data.train.texts, *data.test.texts)
    for row, (text, answers) in enumerate(zip(everyone.texts, everyone.answers, strict=True)):
        scored = everyone.targets[row] != -100
        length = len(text.encode())
        assert bytes(everyone.inputs[row, :length].tolist()).decode() == text
        assert everyone.targets[row][scored].tolist() == [*(" " + ", ".join(answers)).encode(), END_ID]
        assert np.flatnonzero(scored)[0] == length - 1  # the last token of the prompt is followed by the answer
        assert everyone.metadata["length"][row] == length + data.settings["tokens_to_generate"]
        assert all(answer in text for answer in answers)
        if "depth" in everyone.metadata:
            at = text.encode().find(answers[0].encode())
            assert everyone.metadata["depth"][row] == (
                at / length if name != "needle/variable-tracking" else pytest.approx(at / length, abs=0.05)
            )
    assert "depth" in everyone.metadata or name in ("needle/common-words", "needle/frequent-words")


def test_answers_are_in_the_text():
    for text, answers in zip(*_both("needle/multivalue"), strict=True):
        key = re.search(r"numbers for (\S+) mentioned", text)[1]
        assert sorted(re.findall(rf"numbers for {key} is: (\d+)\.", text)) == sorted(answers) and len(answers) == 4
    for text, answers in zip(*_both("needle/multiquery"), strict=True):
        keys = re.search(r"numbers for (.*) mentioned in the provided text\?", text)[1].replace("and ", "").split(", ")
        assert [re.search(rf"numbers for {key} is: (\d+)\.", text)[1] for key in keys] == list(answers)
        assert len(keys) == 4
    for text, answers in zip(*_both("needle/single-3"), strict=True):
        assert re.search(r"What is the special magic uuid for (\S+) mentioned", text) and len(answers) == 1
    for text, answers in zip(*_both("needle/variable-tracking"), strict=True):
        asked = text[text.rfind("Memorize") :]
        held = {re.search(r"assigned the value (\d+) in", asked)[1]}
        for name, value in re.findall(r"VAR (\S+) = (?:VAR )?(\S+)", asked):
            held |= {name} if value in held else set()
        assert held >= set(answers) and len(held) == 6 and len(answers) == 5


def test_answers_are_the_most_frequent_words():
    for name, size in (("needle/common-words", 10), ("needle/frequent-words", 3)):
        for text, answers in zip(*_both(name), strict=True):
            asked = text[text.rfind("most often.\n") :] if size == 10 else text
            count = {word: len(re.findall(rf"(?<![\w-]){word}(?![\w-])", asked)) for word in answers}
            others = (
                set(re.findall(r"[a-z]+(?:-[a-z]+)*", asked.split("Question")[0])) - set(answers) - set("track the")
            )
            assert len(answers) == size and min(count.values()) > 1
            listed = [
                word for word in others if len(re.findall(rf"\d+\. {word}(?![\w-])", asked)) >= min(count.values())
            ]
            assert not listed


def _both(name):
    drawn = make(name, seed=11, train=0, test=3, words="builtin").test
    return drawn.texts, drawn.answers


def test_any_tokenizer_serves():
    ids = {}

    def encode(text):
        return [ids.setdefault(word, len(ids)) for word in tokens(text)]

    settings = {"max_seq_length": 800, "tokens_to_generate": 16, "words": "builtin"}
    drawn = TASKS["needle/single-1"].prompts(seed=0, count=2, encode=encode, end=10**6, **settings)
    assert drawn.inputs.shape == (2, 800) and drawn.inputs[0, -1] == 10**6
    want = [*encode(drawn.answers[0][0]), 10**6]
    assert drawn.targets[0][drawn.targets[0] != -100].tolist() == want
    assert (drawn.metadata["length"] > 700).all()


def test_scores_find_answers_in_bytes():
    rows = make("needle/multivalue", seed=0, train=0, test=2, max_seq_length=2048).test
    given = rows.targets.copy()
    assert byte_string_match(given, rows.targets) == 1
    given[0, np.flatnonzero(given[0] != -100)[3]] = ord("x")  # one digit of the first of four answers
    assert byte_string_match(given, rows.targets) == pytest.approx((0.75 + 1) / 2)
    assert TASKS["needle/multivalue"].scores["exact_match"](given, rows.targets) == 0.5


def test_pairs_of_words_are_in_order():
    """Also where one beginning begins another, as "blue-" does "blue-eyed-"."""
    adjectives, nouns = ["red", "blue", "blue-eyed", "bold", "red"], ["owl", "fan", "eyed-owl", "zoo"]
    pairs, want = WordPairs(adjectives, nouns), sorted({f"{a}-{n}" for a in adjectives for n in nouns})
    assert list(pairs) == want and pairs[-1] == want[-1] and pairs[1:3] == want[1:3]
    assert random.Random(0).choice(pairs) == random.Random(0).choice(want)
    pairs, words = load_words("builtin")
    assert len(pairs) > 20_000 and len(words) > 400 and all(word.isalpha() for word in words)


def test_sentences_are_split_at_their_ends():
    assert split_sentences(" One. Two? 3.5 is one! Last ") == ["One.", "Two?", "3.5 is one!", "Last"]


def test_a_length_too_small_is_refused():
    """The haystacks of these prompts are smaller than the smallest one of the original code."""
    short = make("needle/single-1", seed=0, train=3, test=0, max_seq_length=550, tokens_to_generate=16).train
    assert (short.metadata["length"] <= 550).all()
    for name, length in (("single-1", 400), ("multikey-3", 500), ("variable-tracking", 1000), ("common-words", 1500)):
        with pytest.raises(ArgumentError, match=r"max_seq_length.*too small by"):
            make(f"needle/{name}", seed=0, train=1, test=0, max_seq_length=length)
    with pytest.raises(ArgumentError, match=r"max_seq_length.*at least 250"):
        make("needle/frequent-words", seed=0, train=1, test=0, max_seq_length=249)
    with pytest.raises(ArgumentError, match=r"max_seq_length.*\(a prompt and its answer\)"):
        make("needle/single-3", seed=0, train=1, test=0, tokens_to_generate=1)


def test_mistakes_are_named(tmp_path):
    for settings, complaint in (
        ({"type_haystack": "hay"}, "type_haystack.*'noise', 'essay' or 'needle'"),
        ({"type_needle_v": "x"}, "type_needle_v"),
        ({"num_needle_k": 0}, "num_needle_k.*at least 1"),
        ({"type_haystack": "essay", "num_needle_k": 41}, "num_needle_k.*at most 40"),
        ({"words": "mine"}, "words.*'wonderwords' or 'builtin'"),
        ({"type_haystack": "essay", "essay": str(tmp_path / "none")}, "essay.*cannot be read"),
    ):
        with pytest.raises(ArgumentError, match=complaint):
            make("needle/single-1", seed=0, train=1, test=0, **settings)
    (tmp_path / "empty").write_text(" ")
    with pytest.raises(ArgumentError, match=r"essay.*empty"):
        make("needle/single-2", seed=0, train=1, test=0, essay=str(tmp_path / "empty"))


def test_words_to_count_are_mixed_with_the_others():
    for text, answers in zip(*_both("needle/common-words"), strict=True):
        asked = text[text.rfind("most often.\n") :].split("Question")[0]
        listed = re.findall(r"\d+\. ([a-z-]+)", asked)
        last = max(place for place, word in enumerate(listed) if word in answers)
        first = min(place for place, word in enumerate(listed) if word not in answers)
        assert first < len(listed) // 4 and last > len(listed) * 3 // 4


@pytest.mark.parametrize(("length", "step"), [(4095, 5), (4096, 10)])
def test_long_prompts_are_fitted_in_larger_steps(monkeypatch, length, step):
    steps = []
    fit = tracking.Fit
    monkeypatch.setattr(tracking, "Fit", lambda *given, **named: steps.append(named["step"]) or fit(*given, **named))
    next(tracking.prompts(tracking.TrackingSettings(length), 0, lambda text: len(tokens(text))))
    assert steps[-1] == step
