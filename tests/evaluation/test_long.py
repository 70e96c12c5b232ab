"""The suite "long" of `kalmix eval`: RULER by generation, needles by depth, and perplexity by length."""

from __future__ import annotations

import json
import math
import random
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import nltk
import pytest
import torch
import wonderwords

from kalmix.evaluation.judge import begin_texts
from kalmix.evaluation.perplexity import perplexity, read_text
from kalmix.evaluation.ruler import deciles, load_ruler_task, needles
from kalmix.evaluation.suites import MAX_LENGTH, units_of
from kalmix.evaluation.table import score_tables
from kalmix.models import KalmixForCausalLM
from kalmix.training import Recipe
from kalmix.training.checkpoints import write_manifest
from kalmix.training.data import read_tokenizer
from kalmix.training.evaluation import surprisals
from kalmix.training.model_folder import find_model

from .conftest import WORDS, write_dataset


@pytest.fixture(scope="module", autouse=True)
def _few_words() -> Iterator[None]:
    """Give lm-eval few words for needles: at its import, it sorts all pairs of an adjective and a noun for 10 s."""
    kinds = {"noun": [f"noun{n}" for n in range(500)], "adjective": ["slow", "quick"], "verb": ["see", "go"]}
    categories = kinds | {f"{name}s": words for name, words in kinds.items()}
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(wonderwords, "RandomWord", lambda: SimpleNamespace(_categories=categories))
    yield
    monkeypatch.undo()


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw, path = random.Random(1), tmp_path_factory.mktemp("text") / "long.txt"
    path.write_text(" ".join(draw.choices(WORDS, k=400)))
    return path


@pytest.fixture(scope="module")
def haystacks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with copies of what RULER downloads, small and in the same formats."""
    folder, draw = tmp_path_factory.mktemp("haystacks"), random.Random(2)
    sentences = [" ".join(draw.choices(WORDS, k=8)).capitalize() + "." for _ in range(900)]
    write_dataset(folder, "baber/paul_graham_essays", {"default": {"train": [{"text": " ".join(sentences)}]}})
    punkt = folder / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    punkt.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (punkt / name).write_text("")
    answers = [{"text": x} for x in ("belief", "evidence")]
    pages = []
    for n in range(30):
        question = {"question": f"What is {n}?", "is_impossible": False, "answers": answers}
        pages.append({"paragraphs": [{"context": f"Page {n}: {sentences[n]}", "qas": [question] * 20}]})
    (folder / "dev-v2.0.json").write_text(json.dumps({"data": pages}))
    return folder


@pytest.mark.parametrize(
    ("tasks", "lengths"),
    [
        (["niah_single_1"], [1000]),
        pytest.param(["niah_single_1", "niah_multikey_2"], [1000, 1400], marks=pytest.mark.slow),
    ],
)
def test_needles_are_found_by_generation(kalmix, run_folder: Path, tasks: list, lengths: list, tmp_path: Path):
    """The mean over a row's needles is the row's score; each needle has its depth."""
    output = tmp_path / "out"
    units = ("--tasks", ",".join(tasks), "--lengths", ",".join(map(str, lengths)), "--limit", 2)
    result = kalmix("eval", run_folder, "--suite", "long", *units, "--data", tmp_path, "--output", output)
    assert result.status == 0, result.errors
    found = json.loads((output / "results.json").read_text())["tasks"]
    assert list(found) == [f"{task}@{n}" for task in tasks for n in lengths]
    for key, record in found.items():
        assert record["rows"] == 2
        rows = [dict(zip(record["needles"]["columns"], row, strict=True)) for row in record["needles"]["rows"]]
        assert [row["row"] for row in rows] == [0, 1]
        assert sum(row["score"] for row in rows) / 2 == record["scores"]["score"]
        assert sum(group["needles"] for group in record["deciles"]) == 2
        length = int(key.split("@")[1])
        assert all(0 < row["token"] < row["tokens"] <= length - 128 for row in rows)
        assert all(row["tokens"] > length / 2 for row in rows)
    assert "S-NIAH-1" in result.output and "90-100%" in (output / "long.md").read_text()


def test_local_data_need_no_network(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """lm-eval's code of needle tasks downloads a model of NLTK when it is imported; `data` prevents it."""
    asked = []

    def refuse(host: object, *rest: object, **options: object) -> None:
        asked.append(host)
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(nltk.data, "path", [])
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.ruler.")]:
        monkeypatch.delitem(sys.modules, name)
    loaded = load_ruler_task("niah_single_1", 1000, 1, str(run_folder / "model"), tmp_path)
    assert len(loaded.dataset["test"]) == 1 and "lm_eval.tasks.ruler.prepare_niah" in sys.modules
    assert not asked


