"""First commands of a newcomer: versions, lists, help, missing packages, narrow terminals and closed outputs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
from start_time import check_start_time

import kalmix as library
from kalmix import layers
from kalmix.cli import app as app_module
from kalmix.cli import list_names
from kalmix.designs import CATALOGUE
from kalmix.ops import OPS

ROOT = Path(__file__).parents[2]
NAMES = {"layers": [*layers.MIXERS], "designs": [*CATALOGUE], "ops": [*OPS]}
CLI = "from kalmix.cli import main; sys.argv[1:] = {!r}.split(); main()"
# Hides all packages but the standard library, kalmix, and those that torch and some extras of kalmix need; then runs
# each text in a process of its own. Extras are those of pyproject.toml: an editable installation may be older.
RUN_WITH_EXTRAS = """
import importlib.metadata, json, os, re, sys, tomllib, traceback
from importlib.metadata import distribution, packages_distributions
import torch

project, extras, texts = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
given = tomllib.load(open(project, "rb"))["project"]["optional-dependencies"]

def expand(extra):
    for line in given[extra]:
        nested = re.match(r"kalmix\\[(.*)]", line)
        for name in nested[1].split(",") if nested else ():
            yield from expand(name)
        if not nested:
            yield line.split(";")[0].strip()

importlib.metadata.requires = lambda _: [f"{x}; extra == '{extra}'" for extra in given for x in expand(extra)]
wanted, known = ["torch"] + [re.match("[A-Za-z0-9._-]+", x)[0] for extra in extras for x in expand(extra)], set()
while wanted:
    name = wanted.pop().lower().replace("_", "-")
    if name not in known:
        known.add(name)
        try:
            wanted += [re.split("[^A-Za-z0-9._-]", x)[0] for x in distribution(name).requires or () if "extra" not in x]
        except ModuleNotFoundError:  # for another platform
            continue
for name, owners in packages_distributions().items():
    if name != "kalmix" and known.isdisjoint(owner.lower().replace("_", "-") for owner in owners):
        sys.modules[name] = None
for text in texts:
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(write, 2)
        os.close(1)
        os.open(os.devnull, os.O_WRONLY)
        try:
            exec(text)
        except SystemExit as ended:
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            status = int(isinstance(ended.code, str) or bool(ended.code))
        except BaseException:
            traceback.print_exc()
            status = 1
        else:
            status = 0
        sys.stderr.flush()
        os._exit(status)
    os.close(write)
    errors = open(read, errors="replace").read()
    print(json.dumps([os.waitstatus_to_exitcode(os.wait()[1]), errors]), flush=True)
