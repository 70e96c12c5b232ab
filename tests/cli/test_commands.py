"""Output and files of each command."""

from __future__ import annotations

import html.parser
import json
import shutil
from pathlib import Path

import pytest

from kalmix import designs
from kalmix.testing import doctor

from .conftest import SMALL

PNG = b"\x89PNG\r\n\x1a\n"


def test_train_prints_scores_and_files(kalmix, text_file: Path, tmp_path: Path) -> None:
    result = kalmix("train", "--text", text_file, *SMALL, "--steps", 3, "--output", tmp_path / "run")
    assert result.status == 0, result.errors
    for word in ("gzip -9", "xz -9", "this model", "bits per byte", "a sample"):
        assert word in result.output
    for name in ("loss.png", "variance.png", "attention.png"):
        assert str(tmp_path / "run" / name) in result.output
        assert (tmp_path / "run" / name).read_bytes().startswith(PNG)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_train_warns_that_a_run_has_no_checkpoint(kalmix, run_folder: Path, text_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    shutil.copytree(run_folder, output)
    train = ("train", "--text", text_file, *SMALL, "--steps", 5, "--output", output)
    for resume in (train, ("train", "--resume", "--output", output)):
        (output / "history.json").unlink()
        result = kalmix(*resume)
        assert result.status == 0, result.errors
        (line,) = (line for line in result.errors.splitlines() if line.startswith("warning: "))
        assert line.startswith(f"warning: the run in {output} was stopped before its first checkpoint, so it starts")
        assert f"`kalmix train --resume --output {output}`" in line


@pytest.mark.slow
def test_attention_alone_draws_no_variances(kalmix, text_file: Path, tmp_path: Path) -> None:
    result = kalmix(
        "train", "--text", text_file, *SMALL, "--layers", "attention", "--steps", 1, "--output", tmp_path / "run"
    )
    assert result.status == 0, result.errors
    assert [path.name for path in (tmp_path / "run").glob("*.png")] == ["loss.png"]


def test_generate_prints_the_prompt_as_it_is(kalmix, run_folder: Path) -> None:
    prompt = "a :key: [b]c[/b]\td\n\te"
    result = kalmix("generate", run_folder, "--prompt", prompt, "--tokens", 1)
    assert result.status == 0 and result.output.startswith(prompt), result.errors


@pytest.mark.slow
def test_generate_averages_over_the_posterior(kalmix, run_folder: Path) -> None:
    """The last layer of this run is attention, which has no posterior."""
    result = kalmix("generate", run_folder, "--predict", "marginal")
    assert result.status == 2
    message = "`predict` is 'marginal', but the last layer, Attention, has no posterior; expected 'mean'."
    assert result.errors == f"error: {message}\n"
    assert kalmix("generate", run_folder, "--predict", "median").status == 2


def test_generate_continues_a_prompt(kalmix, run_folder: Path) -> None:
    asked = ("generate", run_folder, "--prompt", "filter noise", "--tokens", 12, "--seed", 3)
    result = kalmix(*asked)
    assert result.status == 0, result.errors
    assert result.output.startswith("filter noise")
    assert len(result.output) > len("filter noise\n")
    assert kalmix(*asked).output == result.output


@pytest.mark.parametrize("command", [("generate",), ("inspect", "--text", "filter")])
def test_device_that_is_not_here_is_one_line(
    kalmix, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Without the option, both run on an accelerator if there is one."""
    monkeypatch.chdir(tmp_path)
    result = kalmix(*command, run_folder, "--device", "gpu")
    assert result.status == 2
    assert result.errors == "error: `device` is 'gpu'; expected a device of this machine, such as cuda.\n"
    assert kalmix(*command, run_folder, "--device", "cpu").status == 0


def test_greedy_generation_is_equal_for_run_and_model_folder(kalmix, run_folder: Path) -> None:
    greedy = ("--temperature", 0, "--tokens", 5)
    assert kalmix("generate", run_folder, *greedy).output == kalmix("generate", run_folder / "model", *greedy).output


@pytest.mark.slow
def test_texts_begin_with_the_token_of_the_configuration(kalmix, run_folder: Path, tmp_path: Path) -> None:
    """A run on shards has their tokenizer, which need not have a token that is named `<|endoftext|>`."""
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    tokenizer = folder / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|endoftext|>", "<s>"))
    greedy = ("--prompt", "filter", "--temperature", 0, "--tokens", 5)
    assert kalmix("generate", folder, *greedy) == kalmix("generate", run_folder, *greedy)
    lines = [
        kalmix("inspect", path, "--text", "a filter", "--output", tmp_path / "out").output.splitlines()[0]
        for path in (folder, run_folder)
    ]
    assert lines[0] == lines[1] != ""


class Page(html.parser.HTMLParser):
    """Parser that collects a page's links and script."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []
        self.script, self._in_script = "", False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.foreign += [value or "" for name, value in attrs if name in ("src", "href")]
        self._in_script = tag == "script"

    def handle_data(self, data: str) -> None:
        self.script += data if self._in_script else ""


@pytest.mark.slow
def test_inspect_writes_a_figure_and_a_standalone_page(kalmix, run_folder: Path, tmp_path: Path) -> None:
    text = 'a </script> <!-- in "naïve" text\n'
    result = kalmix("inspect", run_folder, "--text", text, "--output", tmp_path / "out")
    assert result.status == 0, result.errors
    assert (tmp_path / "out" / "beliefs.png").read_bytes().startswith(PNG)
    page = Page()
    page.feed((tmp_path / "out" / "beliefs.html").read_text())
    assert page.foreign == []
    line = next(line for line in page.script.splitlines() if line.startswith("const data = "))
    data = json.loads(line.removeprefix("const data = ").removesuffix(";").replace(r"<\!--", "<!--"))
    assert "".join(data["tokens"]) == text
    assert len(data["variance"][0]) == len(data["gain"][0]) == len(data["surprisal"]) == len(data["tokens"])
    assert data["names"] == ["layer 1"]


@pytest.mark.slow
def test_inspect_reads_files(kalmix, run_folder: Path, text_file: Path, tmp_path: Path) -> None:
    assert kalmix("inspect", run_folder, "--file", text_file, "--characters", 50, "--output", tmp_path).status == 0


@pytest.mark.parametrize("name", sorted(designs.CATALOGUE))
def test_explain_prints_the_assumptions_of_a_design(kalmix, name: str) -> None:
    design, result = designs.CATALOGUE[name], kalmix("explain", name.upper().replace("-", "_"))
    assert result.status == 0, result.errors
    said = " ".join(result.output.split())
    formulas = (design.transition.statement, design.evidence.statement, design.covariance.statement, design.update)
    statements = [part for formula in formulas for part in formula.replace(";", ",").split(",  ")]
    for fact in (*statements, design.evidence.description, design.op, design.equations, design.citation):
        assert " ".join(fact.split()) in said


@pytest.mark.parametrize("columns", [60, 200])
def test_explain_without_a_name_lists_all_designs(kalmix, columns: int) -> None:
    result = kalmix("explain", columns=columns)
    assert result.status == 0
    assert all(name in result.output for name in designs.CATALOGUE)


def _check(**changes: object) -> doctor.Check:
    facts = {"problem": "diagonal", "kernel": "chunked", "device": "cpu", "dtype": "float32", "quantity": "mean"}
    return doctor.Check(**{**facts, "error": 1e-7, "budget": 1e-6, "ok": True, "note": "", **changes})


@pytest.mark.parametrize(
    ("checks", "status"),
    [
        ([_check()], 0),
        ([_check(), _check(ok=None, note="no GPU")], 0),
        ([_check(), _check(ok=False, error=1.0, note="[odd] note")], 1),
        ([_check(ok=None, note="no GPU")], 1),
    ],
)
def test_doctor_fails_if_a_kernel_is_wrong(kalmix, monkeypatch: pytest.MonkeyPatch, checks: list, status: int) -> None:
    monkeypatch.setattr(doctor, "check_all", lambda: iter(checks))
    result = kalmix("doctor")
    assert result.status == status
    assert "chunked" in result.output
    assert ("failed" in result.output) == (status == 1)


def test_doctor_prints_each_check_when_it_is_done(kalmix, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    printed = []

    def checks():
        for kernel in ("first", "second"):
            yield _check(kernel=kernel)
            printed.append(capsys.readouterr().out)

    monkeypatch.setattr(doctor, "check_all", checks)
    kalmix("doctor")
    assert "first" in printed[0] and "second" in printed[1]
