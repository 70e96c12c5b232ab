"""Processes of a run notice that another one has ended."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, time
import torch.distributed as dist
from kalmix.training.peers import watched_peers

rank, store, ends = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "ends"
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
with watched_peers("kalmix train --resume --output runs/a"):
    if ends and rank == 1:
        os._exit(3)
    time.sleep(60 if ends else 2 * rank)
print("left")
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_a_process_ends_with_one_sentence_if_another_has_ended(tmp_path: Path, ends: bool) -> None:
    command = [sys.executable, "-c", PROGRAM]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    arguments = [[str(rank), str(tmp_path / "store"), "ends" if ends else "stays"] for rank in range(2)]
    processes = [subprocess.Popen([*command, *given], env=environment, **options) for given in arguments]
    try:
        processes[1].wait(120)
        begin = time.monotonic()
        output, errors = processes[0].communicate(timeout=30)
        if ends:
            assert processes[0].returncode == 1 and time.monotonic() - begin < 20
            last = errors.splitlines()[-1]
            assert last.startswith("error: another process of this run has ended, so training stops; ")
            assert "`kalmix train --resume --output runs/a`" in last
        else:
            assert [x.returncode for x in processes] == [0, 0] and output.strip() == "left", errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
