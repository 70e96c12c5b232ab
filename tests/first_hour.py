"""Commands of a newcomer's first hour, run from the built wheel in a new environment; writes their output as a table.

    python tests/first_hour.py --output docs/results/first-hour.md     # all actions, in 10 to 15 minutes
    python tests/first_hour.py --only 17,25,26                         # some, after the installations before them

It needs a package index for the dependencies, and 3 GB in the temporary folder. pytest does not collect this file.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SMALL = "--hidden-size 16 --seq-len 32 --batch-size 4 --vocab-size 300 --steps 5"
LAYER = (
    "import torch; from kalmix.layers import KLA; y, state = KLA(64)(torch.randn(2, 100, 64)); print(tuple(y.shape))"
)
FILTER = (
    "import torch, kalmix; x = torch.randn(1, 9, 1, 4); g = torch.full((1, 9, 1), 0.1); "
    "f = kalmix.filter(kalmix.designs.GATED_DELTANET, x, x, x, log_decay=-g, obs_noise=g, reset=g); "
    "print(tuple(f.mean.shape))"
)


HEAD = """# First hour

**Question.** Does the built wheel work in a new environment, and does each mistake get a clear message?

**Setting.** A new virtual environment, in which these {actions} commands run in this order. Packages are installed as
the table shows; index and cache differ between machines, and so do the seconds. Of long outputs the table has the first
lines, of a Python error the last one. {system}; commit {commit}. Load average at the end:
{load:.1f} on {cores} cores; above 1 per core, other programs lengthened the times.

**Conclusion.** {passed} of {actions} commands had the expected status and message.{failures}

**Command.** `python tests/first_hour.py --output docs/results/first-hour.md`

