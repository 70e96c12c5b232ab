"""Fixtures: a tiny run, and copies of the suites' datasets in the format of the hub, with rows of random words."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.training.corpus import train_tokenizer
from kalmix.training.data import end_of_text_id, wrap_tokenizer

if find_spec("lm_eval") is None:  # the extra `eval`
    collect_ignore_glob = ["test_*.py"]

ROWS = 6
WORDS = [f"{a}{b}" for a in ("fil", "be", "ev", "pro", "no") for b in ("ter", "lief", "idence", "cess", "thing")]
Words = Callable[[int], str]

ROW_MAKERS: dict[tuple[str, str, str], Callable[[Words, int], dict[str, Any]]] = {
    ("EleutherAI/lambada_openai", "default", "test"): lambda words, n: {"text": words(12)},
    ("Rowan/hellaswag", "default", "validation"): lambda words, n: {
        **{"ind": n, "activity_label": words(1), "ctx_a": words(6), "ctx_b": words(2), "ctx": words(8)},
        **{"endings": [f"{words(3)} [title] {words(1)}" for _ in range(4)], "label": str(n % 4)},
    },
    ("baber/piqa", "default", "validation"): lambda words, n: {
        **{"goal": words(5), "sol1": words(4), "sol2": words(4), "label": n % 2}
    },
    ("allenai/ai2_arc", "ARC-Easy", "test"): lambda words, n: _arc(words, n),
    ("allenai/ai2_arc", "ARC-Challenge", "test"): lambda words, n: _arc(words, n),
    ("allenai/winogrande", "winogrande_xl", "validation"): lambda words, n: {
        **{"sentence": f"{words(4)} _ {words(3)}", "option1": words(1), "option2": words(1), "answer": str(1 + n % 2)}
    },
    ("allenai/openbookqa", "main", "test"): lambda words, n: {
        **{"id": str(n), "question_stem": words(6), "answerKey": "ABCD"[n % 4]},
        "choices": {"text": [words(3) for _ in range(4)], "label": list("ABCD")},
    },
    ("aps/super_glue", "boolq", "validation"): lambda words, n: {
        **{"question": words(4), "passage": words(9), "idx": n, "label": n % 2}
    },
    ("aps/super_glue", "copa", "validation"): lambda words, n: {
        **{"premise": f"{words(4).capitalize()}.", "choice1": words(3), "choice2": words(3), "idx": n, "label": n % 2},
        "question": ("cause", "effect")[n % 2],
    },
    ("allenai/sciq", "default", "test"): lambda words, n: {
        **{"question": words(5), "support": words(8), "correct_answer": words(1)},
        **{f"distractor{i}": words(1) for i in (1, 2, 3)},
    },
    ("hazyresearch/based-fda", "default", "validation"): lambda words, n: {
        **{"doc_id": str(n), "key": words(1), "text": words(12), "value": words(1)}
    },
    ("hazyresearch/based-swde-v2", "default", "validation"): lambda words, n: {
        **{"doc_id": str(n), "key": words(1), "text": words(12), "value": words(1)}
    },
}
ALSO_TRAIN = {"Rowan/hellaswag", "baber/piqa", "allenai/ai2_arc", "allenai/winogrande", "allenai/openbookqa"}
ALSO_TRAIN |= {"aps/super_glue", "allenai/sciq"}


def _arc(words: Words, n: int) -> dict[str, Any]:
    choices = {"text": [words(2) for _ in range(4)], "label": list("ABCD")}
    return {"id": str(n), "question": words(6), "choices": choices, "answerKey": "ABCD"[n % 4]}


def write_dataset(folder: Path, name: str, configs: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Write Parquet files and the README.md that lists configurations and splits, as datasets on the hub have them."""
    where, lines = folder / name, ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            path = f"{config}/{split}-00000-of-00001.parquet"
            (where / config).mkdir(parents=True, exist_ok=True)
            datasets.Dataset.from_list(rows).to_parquet(where / path)
            lines += [f"  - split: {split}", f"    path: {path}"]
    (where / "README.md").write_text("\n".join([*lines, "---", ""]))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with copies of all datasets of the suites "kla" and "gka"."""
    folder, draw = tmp_path_factory.mktemp("datasets"), random.Random(0)
    found: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {}
    for (name, config, split), make in ROW_MAKERS.items():
        rows = [make(lambda count: " ".join(draw.choices(WORDS, k=count)), n) for n in range(ROWS)]
        splits = found.setdefault(name, {}).setdefault(config, {})
        splits[split] = rows
        if name in ALSO_TRAIN:
            splits["train"] = rows[:1]
            splits.setdefault("validation", rows[:1])
    for name, configs in found.items():
        write_dataset(folder, name, configs)
    return folder


@pytest.fixture(autouse=True)
def cache_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what `datasets` stores in the folder of the test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run; the weights of its model are large, so that contexts matter."""
    torch.manual_seed(0)
    tokenizer = wrap_tokenizer(train_tokenizer([" ".join(WORDS * 20)], vocab_size=280))
    end, where = end_of_text_id(tokenizer), tmp_path_factory.mktemp("runs") / "tiny"
    marks = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    layers = [{"mixer": "attention", "heads": 2}, {"mixer": "kla", "slots": 2}]
    model = KalmixForCausalLM(KalmixConfig(vocab_size=len(tokenizer), hidden_size=16, layers=layers, **marks))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    for part in (model, tokenizer):
        part.save_pretrained(where / "model")
    return where
