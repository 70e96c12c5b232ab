"""Running the numerical studies of solvers: what each measures at which size, and one line a finished one."""

from kalmix_bench.experiments.solvers.protocol import PRESETS, STUDIES, Cell, Preset
from kalmix_bench.experiments.solvers.results import run

__all__ = ["PRESETS", "STUDIES", "Cell", "Preset", "run"]
