"""Reading shards needs NumPy and PyTorch only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kalmix.training.shards import Order, Preparation, Shards, TokenLoader, prepare

from .conftest import texts, write_corpus

BLOCKED = "transformers tokenizers datasets accelerate typer rich pyarrow pandas zstandard safetensors huggingface_hub"
READ = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

blocked = set(sys.argv[2].split())
sys.meta_path.insert(0, Refuse())
from kalmix.training.shards import Order, Shards, TokenLoader
shards = Shards(sys.argv[1])
shards.verify()
print(shards.documents, shards.tokens, shards.read(0, 0, 3).tolist())
for packing in ("best-fit", "stream"):
    loader = TokenLoader(sys.argv[1], Order(seq_len=32, packing=packing), batch_size=2)
    batches = iter(loader)
    next(batches)
    position, second = loader.state_dict(), next(batches)["input_ids"]
    loader.load_state_dict(position)
    assert (next(iter(loader))["input_ids"] == second).all()
    print(int(second.sum()))
assert not blocked & {name.partition(".")[0] for name in sys.modules}
"""


@pytest.mark.slow
def test_shards_are_read_where_only_numpy_and_torch_can_be_imported(tmp_path: Path) -> None:
    """A process without the other packages reads the same tokens, and resumes."""
    corpus = write_corpus(tmp_path / "corpus", texts(80))
    prepare(Preparation(str(corpus), vocab_size=270, held_out=0.1), tmp_path / "shards")
    code = [sys.executable, "-c", READ, str(tmp_path / "shards"), BLOCKED]
    done = subprocess.run(code, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    shards = Shards(tmp_path / "shards")
    expected = [f"{shards.documents} {shards.tokens} {shards.read(0, 0, 3).tolist()}"]
    for packing in ("best-fit", "stream"):
        batches = iter(TokenLoader(tmp_path / "shards", Order(seq_len=32, packing=packing), batch_size=2))
        next(batches)
        expected.append(str(int(next(batches)["input_ids"].sum())))
    assert done.stdout.splitlines() == expected
