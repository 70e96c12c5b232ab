"""Experiment that pretrains language models of every layer at equal cost: `kalmix bench language`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console

from kalmix.errors import ArgumentError
from kalmix.training.shards import Manifest
from kalmix.validation import check_choice
from kalmix_bench.experiments.language import corpus
from kalmix_bench.experiments.language.architectures import layer_name, make_blocks
from kalmix_bench.experiments.language.plan import GPU, MFU, plan_table
from kalmix_bench.experiments.language.protocol import (
    MAIN,
    PRESETS,
    STAGES,
    TUNE,
    TUNE_HINT,
    LanguageCell,
    Preset,
    best_rates,
    main_cells,
    tuned_rates,
    tuning_cells,
)
from kalmix_bench.runner import limited, options, scheduler
from kalmix_bench.runner import report as bench_report
from kalmix_bench.runner.cells import Results, Row
from kalmix_bench.runner.cells import digest as cell_digest
from kalmix_bench.runner.experiment import Experiment, ProgressFn
from kalmix_bench.runner.limited import LimitedSweep
from kalmix_bench.runner.markdown_console import RecordingConsole
from kalmix_bench.runner.paper_claims import Finding
from kalmix_bench.runner.progress import progress

ALL_STAGES = "all"
EQUAL_FIELDS = ("stage", "size", "optimizer")  # of rows whose learning rates are compared
LAYER = (
    """Layer, such as kla or kla+attention, or with options: 'kla:{"slots": 8}'. Repeatable. Default: the preset's."""
)


