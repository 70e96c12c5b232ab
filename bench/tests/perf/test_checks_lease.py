"""Test of the script that checks kernels and times decoding on a lent machine: it runs here without models or GPUs."""

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BASH = shutil.which("bash")
# Stand-ins: Python lists the first core twice, and writes its arguments and its GPU instead of running anything else.
PYTHON = """#!/bin/sh
case "$*" in
  *sched_getaffinity*) echo 0,0 ;;
  *) echo "called $* on $CUDA_VISIBLE_DEVICES" ;;
esac
"""
GPUS = "#!/bin/sh\nprintf 'GPU 0\\nGPU 1\\n'\n"


@pytest.mark.skipif(not (BASH and shutil.which("taskset")), reason="needs bash and taskset")
@pytest.mark.slow
def test_checks_and_rows_have_a_gpu_each(tmp_path: Path) -> None:
    for name, text in (("python", PYTHON), ("nvidia-smi", GPUS)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    out, command = tmp_path / "out", [str(BASH), "bench/checks_lease.sh"]
    (out / "decode").mkdir(parents=True)
    (out / "decode" / "results.jsonl").write_text('{"commit": null, "ms": 1.0}\n{"commit": "-dirty"}\n')
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    given = ["--commit", "abc", "--out", str(out), "--python", str(tmp_path / "python"), "--wheels", "-", "--site", "-"]
    result = subprocess.run(
        [*command, *given], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    for line in ("laws: exit status 0", "ops: exit status 0", "comparison: exit status 0", "] end"):
        assert line in result.stdout
    logs = {path.stem: path.read_text() for path in out.glob("*.log")}
    assert "tests/laws/test_laws.py -k delta or additive on 0" in logs["laws"]
    assert "tests/layers/fused" in logs["ops"] and logs["ops"].endswith("on 0\n")
    assert all(f"--rows {layer}" in logs["decode"] for layer in ("attention", "gated-kalmanet", "llama"))
    assert all(line.endswith("on 1") for line in logs["decode"].splitlines())
    assert "kalmix_bench.perf.scaling.check" in logs["check"] and "--nproc-per-node 2" in logs["check"]
    with tarfile.open(out / "all.tgz") as archive:
        rows = archive.extractfile("./decode/results.jsonl")
        assert rows is not None and rows.read() == b'{"commit": "abc", "ms": 1.0}\n{"commit": "abc"}\n'
    assert not (out / "decode").exists()


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize(("given", "message"), [([], "--out is missing"), (["--gpu", "1"], "--gpu is not an option")])
def test_wrong_options_are_refused(given: list[str], message: str) -> None:
    result = subprocess.run(
        [str(BASH), "bench/checks_lease.sh", *given], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2 and message in result.stderr
