"""Invalid input of the command line gives one error line and a status, and changes no file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .conftest import SMALL

MISTAKES = [
    # command line, what it says
    ("train --text {missing}", "does not exist"),
    ("train --text {empty}", "contains no text"),
    ("train --text {binary}", "not UTF-8"),
    ("train --text {windows}", "windows', which is UTF-16; expected a UTF-8 text file"),
    ("train --text {folder}", "no text files"),
    ("train --text {short}", "number of tokens"),
    ("train --text {text} --layers klax", "'klax'"),
    ("train --text {text} --layers kla,,kla", "layers"),
    ('train --text {text} --layers [{{"mixer":"kla","slot":4}}]', "`slot`"),
    ('train --text {text} --layers [{{"mixer":"kla","slots":-4}}]', "slots"),
    ("train --text {text} --tokenizer words", "'bpe' or 'bytes'"),
    ("train --text {text} --vocab-size 10", "at least 257"),
    ("train --text {text} --hidden-size 0", "hidden_size"),
    ("train --text {text} --hidden-size 3 --layers attention", "heads"),
    ("train --text {text} --learning-rate -1", "learning_rate"),
    ("train --text {text} --learning-rate 1e30 --warmup 0", "diverged"),
    ("train --text {text} --minutes 0", "minutes"),
    ("train --text {text} --steps 0", "steps"),
    ("train --text {text} --loss l2", "loss"),
    ("train --text {text} --loss marginal --layers attention", "posterior"),
    ("train --text {text} --output {run}", "holds a run"),
    ("train --resume", "--resume"),
    ("train --resume --output {missing}", "holds no run"),
    ("train --resume --output {run}", "a finished run"),
    ("train --text {text} --seed -1", "seed"),
    ("train --text {text} --weight-decay -1", "weight_decay"),
    ("train --text {text} --warmup 0.6 --cooldown 0.6", "warmup"),
    ("train --text= --steps 1", "`text` is empty"),
    ("train --text {text} --output= --steps 1", "`output` is empty"),
    ("train --resume --output {run} --hidden-size 4", "keeps its settings"),
    ("train --resume --output {scribbled}", "unreadable"),
    ("report {missing}", "holds no run"),
    ("report {folder}", "holds no run"),
    ("report {scribbled}", "unreadable"),
    ("generate {missing}", "does not exist"),
    ("generate {folder}", "folder', which holds no model (config.json is missing); expected a folder that `kalmix"),
    ("generate {truncated}", "damaged"),
    ("generate {weightless}", "no weights"),
    ("generate {garbled}", "damaged"),
    ("generate {untokenized}", "tokenizer.json is missing"),
    ("generate {foreign}", "kalmix"),
    ("generate {run} --temperature -1", "--temperature"),
    ("generate {run} --seed -1", "--seed"),
    ("generate {run} --seed 4294967296", "--seed"),
    ("inspect {run}", "either --text or --file"),
    ("inspect {run} --text a --file {text}", "given twice"),
    ("inspect {run} --text= --file {text}", "given twice"),
    ("inspect {run} --file {missing}", "does not exist"),
    ("inspect {truncated} --text a", "damaged"),
    ("generate {run} --prompt a\udcff", "`prompt` is 'a\\udcff', whose character 1 UTF-8 cannot encode"),
    ("inspect {run} --text a\udcff", "`text` is 'a\\udcff', whose character 1 UTF-8 cannot encode"),
    ("explain kalman", "such as"),
    ("practise", "practise"),
]


@pytest.fixture(scope="session")
def things(tmp_path_factory: pytest.TempPathFactory, text_file: Path, run_folder: Path) -> dict[str, Path]:
    """Return invalid files and folders, and a valid text and run."""
    root = tmp_path_factory.mktemp("things")
    named = {name: root / name for name in ("missing", "empty", "binary", "windows", "folder", "short", "scribbled")}
    named["folder"].mkdir()
    named["empty"].write_text("")
    named["binary"].write_bytes(b"\x80\x81\x82")
    named["windows"].write_text("caf\xe9", encoding="utf-16")
    named["short"].write_text("one two three\n\nfour five six\n\nseven")
    named["scribbled"].mkdir()
    (named["scribbled"] / "recipe.json").write_text('{"hidden_size": ')
    for name in ("truncated", "weightless", "garbled", "untokenized", "foreign"):
        named[name] = root / name
        shutil.copytree(run_folder / "model", named[name])
    weights = (run_folder / "model" / "model.safetensors").read_bytes()
    (named["truncated"] / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (named["weightless"] / "model.safetensors").unlink()
    (named["garbled"] / "config.json").write_text("{")
    (named["untokenized"] / "tokenizer.json").unlink()
    (named["foreign"] / "config.json").write_text('{"model_type": "gpt2"}')
    return {**named, "text": text_file, "run": run_folder}


@pytest.mark.parametrize(("line", "says"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_invalid_input_gives_one_error_line(
    kalmix, things: dict[str, Path], tmp_path: Path, line: str, says: str
) -> None:
    before = {path: path.stat().st_mtime_ns for path in things["run"].rglob("*")}
    arguments = line.format(**things).split()
    if arguments[0] == "train" and "--resume" not in arguments:  # of an option given twice, the last counts
        limit = [] if {"--steps", "--minutes"} & set(arguments) else ["--steps", "2"]
        arguments = ["train", *SMALL, *limit, "--output", tmp_path / "run", *arguments[1:]]
    result = kalmix(*arguments)
    assert result.status in (1, 2)
    assert says in result.errors
    assert "Traceback" not in result.output + result.errors
    assert {path: path.stat().st_mtime_ns for path in things["run"].rglob("*")} == before