class Language(Experiment[LanguageCell]):
    """Experiment on language models of every layer, at equal numbers of parameters and tokens.

    Args:
        shards: folder of token shards; needed to run cells.
        checkpoints: folder of checkpoints. Default: beside the results.
        commit: commit of kalmix, where git does not know it.
        jobs_per_device: number of cells that run on a device at once; stored in rows if it is not 1.
    """

    name = "language"
    keys = frozenset(("language", "corpus"))
    in_all = False

    def __init__(
        self,
        shards: Path | None = None,
        checkpoints: Path | None = None,
        commit: str | None = None,
        *,
        jobs_per_device: int = 1,
    ) -> None:
        super().__init__(commit)
        self.shards: Path | None = shards
        self.checkpoints: Path | None = checkpoints
        self.jobs_per_device: int = jobs_per_device

    def commands(self) -> dict[str, Callable[..., None]]:
        return {"language": _command}

    def run(
        self, cells: tuple[LanguageCell, ...], results: Results, device: torch.device, on_progress: ProgressFn
    ) -> list[Row]:
        """Train a model, or continue it from its checkpoint, test it, and return its row.

        Raises:
            CellStopped: `on_progress` returned true; a checkpoint was stored.
            ArgumentError: the shards are missing or do not fit.
        """
        from kalmix_bench.experiments.language.run import run_cell

        (cell,) = cells
        assert self.shards is not None
        row = run_cell(cell, self.shards, self._folder(cell, results), on_progress)
        return [row if self.jobs_per_device == 1 else {**row, "jobs_per_device": self.jobs_per_device}]

    def clear(self, cell: LanguageCell, results: Results) -> None:
        shutil.rmtree(self._folder(cell, results), ignore_errors=True)

    def report(self, rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
        from kalmix_bench.experiments.language import report

        return report.write_report(rows, output, console)

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        from kalmix_bench.experiments.language import report

        return report.findings(rows)

    def _folder(self, cell: LanguageCell, results: Results) -> Path:
        return (self.checkpoints or results.path.parent / "checkpoints") / cell_digest(cell)


class _Choice(NamedTuple):
    """Choices of a command: preset, layers, learning rates to compare, seeds, and whether each stage runs.

    `tuned_on` is the corpus of the rows of "tune" from which "main" takes its rates, as `tuned_rates` takes it; `None`
    for the corpus of "main".
    """

    preset: Preset
    layers: list[str]
    rates: list[float]
    seeds: int
    stages: tuple[str, ...]
    tuned_on: str | None = None

    def cells(self, stage: str, digest: str, rows: Sequence[Row]) -> list[LanguageCell]:
        """Return the cells of a stage.

        Args:
            stage: "tune" or "main".
            digest: digest of the corpus.
            rows: rows of the stage "tune", from which "main" takes its learning rates unless there is one rate only.
        """
        if stage == TUNE:
            seeds = self.seeds if self.stages == (TUNE,) else 1
            return tuning_cells(self.preset, self.layers, self.rates, digest, seeds)
        if len(self.rates) == 1:
            chosen = dict.fromkeys(self.layers, self.rates[0])
        else:
            cell = tuning_cells(self.preset, self.layers[:1], self.rates[:1], digest)[0].to_dict()
            same = [row for row in rows if all(row[name] == cell[name] for name in EQUAL_FIELDS)]
            if self.tuned_on is None:
                chosen = best_rates((row for row in same if row["corpus"] == digest), self.layers)
            else:
                chosen = tuned_rates(same, self.layers, self.tuned_on)
        return main_cells(self.preset, self.layers, chosen, self.seeds, digest)


def _command(
    preset: Annotated[
        str,
        typer.Option(
            help="laptop: minutes on two cores. For GPUs: short, 10M parameters; medium and paper, 50M, with 30M and "
            "300M tokens."
        ),
    ] = "laptop",
    shards: Annotated[
        Path | None, typer.Option(help="Folder of token shards. Default of preset laptop: Python's documentation.")
    ] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(help=LAYER),
    ] = None,
    stage: Annotated[
        str, typer.Option(help="tune: learning rates at a smaller size. main: the table, with the best ones. all.")
    ] = ALL_STAGES,
    rates: Annotated[
        str | None,
        typer.Option(help="Learning rates to compare. A single one skips the stage tune. Default: the preset's."),
    ] = None,
    tuned_on: Annotated[
        str | None,
        typer.Option(
            help="Corpus whose rows of tune give main its rates: its name in the rows, or the beginning of it; or any, "
            "if all corpora choose the same rates. Skips the stage tune. Default: the corpus of main."
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="Number of seeds, from 0, of the stage main, or of the stage tune if it runs alone.")
    ] = 1,
    tokens: Annotated[
        float | None, typer.Option(help="Training tokens of a cell of the stage main. Default: the preset's.")
    ] = None,
    zero_init: Annotated[
        bool | None,
        typer.Option(help="Whether output projections of layers and MLPs begin with zeros. Default: the preset's."),
    ] = None,
    embedding_norm: Annotated[
        bool | None, typer.Option(help="Whether an RMS norm follows the embedding. Default: the preset's.")
    ] = None,
    warmup: Annotated[
        float | None,
        typer.Option(help="Fraction of the steps in which the learning rate rises. Default: the preset's."),
    ] = None,
    devices: limited.Devices = None,
    jobs_per_device: limited.JobsPerDevice = 1,
    deadline: limited.Deadline = None,
    output: Annotated[Path, typer.Option(help="Output folder; finished cells in it are skipped.")] = Path(
        "runs/language"
    ),
    checkpoints: Annotated[
        Path | None, typer.Option(help="Folder of checkpoints. Default: checkpoints in the output folder.")
    ] = None,
    commit: options.Commit = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    gpu: Annotated[str, typer.Option(help="Name of the GPU of --dry-run.")] = GPU,
    mfu: Annotated[float, typer.Option(help="Assumed model FLOPs utilization of --dry-run.")] = MFU,
) -> None:
    """Pretrain language models of every layer at equal parameters and tokens, each with its best learning rate.

    Exit status: 0 if all cells are finished, 3 if the deadline came first, 1 if a cell failed.
    """
    chosen = _preset(preset, tokens, zero_init, embedding_norm, warmup)
    choice = _choose(chosen, layer, stage, rates, seeds, tuned_on)
    console, results = Console(highlight=False), Results(output / "results.jsonl")
    if dry_run:
        _print_plan(choice, shards, results, console, gpu, options.positive("mfu", mfu))
        return
    if shards is None:
        if preset != "laptop":
            raise ArgumentError("shards", problem="is missing", expected="a folder of `kalmix data prepare`")
        shards = corpus.laptop_shards(output / "corpus", choice.preset.main.model.vocab_size)
    manifest = Manifest.load(shards)
    digest = corpus.digest(manifest)
    experiment = Language(shards.resolve(), checkpoints, commit, jobs_per_device=jobs_per_device)
    sweep = LimitedSweep.of(devices, jobs_per_device, deadline)
    cells: list[LanguageCell] = []
    rows: dict[LanguageCell, Row] = {}
    missing: list[str] = []
    for name in choice.stages:
        cells = choice.cells(name, digest, experiment.select(results.read()))
        missing = [x for x in choice.layers if not any(cell.layer == x for cell in cells)]
        assert sweep.workers.failures is not None
        for without in missing:
            sweep.workers.failures[f"{name}  {without}"] = f"no learning rate, as none has a finite loss. {TUNE_HINT}"
        with progress(console) as progress_factory:
            rows = scheduler.run(
                experiment,
                cells,
                results,
                sweep.device,
                progress_factory=progress_factory,
                worker_config=sweep.workers,
            )
        sweep.report_failures()
        if len(rows) < len(cells):
            break
    if rows:
        shown = experiment.select(results.read())
        for path in (results.path, *bench_report.write(shown, output, console, [experiment])):
            console.print(f"  {path}", soft_wrap=True)
    sweep.exit_unless_finished(len(rows), len(cells) + choice.seeds * len(missing), console)


