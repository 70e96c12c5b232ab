"""Examples run with small settings and print the expected results."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_your_own_design(tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Line {n}: {n} and {n} make {2 * n}, as anyone can see." for n in range(600)))
    monkeypatch.setattr(sys, "argv", ["your_own_design.py", "--steps", "2", "--text", str(text)])
    runpy.run_path(str(EXAMPLES / "your_own_design.py"), run_name="__main__")
    said = capsys.readouterr().out
    differs = float(re.search(r"at most (\S+)", said)[1])
    assert 0 < differs < 1e-5  # float32 against float64
    results = re.findall(r"(gated-deltanet|fading-memory) .* ([0-9.]+) bits per byte", said)
    assert [name for name, _ in results] == ["gated-deltanet", "fading-memory"]
    assert all(0 < float(bits) < 8 for _, bits in results)


@pytest.mark.slow
def test_denoise_digits(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["denoise_digits.py", "--epochs", "4"])
    runpy.run_path(str(EXAMPLES / "denoise_digits.py"), run_name="__main__")
    before, alone, a_filter, two, together = (float(x) for x in re.findall(r": ([0-9.]+) ", capsys.readouterr().out))
    assert together < alone < before / 2  # trained little, and already better than all that is linear
    assert max(a_filter, two) < before
