"""`kalmix eval`: the suites of papers on local copies of their datasets, resuming, and mistakes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import datasets
import pytest
import torch
from tokenizers.processors import ByteLevel

from kalmix.evaluation.judge import begin_with
from kalmix.evaluation.printed_figures import printed_tables
from kalmix.evaluation.suites import SUITES
from kalmix.models import KalmixForCausalLM
from kalmix.training.corpus import train_tokenizer
from kalmix.training.data import read_tokenizer, wrap_tokenizer
from kalmix.training.evaluation import surprisals

from .conftest import ROWS


@pytest.mark.parametrize("suite", ["kla", "gka"])
def test_suite_runs_beside_printed_figures(kalmix, run_folder: Path, data: Path, suite: str, tmp_path: Path):
    output = tmp_path / "scores"
    result = kalmix("eval", run_folder, "--suite", suite, "--data", data, "--output", output)
    assert result.status == 0, result.errors
    found = json.loads((output / "results.json").read_text())
    columns = SUITES[suite].columns
    assert list(found["tasks"]) == [column.task for column in columns]
    for column in columns:
        record = found["tasks"][column.task]
        assert record["rows"] == ROWS
        score = record["scores"][column.metric]
        assert score * ROWS == pytest.approx(round(score * ROWS))
    mean = sum(found["tasks"][x.task]["scores"][x.metric] for x in columns) / len(columns)
    (row,) = (line for line in result.output.splitlines() if line.startswith("tiny "))
    assert row.split()[-1] == f"{100 * mean:.2f}"
    for table in printed_tables(suite):
        for model, scores in table.rows:
            cells = " | ".join(f"{x:.2f}" for x in scores)
            assert f"| {model} ({table.table}) | {cells} |" in (output / f"{suite}.md").read_text()


def test_scores_are_those_of_the_model(kalmix, run_folder: Path, data: Path, tmp_path: Path):
    """LAMBADA asks for the last word of a text: compare its perplexity with the model's, texts begun as in training."""
    result = kalmix("eval", run_folder, "--tasks", "lambada_openai", "--data", data, "--output", tmp_path / "scores")
    assert result.status == 0, result.errors
    found = json.loads((tmp_path / "scores" / "results.json").read_text())["tasks"]["lambada_openai"]
    model = KalmixForCausalLM.from_pretrained(run_folder / "model").eval()
    tokenizer = read_tokenizer(run_folder / "model")
    nats = []
    for text in datasets.load_dataset(str(data / "EleutherAI/lambada_openai"))["test"]["text"]:
        head, last = text.rsplit(" ", 1)
        ids = [tokenizer.bos_token_id, *tokenizer(f"{head} {last}", add_special_tokens=False)["input_ids"]]
        begun = 1 + len(tokenizer(head, add_special_tokens=False)["input_ids"])
        nats.append(float(surprisals(model, torch.tensor(ids), window=999)[begun - 1 :].sum()))
    assert found["scores"]["perplexity"] == pytest.approx(torch.tensor(nats).mean().exp().item(), rel=1e-3)


