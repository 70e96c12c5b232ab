"""Prepare and read synthetic tokens, and record rates and memory.

    python -m kalmix_bench.perf.token_shards --tokens 1e9 --workers 8 --output token-shards.json

Writes JSON lines of random words to a temporary folder, prepares shards with a byte-level BPE, and reads all of them
once, packed and as a stream; with several workers, both readings run side by side, in a process each. Prints tokens per
second of each step, and the largest memory in the first tenth, the first half and all of the work: the private memory
of this process and its workers, without pages of files, which the system can drop at any time. `--output` is written
after every step.
Needs Linux, 6.5 bytes of disk a token for the text and 2 for the shards.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from kalmix.files import write_text
from kalmix.training.shards import Manifest, Order, Preparation, TokenLoader, prepare
from kalmix.training.shards.preparation import Progress

BYTES_PER_TOKEN = 6.4  # of the text that is written; the measured value is printed
FILE_BYTES = 1 << 28
WORDS = 50_000
SEQ_LEN, BATCH_SIZE = 2048, 16
PACKINGS = ("best-fit", "stream")


def write_text_files(folder: Path, tokens: int, seed: int = 0, workers: int = 1) -> int:
    """Write JSON lines of about `tokens` tokens to files of 256 MiB, and return their bytes.

    Words have 2 to 12 letters and frequencies as 1 / rank; documents have 20 to 5,000 words, most of them few.

    Args:
        folder: folder of the files.
        tokens: number of tokens.
        seed: seed of the words, and with the number of a file of its documents.
        workers: number of processes.
    """
    target = int(tokens * BYTES_PER_TOKEN)
    sizes = [min(FILE_BYTES, target - start) for start in range(0, target, FILE_BYTES)]
    paths = [folder / f"{number:05}.jsonl" for number in range(len(sizes))]
    seeds = [(seed, number) for number in range(len(sizes))]
    if workers == 1:
        return sum(map(_write_file, paths, sizes, seeds))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return sum(pool.map(_write_file, paths, sizes, seeds))


def _write_file(path: Path, size: int, seed: tuple[int, int]) -> int:
    """Write a file of at least `size` bytes; return its bytes."""
    draw = np.random.default_rng(seed[0])
    letters = draw.integers(97, 123, (WORDS, 12), dtype=np.uint8)
    words = np.array(
        [bytes(row[:size]).decode() for row, size in zip(letters, draw.integers(2, 13, WORDS), strict=True)]
    )
    share = 1 / np.arange(1, WORDS + 1)
    edges = np.cumsum(share / share.sum())
    draw = np.random.default_rng(seed)
    with path.open("wb") as file:
        while file.tell() < size:
            lengths = np.minimum(draw.lognormal(5.5, 1.0, 256).astype(int) + 20, 5000)
            drawn = words[np.minimum(np.searchsorted(edges, draw.random(lengths.sum())), WORDS - 1)]
            for text in np.split(drawn, np.cumsum(lengths)[:-1]):
                file.write(json.dumps({"text": " ".join(text)}).encode() + b"\n")
        return file.tell()


class Memory:
    """Private memory of this process and its children, sampled twice a second in a thread.

    Attributes:
        samples: pairs of the work that was done, 0 to 1, and MiB.
        done: fraction of the current work that is done; set by the caller.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []
        self.done = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            self.samples.append((self.done, private_memory()))

    def summary(self) -> dict[str, float]:
        """Return the largest memory, in MiB, in the first tenth, the first half, and all of the work."""
        parts = {"first tenth": 0.1, "first half": 0.5, "all": 1.0}
        return {
            name: round(max((x for done, x in self.samples if done <= part), default=0.0))
            for name, part in parts.items()
        }


def private_memory() -> float:
    """Return the private memory of this process and its descendants, in MiB."""
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError, ValueError, IndexError):  # a process that has ended
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    family = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    total = 0
    for process in family:
        with suppress(OSError):
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
    return total / 1024