def test_needles_have_positions():
    """Two needles at a quarter and near the end of a prompt; the answer contains one of them."""

    class Words:
        """Tokenizer whose tokens are words."""

        def __call__(self, text: str, **options: object) -> dict[str, list[tuple[int, int]]]:
            starts = [0, *(n + 1 for n, x in enumerate(text) if x == " ")]
            return {"offset_mapping": [(n, len(text[n:].split(" ")[0]) + n) for n in starts]}

    words = ["hay"] * 20
    words[5], words[19] = "AB-1", "cd-2"
    doc = {"index": 3, "input": " ".join(words), "outputs": ["AB-1", "cd-2"]}
    found = needles([{"doc": doc, "filtered_resps": ["It is ab-1."]}], Words())
    assert found == [(3, 5, 20, 1), (3, 19, 20, 0)]
    assert [x.decile for x in found] == [2, 9]
    counts = deciles(found)
    assert len(counts) == 10 and counts[2] == {"needles": 1, "found": 1} and counts[9] == {"needles": 1, "found": 0}


def test_needles_are_printed_by_task_and_depth():
    """Two tasks at two lengths: a table of both, and one with a row for each; a single task needs no second table."""

    def record(*found: int) -> dict[str, object]:
        counts = [{"needles": 4, "found": n} for n in (*found, *[4] * (9 - len(found)))]
        return {"scores": {"score": 0.5}, "rows": 10, "deciles": [*counts, {"needles": 0, "found": 0}]}

    lengths = (4096, MAX_LENGTH)
    records = {f"niah_multikey_1@{length}": record(0, 3) for length in lengths}
    records |= {f"niah_single_1@{length}": record(1) for length in lengths}
    _, pooled, split = score_tables("long", "tiny", records)
    assert pooled.rows[0] == ["0-10%", "12.50", "12.50"] and pooled.rows[9] == ["90-100%", "-", "-"]
    assert split.columns == ["task", "tokens", *(row[0] for row in pooled.rows)]
    assert [row[:4] for row in split.rows] == [
        *(["S-NIAH-1", f"{length:,}", "25.0", "100.0"] for length in lengths),
        *(["MK-NIAH-1", f"{length:,}", "0.0", "75.0"] for length in lengths),
    ]
    assert all(row[-1] == "-" for row in split.rows)
    assert max(map(len, split.text().splitlines())) <= 100
    assert len(score_tables("long", "tiny", {"niah_single_1@4096": record()})) == 2


@pytest.mark.slow
@pytest.mark.parametrize("task", ["niah_multivalue", "ruler_qa_squad"])
def test_tasks_read_local_copies(kalmix, run_folder: Path, haystacks: Path, task: str, tmp_path: Path):
    tasks = ("--tasks", task, "--lengths", "3000", "--limit", 1, "--data", haystacks)
    result = kalmix("eval", run_folder, "--suite", "long", *tasks, "--output", tmp_path)
    assert result.status == 0, result.errors
    record = json.loads((tmp_path / "results.json").read_text())["tasks"][f"{task}@3000"]
    assert record["rows"] == 1 and 0 <= record["scores"]["score"] <= 1
    assert ("needles" not in record) or len(record["needles"]["rows"]) == 4