def test_finished_tasks_are_kept(kalmix, run_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An evaluation that is interrupted in its second task goes on there, and refuses other settings."""
    import kalmix.evaluation.evaluate as module

    command = ("eval", run_folder, "--data", data, "--output", tmp_path / "out", "--tasks", "piqa,arc_easy,boolq")
    load, loaded = module.load_task, []

    def load_two(manager, name, *rest):
        loaded.append(name)
        if len(loaded) == 2:
            raise KeyboardInterrupt
        return load(manager, name, *rest)

    monkeypatch.setattr(module, "load_task", load_two)
    assert kalmix(*command).status == 130
    assert loaded == ["piqa", "arc_easy"]
    result = kalmix(*command)
    assert result.status == 0, result.errors
    assert loaded == ["piqa", "arc_easy", "arc_easy", "boolq"]
    assert kalmix(*command).status == 0
    assert len(loaded) == 4
    result = kalmix(*command, "--limit", 3)
    assert result.status == 2
    assert "has results with limit None; expected limit 3. Choose another --output." in result.errors


def test_probabilities_can_be_averaged(kalmix, run_folder: Path, data: Path, tmp_path: Path):
    """KLA+: scores of averaged probabilities differ from those of the mean, and are the same when repeated."""
    found = []
    for n, predict in enumerate(("mean", "marginal", "marginal")):
        options = ("--tasks", "lambada_openai", "--data", data, "--predict", predict, "--output", tmp_path / str(n))
        result = kalmix("eval", run_folder, *options)
        assert result.status == 0, result.errors
        found.append(json.loads((tmp_path / str(n) / "results.json").read_text())["tasks"]["lambada_openai"]["scores"])
    assert found[1] == found[2]
    assert found[0]["perplexity"] != pytest.approx(found[1]["perplexity"], rel=1e-6)


def test_texts_begin_as_in_training():
    """A tokenizer of another library may add no token, or one at the end; documents in training begin with one."""
    tokenizer = wrap_tokenizer(train_tokenizer(["a filter"], "bytes"))
    tokenizer.backend_tokenizer.post_processor = ByteLevel()
    begin_with(tokenizer, 7)
    plain = tokenizer("filter", add_special_tokens=False)["input_ids"]
    assert tokenizer("filter")["input_ids"] == tokenizer.encode("filter") == [7, *plain]


def test_tokenizer_without_an_end_of_text_gives_equal_scores(kalmix, run_folder: Path, data: Path, tmp_path: Path):
    """`kalmix data prepare` takes such tokenizers. lm-eval stops a generation at the end of a text."""
    shutil.copytree(run_folder / "model", tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    kept = {name: value for name, value in settings.items() if not name.endswith("_token")}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(kept))
    scores = []
    for folder in (run_folder, tmp_path / "model"):
        output = tmp_path / folder.name
        result = kalmix("eval", folder, "--suite", "gka", "--tasks", "fda", "--data", data, "--output", output / "out")
        assert result.status == 0, result.errors
        scores.append(json.loads((output / "out" / "results.json").read_text())["tasks"]["fda"]["scores"])
    assert scores[0] == scores[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--suite", "klaa"), "`suite` is 'klaa'; expected 'kla'"),
        (("--tasks", "piqq"), "`tasks` is 'piqq'; expected"),
        (("--limit", "0"), "`limit` is 0"),
        (("--batch-size", "0"), "`batch_size` is 0"),
        (("--data", "nowhere"), "`data` 'nowhere' does not exist"),
        (("--device", "abacus"), "`device` is 'abacus'"),
        (("--predict", "median"), "`predict` is 'median'"),
        (("--data", ".", "--tasks", "piqa"), "`data` of the task 'piqa' cannot be loaded from"),
    ],
    ids=str,
)
def test_mistakes_are_named(kalmix, run_folder: Path, arguments: tuple, message: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = kalmix("eval", run_folder, "--output", "out", *arguments)
    assert result.status == 2
    assert message in result.errors
    assert len(result.errors.strip().splitlines()) == 1


def test_folders_without_a_model_are_named(kalmix, tmp_path: Path):
    for folder in (tmp_path / "nothing", tmp_path):
        result = kalmix("eval", folder, "--output", tmp_path / "out")
        assert result.status == 2
        assert str(folder) in result.errors and len(result.errors.strip().splitlines()) == 1


def test_missing_packages_are_named(kalmix, run_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kalmix._extras.find_spec", lambda name: None if name == "lm_eval" else True)
    result = kalmix("eval", run_folder)
    assert result.status == 1
    assert "`kalmix eval` needs lm-eval, which is not installed: pip install 'kalmix[eval]'" in result.errors


def test_damaged_results_are_named(kalmix, run_folder: Path, tmp_path: Path):
    for content in ("{", "[]", "{}", '{"format": 99}'):
        (tmp_path / "results.json").write_text(content)
        result = kalmix("eval", run_folder, "--output", tmp_path)
        assert result.status == 2 and "results.json" in result.errors
        assert len(result.errors.strip().splitlines()) == 1


@pytest.mark.parametrize("suite", ["kla", "gka"])
def test_printed_averages_are_means_of_their_rows(suite: str):
    """A copied figure that is wrong would change the mean of its row."""
    tables = printed_tables(suite)
    assert [table.table for table in tables] == {"kla": ["Table 4"], "gka": ["Table 7", "Table 8", "Table 11"]}[suite]
    titles = [column.title for column in SUITES[suite].columns]
    for table in tables:
        assert table.columns[:-1] == titles
        for model, (*scores, average) in table.rows:
            assert len(scores) == len(titles), model
            assert sum(scores) / len(scores) == pytest.approx(average, abs=0.0051), (table.table, model)