def measured(work: Callable[[Memory], int]) -> dict[str, Any]:
    """Run one step of the work; return its seconds, tokens, tokens per second and memory in MiB.

    CPU seconds are those of this process and of children that have ended. They count where a machine is shared.
    """
    with Memory() as memory:
        begin, cpu = time.perf_counter(), sum(os.times()[:4])
        tokens = work(memory)
        seconds, cpu = time.perf_counter() - begin, sum(os.times()[:4]) - cpu
    rates = {"tokens/s": round(tokens / seconds), "tokens/CPU s": round(tokens / max(cpu, 0.01))}
    return {"seconds": round(seconds, 1), "tokens": tokens, **rates, "MiB": memory.summary()}


def read_all(folder: Path, manifest: Manifest, packing: Any, memory: Memory) -> int:
    """Read one epoch of batches, and return the number of tokens with a target."""
    order = Order(SEQ_LEN, packing, epochs=1)
    total, tokens, size = manifest.count("train", "tokens"), 0, 0
    for batch in TokenLoader(folder, order, batch_size=BATCH_SIZE):
        tokens += int((batch["shift_labels"] >= 0).sum())
        size += batch["input_ids"].numel()
        memory.done = min(1.0, size / total)
    print(f"  {packing}: {1 - tokens / size:.2%} of the tokens of a batch have no target", flush=True)
    return tokens


def _note(memory: Memory, progress: Progress) -> None:
    memory.done = progress.fraction


def _measure_reading(folder: Path, packing: str) -> dict[str, Any]:
    """Measure the reading of all shards in a folder."""
    return measured(lambda memory: read_all(folder, Manifest.load(folder), packing, memory))


def run(
    tokens: int, workers: int, folder: Path, store: Callable[[dict[str, Any]], None] = lambda results: None
) -> dict[str, Any]:
    """Write, prepare and read; return all measurements.

    Args:
        tokens: number of tokens.
        workers: number of processes.
        folder: folder for text and shards.
        store: called with the measurements so far after every step.
    """
    results: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "workers": workers}
    (folder / "text").mkdir(parents=True)
    begin = time.perf_counter()
    size = write_text_files(folder / "text", tokens, workers=workers)
    print(f"{size / 1e9:.2f} GB of text in {time.perf_counter() - begin:.1f} s", flush=True)

    def keep(name: str, row: Any) -> None:
        results[name] = row
        store(results)
        print(f"  {name}: {row}", flush=True)

    def train(memory: Memory) -> int:
        first = sorted((folder / "text").iterdir())[0]
        manifest = prepare(Preparation(str(first), held_out=0), folder / "first", workers=workers)
        return manifest.count("train", "tokens")

    def tokenise(memory: Memory) -> int:
        settings = Preparation(str(folder / "text"), str(folder / "first" / "tokenizer"))
        progress = partial(_note, memory)
        manifest = prepare(settings, folder / "shards", workers=workers, progress=progress)
        return sum(manifest.count(split, "tokens") for split in ("train", "held_out"))

    keep("train a tokenizer on the first file, and prepare it", measured(train))
    keep("prepare", measured(tokenise))
    shutil.rmtree(folder / "text")
    manifest = Manifest.load(folder / "shards")
    keep("bytes a token", round(manifest.count("train", "bytes") / manifest.count("train", "tokens"), 2))
    if workers == 1:
        for packing in PACKINGS:
            keep(packing, _measure_reading(folder / "shards", packing))
        return results
    with ProcessPoolExecutor(len(PACKINGS), get_context("spawn")) as pool:
        readings = {pool.submit(_measure_reading, folder / "shards", packing): packing for packing in PACKINGS}
        for reading in as_completed(readings):
            keep(readings[reading], reading.result())
    return results


def main() -> None:
    """Run the measurement from the command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=float, default=1e9)
    options.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options.add_argument("--output", type=Path, help="JSON file for the measurements")
    given = options.parse_args()

    def store(results: dict[str, Any]) -> None:
        if given.output is not None:
            write_text(given.output, json.dumps(results, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        results = run(int(given.tokens), given.workers, Path(folder), store)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