def test_perplexity_is_that_of_windows_without_overlap(run_folder: Path, text_file: Path, monkeypatch):
    """Windows in pieces of 5 tokens, in batches, equal each window alone; all lengths read the same tokens."""
    monkeypatch.setattr("kalmix.evaluation.perplexity.PIECE", 5)
    model = KalmixForCausalLM.from_pretrained(run_folder / "model").eval()
    tokenizer = read_tokenizer(run_folder / "model")
    begin_texts(tokenizer, model)
    text = read_text(text_file, tokenizer, find_model(run_folder), (12, 24), limit=3)
    assert len(text.ids) == 72 and text.ids[0] == model.config.bos_token_id
    for length in text.lengths:
        nats = torch.cat([surprisals(model, x, window=99) for x in text.ids.view(-1, length)]).double().mean()
        record = perplexity(model, text, length, batch_size=2)
        assert record["scores"]["nats_per_token"] == pytest.approx(float(nats), rel=1e-4)
        assert record["scores"]["perplexity"] == pytest.approx(math.exp(float(nats)), rel=1e-3)
        assert (record["rows"], record["tokens"]) == (72 // length, 72 - 72 // length)


def test_a_text_adds_perplexity_to_the_given_tasks():
    units = units_of("long", ["niah_single_1"], [4096], [512])
    assert [(unit.column.task, unit.length) for unit in units] == [("niah_single_1", 4096), ("perplexity", 512)]


def prepared(kalmix, text_file: Path, tokenizer: Path, folder: Path) -> Path:
    """Return the folder of new shards with held-out documents."""
    (folder / "corpus").mkdir()
    for n in range(60):
        (folder / "corpus" / f"{n}.txt").write_text(f"{n} " + text_file.read_text()[: 100 + n])
    options = ("--tokenizer", tokenizer, "--held-out", 0.5, "--output", folder / "shards")
    assert kalmix("data", "prepare", folder / "corpus", *options).status == 0
    return folder / "shards"


def test_perplexity_of_a_text_and_of_shards(kalmix, run_folder: Path, text_file: Path, tmp_path: Path):
    output = tmp_path / "out"
    long = ("eval", run_folder, "--suite", "long", "--tasks", "perplexity", "--lengths", "16,64", "--output", output)
    result = kalmix(*long, "--text", text_file)
    assert result.status == 0, result.errors
    first = json.loads((output / "results.json").read_text())["tasks"]
    assert list(first) == ["perplexity@16", "perplexity@64"]
    assert f"{first['perplexity@16']['scores']['perplexity']:.3f}" in result.output

    shards = prepared(kalmix, text_file, run_folder / "model", tmp_path)
    result = kalmix(*long, "--text", shards)  # another text: computed again
    assert result.status == 0, result.errors
    second = json.loads((output / "results.json").read_text())["tasks"]
    assert second["perplexity@16"]["text"] != first["perplexity@16"]["text"]
    manifest = json.loads((shards / "manifest.json").read_text())
    (shards / "manifest.json").write_text(json.dumps({**manifest, "bos_id": manifest["bos_id"] + 1}))
    result = kalmix(*long, "--text", shards)
    assert result.status == 2 and "shards whose documents begin with another token; expected" in result.errors
    (shards / "tokenizer" / "tokenizer.json").rename(tmp_path / "kept.json")
    (shards / "manifest.json").write_text(json.dumps({**manifest, "tokenizer_sha256": "0" * 64}))
    result = kalmix(*long, "--text", shards)
    assert result.status == 2 and "shards of another tokenizer; expected the model's" in result.errors


def test_perplexity_of_a_checkpoint(kalmix, run_folder: Path, text_file: Path, tmp_path: Path):
    """It equals that of a model with the same weights; the tokenizer is that of the run, which has saved no model."""
    run, steps = tmp_path / "run", (2, 3)
    for step in steps:
        shutil.copytree(run_folder / "model", run / "checkpoints" / f"checkpoint-{step}")
        (run / "model").mkdir(exist_ok=True)
        (run / "checkpoints" / f"checkpoint-{step}" / "tokenizer.json").rename(run / "model" / "tokenizer.json")
    model = KalmixForCausalLM.from_pretrained(run_folder / "model")
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.5)
    model.save_pretrained(run / "checkpoints" / "checkpoint-2")
    for step in steps:
        write_manifest(run / "checkpoints" / f"checkpoint-{step}", 1, 1, {}, Recipe(steps=4))
    Recipe(steps=4).save(run)
    options = ("--suite", "long", "--tasks", "perplexity", "--lengths", "16", "--text")
    assert kalmix("eval", run_folder, *options, text_file, "--output", tmp_path / "out").status == 0
    results = []
    for step in steps:
        result = kalmix("eval", run / f"checkpoint-{step}", *options, text_file)
        assert result.status == 0, result.errors
        assert f"run/checkpoint-{step}" in result.output
        results.append(json.loads((run / "evaluation" / f"checkpoint-{step}" / "results.json").read_text()))
    whole = json.loads((tmp_path / "out" / "results.json").read_text())
    first, last = (found["tasks"]["perplexity@16"]["scores"] for found in results)
    assert last == whole["tasks"]["perplexity@16"]["scores"] != first
    assert results[1]["settings"] == whole["settings"] != results[0]["settings"]
    assert not list(run.glob("checkpoint-*"))

    manifest = json.loads((prepared(kalmix, text_file, run_folder / "model", tmp_path) / "manifest.json").read_text())
    for change, message in (
        ({"bos_id": 5}, "begin with another token"),
        ({"tokenizer_sha256": "0"}, "of another token"),
    ):
        (tmp_path / "shards" / "manifest.json").write_text(json.dumps(manifest | change))
        result = kalmix("eval", run / "checkpoint-3", *options, tmp_path / "shards", "--output", tmp_path / "other")
        assert result.status == 2 and message in result.errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "4096"), "`lengths` does not apply to the suite 'kla'"),
        (("--suite", "long", "--lengths", "many"), "`lengths` is 'many'"),
        (("--suite", "long", "--lengths", "0"), "`lengths` is 0"),
        (("--suite", "long", "--text", "short.txt", "--lengths", "1,4"), "`lengths` is 1; expected at least 2 tokens"),
        (("--suite", "long", "--lengths", "1048577"), "`lengths` is 1048577; expected at most 1048576, except for"),
        (("--suite", "long", "--tasks", "perplexity"), "`text` is missing"),
        (("--suite", "long", "--text", "nothing.txt"), "nothing.txt"),
        (("--suite", "long", "--text", "short.txt"), "which has 2 tokens; expected at least 2,048 tokens"),
        (("--suite", "long", "--tasks", "niah_single_2", "--data", "."), "lacks the sentence tokenizer punkt_tab"),
        (("--suite", "long", "--tasks", "ruler_qa_squad", "--data", "."), "dev-v2.0.json is missing"),
        (("--suite", "long", "--tasks", "ruler_vt", "--data", "."), "`lengths` 4,096 leaves"),
        (("--suite", "long", "--tasks", "niah_single_1", "--lengths", "200", "--data", "."), "`lengths` 200 leaves no"),
    ],
    ids=str,
)
def test_mistakes_are_named(kalmix, run_folder: Path, arguments: tuple, message: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("a")
    result = kalmix("eval", run_folder, "--output", "out", *arguments)
    assert result.status == 2
    assert message in result.errors
    assert len(result.errors.strip().splitlines()) == 1
