"""`kalmix eval`: scores of a model on the tasks of papers, by lm-eval."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kalmix._extras import require_extra
from kalmix.cli.options import Device
from kalmix.errors import ArgumentError
from kalmix.files import disk_errors, lock_folder, write_text
from kalmix.validation import check_positive_int


def run(
    run: Annotated[
        Path, typer.Argument(help="Output folder of `kalmix pretrain`, RUN/checkpoint-N, or a model folder.")
    ],
    suite: Annotated[
        str,
        typer.Option(
            help="kla: KLA's eight zero-shot tasks; gka: Gated KalmaNet's ten; long: RULER, and perplexity of --text."
        ),
    ] = "kla",
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of the suite to run, separated by commas. Default: all.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Number of rows of each task. Default: all.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward pass.")] = 8,
    device: Device = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Run under bfloat16 autocast.")] = False,
    predict: Annotated[
        str | None,
        typer.Option(
            help="mean: of the last layer's read-out; marginal: probabilities averaged over samples of it (KLA+). "
            "Default: the model's setting."
        ),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Lengths in tokens of the suite long, separated by commas. Default: 4K to 128K.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Token shards or text files; the suite long computes their perplexity.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with copies of datasets; nothing is downloaded. Default: the hub.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Output folder; finished tasks in it are skipped. Default: RUN/evaluation, or "
            "RUN/evaluation/checkpoint-N."
        ),
    ] = None,
) -> None:
    """Evaluate a model by lm-eval, and print its scores beside the figures of papers.

    Start it with `torchrun --nproc-per-node N -m kalmix.cli eval ...` on N GPUs. Repeat the command to continue after
    an interruption; finished tasks are kept.
    """
    require_extra("`kalmix eval`", "eval")
    from kalmix.evaluation.ranks import start_ranks
    from kalmix.evaluation.suites import units_of

    ranks = start_ranks(device)
    with ranks.main_first():
        chosen = [name.strip() for name in (tasks or "").split(",") if name.strip()]
        sizes = _integers("lengths", lengths)
        units_of(suite, chosen, sizes, None if text is None else sizes)
        check_positive_int("batch_size", batch_size)
        if limit is not None:
            check_positive_int("limit", limit)
        if data is not None and not data.is_dir():
            raise ArgumentError("data", problem=f"{str(data)!r} does not exist", expected="a folder with datasets")
    from kalmix.cli.load_run import check_vocabulary, evaluation_folder, load_model, move
    from kalmix.cli.stages import stages
    from kalmix.evaluation.evaluate import Options, evaluate, settings_of
    from kalmix.evaluation.judge import begin_texts
    from kalmix.evaluation.perplexity import read_text
    from kalmix.evaluation.results import RESULTS_FILE, Results
    from kalmix.evaluation.table import score_tables
    from kalmix.training.checkpoints import is_checkpoint, run_of
    from kalmix.training.model_folder import find_model
    from kalmix.training.shards.tokenizer import load_tokenizer

    folder = evaluation_folder(run) if output is None else output
    main = ranks.rank == 0
    stream = sys.stdout  # this stream, also while lm-eval's output is suppressed
    console = Console(file=stream, highlight=False, quiet=not main)
    with stages(console) as progress:
        progress("loading the model", 0)
        with ranks.main_first():
            model = load_model(run, predict)
            found = find_model(run)
            tokenizer = load_tokenizer(str(found.tokenizer))
            check_vocabulary(tokenizer, model, run)
            where = None if data is None else data.resolve()
            passages = None
            if text is not None:
                begin_texts(tokenizer, model)
                passages = read_text(text, tokenizer, found, sizes, limit)
            options = Options(limit, batch_size, bf16, where, passages, ranks)
            units = units_of(suite, chosen, sizes, None if passages is None else passages.lengths)
            move(model, device)
        with lock_folder(folder) if main else nullcontext(), disk_errors(folder):
            with ranks.main_first():
                results = Results(folder, settings_of(model, found, options))
            evaluate(model, tokenizer, units, results, options, progress)
            if not main:
                return
            name = f"{run_of(run).resolve().name}/{run.name}" if is_checkpoint(run) else run.resolve().name
            tables = score_tables(suite, name, results.tasks)
            write_text(folder / f"{suite}.md", "\n".join(table.markdown() for table in tables))
    for table in tables:
        console.print(table.text(), soft_wrap=True, markup=False)
    for path in (folder / RESULTS_FILE, folder / f"{suite}.md"):
        console.print(f"  {path}", soft_wrap=True, markup=False)


def _integers(name: str, text: str | None) -> list[int]:
    """Return the integers in a text, which are separated by commas."""
    try:
        return [int(x) for x in (text or "").split(",") if x.strip()]
    except ValueError:
        raise ArgumentError(name, got=repr(text), expected="integers separated by commas") from None
