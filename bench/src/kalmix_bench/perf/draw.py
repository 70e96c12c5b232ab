"""Draw time and memory against length from the results of `python -m kalmix_bench.perf.ops --curves`."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from kalmix.analysis.plots.style import picture

NAMES = {
    "triton": "kalmix, Triton",
    "chunked": "kalmix, chunked",
    "reference": "kalmix, reference",
    "kla (CUDA)": "KLA authors, CUDA",
    "kla (Triton)": "KLA authors, Triton",
    "kla (recurrence)": "KLA authors, recurrence",
    "kla (PyTorch)": "KLA authors, PyTorch's associative scan",
}


def main() -> None:
    file = Path(sys.argv[1])
    results = json.loads(file.read_text())
    curves: dict[str, list[dict]] = defaultdict(list)
    for row in results["rows"]:
        curves[row["kernel"]].append(row)
    panels = {"forward_ms": ("Forward", "time (ms)"), "both_ms": ("Forward + backward", "time (ms)")}
    panels |= {"both_peak": ("Peak memory", "memory (MiB)")}
    batch, _, *widths = results["rows"][0]["shape"]
    with picture(file.with_suffix(".png"), (11, 3.4), columns=3) as (drawing, axes):
        for axis, (quantity, (title, unit)) in zip(axes, panels.items(), strict=True):
            for name, rows in curves.items():
                scale = 2**20 if quantity.endswith("peak") else 1
                points = [(row["shape"][1], row[quantity] / scale) for row in rows if row[quantity] > 0]
                axis.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=NAMES.get(name, name))
            axis.set(xlabel="tokens", ylabel=unit, title=title)
        drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
        drawing.suptitle(f"{results['hardware']}: batch {batch}, {' x '.join(map(str, widths))}")
    print(f"wrote {file.with_suffix('.png')}")


if __name__ == "__main__":
    main()