"""


WIDTH = 300  # characters of a line of output in the table
LIMIT = 900  # seconds of one command; `timeout` then ends it with status 124


class Action(NamedTuple):
    """A command, the exit status that it must have, and a text that its output must contain."""

    command: str
    status: int
    text: str = ""
    lines: int = 1  # of the output, shown in the table


ACTIONS = (
    Action("pip install -c constraints.txt torch", 0),
    Action("pip install {wheel}", 0),
    Action('python -c "import kalmix; print(kalmix.__version__)"', 0, "0."),
    Action(f'python -c "{LAYER}"', 0, "(2, 100, 64)"),
    Action(f'python -c "{FILTER}"', 0, "(1, 9, 1, 4)"),
    Action('python -c "from kalmix.models import KalmixForCausalLM"', 1, "pip install 'kalmix[hf]'"),
    Action('python -c "from kalmix.analysis import plots"', 1, "pip install 'kalmix["),
    Action("kalmix --help", 1, "pip install 'kalmix[cli]'"),
    Action("pip install -c constraints.txt 'kalmix[cli]'", 0),
    Action("kalmix --version", 0, "kalmix 0."),
    Action("kalmix --help", 0, "explain", 12),
    Action("kalmix", 2, "Usage"),
    Action("kalmix list layers", 0, "gated-kalmanet", 3),
    Action("kalmix list designs", 0, "gated-deltanet", 3),
    Action("kalmix list ops", 0, "attend", 3),
    Action("kalmix list layer", 2, "'layers', 'designs', 'ops' or 'recipes'"),
    Action("kalmix list tasks", 1, "pip install ./bench"),
    Action("kalmix explain", 0, "longhorn", 4),
    Action("kalmix explain kla", 0, "Kalman", 8),
    Action("kalmix explain GatedKalmaNet", 0, "ridge", 4),
    Action("kalmix explain attend", 0, "HistoryBelief", 4),
    Action("kalmix explain kalmanet", 2, "gated-kalmanet"),
    Action("kalmix explian", 2, "explain", 4),
    Action("kalmix doctor", 0, "checks passed", 3),
    Action("kalmix train", 1, "pip install 'kalmix[train]'"),
    Action("kalmix bench mad", 1, "pip install ./bench"),
    Action("COLUMNS=20 kalmix explain kla", 0, "Kalman", 6),
    Action("PYTHONIOENCODING=ascii kalmix --help", 0, "explain", 6),
    Action("kalmix explain kla | head -n 1", 0, "kla"),
    Action("kalmix list ops > /dev/full", 1, "No space left on device"),
    Action("pip install -c constraints.txt 'kalmix[train]'", 0),
    Action("kalmix train --help", 0, "--learning-rate", 4),
    Action(f"kalmix train --text text.txt --output run {SMALL}", 0, "bits per byte", 12),
    Action("kalmix generate run --prompt 'A filter' --tokens 8 --seed 0", 0, "A filter"),
    Action("kalmix inspect run --text 'A filter predicts.' --output pages", 0, "beliefs.html", 3),
    Action("kalmix report run", 0, "bits per byte", 4),
    Action(f"kalmix train --text text.txt --output run {SMALL}", 2, "run"),
    Action(f"kalmix train --text text.txt --output other {SMALL} --layers klaa", 2, "kla"),
    Action(f"kalmix train --text text.txt --output other {SMALL} --seed -1", 2, "seed"),
    Action(f"kalmix train --text text.txt --output other {SMALL} --warmup 0.6 --cooldown 0.6", 2, "warmup"),
    Action(f"kalmix train --text '' --output other {SMALL}", 2, "empty"),
    Action(f"kalmix train --text nothing.txt --output other {SMALL}", 2, "nothing.txt"),
    Action("kalmix train --learning-rat 1", 2, "--learning-rate", 4),
    Action("kalmix generate nothing", 2, "does not exist"),
    Action("kalmix inspect run", 2, "--file"),
    Action("pip install -c constraints.txt {bench}", 0),
    Action("kalmix list tasks", 0, "mad/compression", 2),
    Action("kalmix list presets", 0, "mqar --preset paper", 2),
    Action("kalmix bench --help", 0, "mad", 8),
    Action("kalmix bench mad --preset tiny", 2, "laptop"),
    Action("kalmix bench mad --layer klaa", 2, "kla"),
)


def run(action: Action, environment: Path, folder: Path, paths: dict[str, str]) -> tuple[int, float, str]:
    """Run an action in `folder` with the environment's commands; return its status, seconds and output."""
    quiet = {"PIP_QUIET": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "COLUMNS": "100", "PYTHONWARNINGS": "ignore"}
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = {x: y for x, y in os.environ.items() if x != "PYTHONPATH"} | quiet | {"PATH": path}
    command = action.command.replace("{wheel}", paths["wheel"]).replace("{bench}", paths["bench"])
    began = time.monotonic()
    process = subprocess.Popen(
        ["timeout", str(LIMIT), "bash", "-c", command],
        cwd=folder,
        env=variables,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = process.communicate()
    return process.returncode, time.monotonic() - began, output.replace(f"{folder}/", "")


def shown(output: str, action: Action) -> str:
    """Return the lines of an output that the table shows: the first ones, or the message of an error."""
    lines = [line.strip(" \u2502\u256d\u256e\u2570\u256f\u2500|") for line in output.splitlines()]
    lines = [line for line in lines if line and "WARNING: Location" not in line]
    if action.status:
        lines = [line for line in lines if action.text in line][-1:]
    elif len(lines) > action.lines:
        lines = [*lines[: action.lines], "..."]
    lines = [line if len(line) <= WIDTH else f"{line[:WIDTH]} ..." for line in lines]
    escaped = (re.sub(r"[|<>`]", lambda x: f"&#{ord(x[0])};", line) for line in lines)
    return "<br>".join(f"<code>{re.sub('  +', '  ', line)}</code>" for line in escaped)


def selected(only: str | None) -> list[tuple[int, Action]]:
    """Return numbered actions: all, or the chosen ones and the installations before the last of them."""
    numbered = list(enumerate(ACTIONS, 1))
    if only is None:
        return numbered
    numbers = {int(number) for number in only.split(",")}
    return [(n, x) for n, x in numbered if n in numbers or (n < max(numbers) and x.command.startswith("pip install"))]


def commit() -> str:
    """Return the short hash of the checked-out commit; it ends in "+" if the working tree has changes."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    return found.stdout.strip() + "+" * bool(changed.stdout)


def main() -> None:
    """Build the wheels, run all actions in order, write the table, and fail if one behaved otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="Markdown file to write. Default: print only.")
    parser.add_argument("--only", help="Numbers of actions to run, separated by commas. Default: all.")
    arguments = parser.parse_args()
    if arguments.output and arguments.only:
        parser.error("--output needs all actions; drop --only")
    chosen = selected(arguments.only)
    folder = Path(tempfile.mkdtemp(prefix="first-hour-"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run([*build, str(ROOT), str(ROOT / "bench")], check=True)
    paths = {"wheel": next(folder.glob("kalmix-*.whl")).name, "bench": next(folder.glob("kalmix_bench-*.whl")).name}
    shutil.copy(ROOT / "constraints.txt", folder)
    (folder / "text.txt").write_text("\n\n".join(f"A filter predicts {n}, then {n + 1}." for n in range(800)))
    venv.create(folder / "env", with_pip=True)
    rows, failures = [], []
    for number, action in chosen:
        status, seconds, text = run(action, folder / "env", folder, paths)
        right = status == action.status and action.text in text
        if not right:
            failures.append(str(number))
        print(f"{number:2} {'ok' if right else 'WRONG'} {status} {seconds:5.1f} s  {action.command}", flush=True)
        if not right:
            print(text, flush=True)
        command = action.command.replace("{wheel}", paths["wheel"]).replace("{bench}", "./bench").replace("|", "&#124;")
        rows.append(f"| {number} | <code>{command}</code> | {status} | {seconds:.1f} | {shown(text, action)} |")
    if arguments.output:
        table = ["| | command | status | seconds | output |", "|---|---|---|---|---|", *rows]
        facts = {"actions": len(ACTIONS), "passed": len(ACTIONS) - len(failures), "commit": commit()}
        facts |= {"system": f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"}
        facts |= {"load": os.getloadavg()[2], "cores": os.cpu_count()}
        facts |= {"failures": f" The others are {', '.join(failures)}." if failures else ""}
        arguments.output.write_text(HEAD.format(**facts) + "\n".join(table) + "\n")
    print(f"{len(chosen) - len(failures)} of {len(chosen)} as expected")
    shutil.rmtree(folder)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