def _preset(
    name: str, tokens: float | None, zero_init: bool | None, embedding_norm: bool | None, warmup: float | None
) -> Preset:
    """Return a preset, with this number of training tokens in the stage "main", and these models and warmup in both."""
    found = options.preset(name, PRESETS)
    if zero_init is not None:
        found = found.with_zero_init(zero_init)
    if embedding_norm is not None:
        found = found.with_embedding_norm(embedding_norm)
    if warmup is not None:
        found = found.with_warmup(options.fraction("warmup", warmup))
    if tokens is None:
        return found
    return found._replace(main=replace(found.main, tokens=int(options.positive("tokens", tokens))))


def _choose(
    chosen: Preset, layer: list[str] | None, stage: str, rates: str | None, seeds: int, tuned_on: str | None
) -> _Choice:
    """Return the checked choices of a command."""
    check_choice("stage", stage, (*STAGES, ALL_STAGES))
    try:
        values = list(chosen.rates) if rates is None else [float(text) for text in rates.split(",")]
    except ValueError:
        raise ArgumentError("rates", got=repr(rates), expected="numbers such as 1e-3,2e-3,4e-3") from None
    for value in values:
        options.positive("rates", value)
    for name in layer or ():
        make_blocks(name, chosen.main.model)
    layers = list(dict.fromkeys(map(layer_name, layer or chosen.layers)))
    stages = STAGES if stage == ALL_STAGES else (stage,)
    if tuned_on is not None and (len(values) == 1 or stage == TUNE):
        given = "`--stage tune`" if stage == TUNE else "a single rate"
        raise ArgumentError("tuned_on", problem=f"is given with {given}", expected="one of the two")
    if stage == ALL_STAGES and (len(values) == 1 or tuned_on is not None):
        stages = (MAIN,)
    return _Choice(chosen, layers, values, options.count("seeds", seeds), stages, tuned_on)


def _print_plan(choice: _Choice, shards: Path | None, results: Results, console: Console, gpu: str, mfu: float) -> None:
    """Print the plan of all stages; the main stage with the middle rate, on which its time does not depend."""
    tokens = None if shards is None else Manifest.load(shards).count("train", "tokens")
    middle = dict.fromkeys(choice.layers, choice.rates[len(choice.rates) // 2])
    cells = []
    for name in choice.stages:
        if name == TUNE:
            cells += choice.cells(TUNE, "", [])
        else:
            cells += main_cells(choice.preset, choice.layers, middle, choice.seeds, "")
    rows = Language().select(results.read())
    RecordingConsole(console).print(plan_table(cells, tokens, gpu, mfu, rows))