"""


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kalmix.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


def run_with_extras(extras: Sequence[str], texts: Sequence[str], folder: Path) -> list[tuple[int, str]]:
    """Return the exit status and the errors of each text, run in `folder`."""
    arguments = [str(ROOT / "pyproject.toml"), json.dumps(extras), json.dumps(texts)]
    command = [sys.executable, "-c", RUN_WITH_EXTRAS, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert result.returncode == 0, result.stderr
    return [tuple(json.loads(line)) for line in result.stdout.splitlines()]


def test_version(kalmix) -> None:
    result = kalmix("--version")
    assert result.status == 0
    assert re.fullmatch(rf"kalmix {library.__version__} \(torch \S+, Python 3\.\S+\)\n", result.output)


@pytest.mark.parametrize("kind", NAMES)
def test_list_prints_a_line_per_name(kalmix, kind: str) -> None:
    result = kalmix("list", kind)
    assert result.status == 0
    listed = [line.split()[0] for line in result.output.splitlines()]
    assert listed[: len(NAMES[kind])] == NAMES[kind]  # tests of kalmix-bench add layers in this process
    assert all(len(line.split()) > 2 for line in result.output.splitlines())


def test_list_of_an_unknown_kind_names_the_kinds(kalmix) -> None:
    result = kalmix("list", "layer")
    assert result.status == 2 and "expected 'layers', 'designs'" in result.errors


def test_list_finds_names_of_kalmix_bench_by_entry_points(kalmix, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        EntryPoint(f"list-{kind}", f"kalmix_bench.listing:{kind}", "kalmix.commands") for kind in ("tasks", "presets")
    ]
    monkeypatch.setattr(list_names, "entry_points", lambda group: found)
    assert "mad/compression" in kalmix("list", "tasks").output
    assert "mqar --preset paper" in kalmix("list", "presets").output
    monkeypatch.setattr(list_names, "entry_points", lambda group: [])
    result = kalmix("list", "tasks")
    assert result.status == 1 and "pip install ./bench" in result.errors


@pytest.mark.parametrize("name", [*layers.MIXERS, *OPS, "GatedKalmaNet", "FilterConv2d", "rt_afa"])
def test_explain_knows_layers_and_ops(kalmix, name: str) -> None:
    result = kalmix("explain", name)
    assert result.status == 0, result.errors
    assert "arguments" in result.output and "kalmix." in result.output


@pytest.mark.parametrize(
    ("line", "nearest"),
    [("explain kalmanet", "gated-kalmanet"), ("explian", "explain"), ("train --learning-rat 1", "--learning-rate")],
)
def test_unknown_names_list_the_nearest(kalmix, line: str, nearest: str) -> None:
    result = kalmix(*line.split())
    assert result.status == 2 and nearest in result.errors


@pytest.mark.parametrize("line", ["--help", "--version", "list layers", "explain", "explain kla", "train --help"])
def test_narrow_terminals_cut_nothing(kalmix, line: str) -> None:
    result = kalmix(*line.split(), columns=20)
    assert result.status == 0
    assert "\N{HORIZONTAL ELLIPSIS}" not in result.output and "\N{BOX DRAWINGS LIGHT VERTICAL}" not in result.output


@pytest.mark.parametrize("name", [*app_module._COMMANDS, "data prepare", "data check"])
def test_help_shows_every_word_of_every_option(kalmix, name: str) -> None:
    result = kalmix(*name.split(), "--help", columns=1000)  # each option in one line
    command = typer.main.get_command(app_module.app)
    for part in name.split():
        command = command.commands[part]
    assert result.status == 0
    shown = " ".join(result.output.split())
    for option in command.params:
        assert " ".join((option.help or "").split()) in shown, option.name


# Runs command lines in forks, whose standard output is a device that is always full, or a pipe that nobody reads. Forks
# leave the loop, so that they end as any Python process does.
RUN_WITH_OUTPUTS = """
import json, os, runpy, sys
import kalmix.cli

ended, waiting = [], json.loads(sys.argv[1])
while waiting:
    line, output = waiting.pop(0)
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(write, 2)
        if output == "pipe":
            unread, target = os.pipe()
            os.close(unread)
        else:
            target = os.open(output, os.O_WRONLY)
        os.dup2(target, 1)
        sys.argv[1:] = line.split()
        runpy.run_module("kalmix.cli", run_name="__main__", alter_sys=True)
        sys.exit()
    os.close(write)
    errors = open(read).read()
    ended.append([os.waitstatus_to_exitcode(os.wait()[1]), errors])
