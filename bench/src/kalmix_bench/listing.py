"""Names that `kalmix list tasks` and `kalmix list presets` print."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict


def tasks() -> Iterator[tuple[str, str]]:
    """Yield each task's name and its default settings."""
    from kalmix_bench.datasets import TASKS

    for name, task in TASKS.items():
        settings = ", ".join(f"{key}={value}" for key, value in asdict(task.baseline).items())
        yield name, f"score {next(iter(task.scores))}; {settings}"


def presets() -> Iterator[tuple[str, str]]:
    """Yield each preset as options of `kalmix bench`, with the tasks or studies that it runs."""
    from kalmix_bench.experiments import collision, sde, solvers
    from kalmix_bench.experiments.language.protocol import PRESETS as LANGUAGE
    from kalmix_bench.experiments.recall.presets import BENCHES
    from kalmix_bench.experiments.vision.experiment import PRESETS

    for bench, studies in BENCHES.items():
        for preset, rows in studies.items():
            yield f"{bench} --preset {preset}", ", ".join(dict.fromkeys(study.task for study in rows))
    for preset in collision.PRESETS:
        yield f"collision --preset {preset}", ", ".join(collision.STUDIES)
    for preset in sde.PRESETS:
        yield f"sde --preset {preset}", "linear stochastic differential equations"
    for preset, studies in solvers.PRESETS.items():
        yield f"solvers --preset {preset}", ", ".join(studies)
    for preset in PRESETS:
        yield f"vision --preset {preset}", "image classification"
    for preset, sizes in LANGUAGE.items():
        yield f"language --preset {preset}", f"language models of {sizes.main.model.parameters:,} parameters"