print(json.dumps(ended))
"""
OUTPUTS = [("--version", "/dev/full"), ("explain", "/dev/full"), ("explain", "pipe")]


@pytest.fixture(scope="module")
def ended() -> dict[tuple[str, str], tuple[int, str]]:
    """Return exit status and errors of each of `OUTPUTS`."""
    command = [sys.executable, "-c", RUN_WITH_OUTPUTS, json.dumps(OUTPUTS)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return {case: tuple(x) for case, x in zip(OUTPUTS, json.loads(result.stdout), strict=True)}


@pytest.mark.parametrize(
    "line", ["--help", *(pytest.param(x, marks=pytest.mark.slow) for x in ("explain", "explain nothing"))]
)
def test_output_to_an_ascii_terminal_is_ascii(line: str) -> None:
    result = run(*line.split(), env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert "Traceback" not in result.stderr and (result.stdout + result.stderr).isascii()
    if line == "--help":
        commands = ("train", "report", "generate", "inspect", "explain", "doctor")
        assert result.returncode == 0 and all(command in result.stdout for command in commands)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("line", ["--version", "explain"])
@pytest.mark.slow
def test_full_standard_output_is_one_error(line: str, ended: dict[tuple[str, str], tuple[int, str]]) -> None:
    status, errors = ended[line, "/dev/full"]
    assert status == 1
    assert re.fullmatch(r"error: .*No space left on device.*\n", errors), errors


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_closed_pipe_ends_a_command_silently(ended: dict[tuple[str, str], tuple[int, str]]) -> None:
    assert ended["explain", "pipe"][1] == ""


@pytest.mark.parametrize(
    "line", ["--help", *(pytest.param(x, marks=pytest.mark.slow) for x in ("explain kla", "train --help"))]
)
@pytest.mark.slow
def test_commands_that_compute_nothing_start_quickly(line: str) -> None:
    check_start_time(line)


MISSING = [
    # extras, code, last line of the errors contains
    ((), CLI.format("--help"), "pip install 'kalmix[cli]'"),
    ((), "from kalmix.models import KalmixForCausalLM", "pip install 'kalmix[hf]'"),
    ((), "import kalmix.models.convert", "pip install 'kalmix[hf]'"),
    ((), "import kalmix.training.run", "pip install 'kalmix[hf]'"),
    ((), "import kalmix.training.data", "pip install 'kalmix[hf]'"),
    ((), "import kalmix.training.shards.trainer_position", "pip install 'kalmix["),
    ((), "import kalmix.analysis.plots", "pip install 'kalmix["),
    ((), "import kalmix.analysis.text_diagnostics", "pip install 'kalmix[hf]'"),
    ((), "import kalmix.models.vision.timm", "pip install 'kalmix[vision]'"),
    ((), "import kalmix.titan", "pip install 'kalmix[titan]'"),
    (("cli",), CLI.format("train"), "pip install 'kalmix[train]'"),
    (("cli",), "from kalmix.training.shards import Order, Shards, TokenLoader", ""),  # reading needs NumPy alone
    (("cli",), CLI.format("data prepare . --output s"), "pip install 'kalmix[hf]'"),
    (("cli", "hf"), CLI.format("data prepare hf:a --output s"), "pip install 'kalmix[data]'"),
    (("cli",), CLI.format("generate run"), "pip install 'kalmix[hf]'"),
    (("cli",), CLI.format("report run"), "pip install 'kalmix[train]'"),
    (("cli",), CLI.format("inspect run --text a"), "pip install 'kalmix[train]'"),
    (("cli", "hf"), CLI.format("train"), "`kalmix train` needs matplotlib, which is not installed"),
    *(
        (("cli",), CLI.format(line), "")
        for line in ("--help", "explain kla", "list layers", "train --help", "data prepare --help")
    ),
]


@pytest.mark.parametrize(
    "extras", [pytest.param((), marks=pytest.mark.slow), pytest.param(("cli",), marks=pytest.mark.slow), ("cli", "hf")]
)
@pytest.mark.slow
def test_missing_packages_are_named_with_their_install_command(extras: tuple[str, ...], tmp_path: Path) -> None:
    cases = [(code, message) for given, code, message in MISSING if given == extras]
    (tmp_path / "text.txt").write_text("words\n")  # `data prepare .` reads it
    results = run_with_extras(extras, [code for code, _ in cases], tmp_path)
    for (code, message), (status, errors) in zip(cases, results, strict=True):
        assert (status != 0) == bool(message), (code, errors)
        assert not message or message in errors.splitlines()[-1], (code, errors)
