"""Damaged and malicious files: each gives a one-line error and exit status 2, and none runs code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from attack import Attack
from safetensors.torch import load_file, save_file

from kalmix.files import FORMAT

NESTED = "[" * 100_000
ATTACK = "import pathlib; pathlib.Path(__file__).with_name('ATTACKED').touch()\n"


class Case(NamedTuple):
    """One damaged file: a function that damages a copy of a finished run, and a part of the expected error."""

    damage: Callable[[Path], object]
    says: str | None  # None: the file changes nothing
    command: str = "generate {run} --tokens 2"


def write(name: str, content: str | bytes) -> Callable[[Path], object]:
    """Return a function that replaces a file of the run."""
    data = content.encode() if isinstance(content, str) else content
    return lambda run: (run / name).write_bytes(data)


def config(**changes: Any) -> Callable[[Path], object]:
    """Return a function that changes keys of the model's configuration."""
    return edit("model/config.json", changes)


def edit(name: str, changes: dict[str, Any]) -> Callable[[Path], object]:
    """Return a function that changes keys of a JSON file."""

    def damage(run: Path) -> None:
        path = run / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """Return a function that changes the model's tensors."""

    def damage(run: Path) -> None:
        path = run / "model" / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    return damage


def one(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    """Return a function that changes one of the model's tensors."""
    name = "model.embed_tokens.weight"
    return weights(lambda tensors: tensors.update({name: change(tensors[name]).contiguous()}))


def cut(name: str) -> Callable[[Path], object]:
    """Return a function that cuts a file in half."""
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[: (run / name).stat().st_size // 2])


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return a function that puts something else, such as a folder, in place of a file."""

    def damage(run: Path) -> None:
        (run / name).unlink()
        make(run / name)

    return damage


def pickled(name: str) -> Callable[[Path], object]:
    """Return a function that replaces the weights by a pickle that runs code when it is loaded."""

    def damage(run: Path) -> None:
        (run / "model" / "model.safetensors").unlink()
        (run / "model" / name).write_bytes(pickle.dumps(Attack(run / "ATTACKED")))

    return damage


def code(name: str, *, tokenizer_class: bool = True) -> Callable[[Path], object]:
    """Return a function that makes a JSON file of the model name a Python file beside it."""

    def damage(run: Path) -> None:
        for module in ("modeling_kalmix.py", "attack.py", "custom_generate/generate.py"):
            path = run / "model" / module
            path.parent.mkdir(exist_ok=True)
            path.write_text(ATTACK)
        named = {
            "AutoConfig": "attack.C",
            "AutoModelForCausalLM": "attack.M",
            "AutoTokenizer": ["attack.T", "attack.T"],
        }
        edit(f"model/{name}", {"auto_map": named} | ({"tokenizer_class": "T"} if tokenizer_class else {}))(run)

    return damage


def index(**named: str) -> Callable[[Path], object]:
    """Return a function that adds an index of weights in several files."""

    def damage(run: Path) -> None:
        (run / "model" / "model.safetensors").rename(run / "model" / "model-1.safetensors")
        content = {"metadata": {}, "weight_map": named}
        (run / "model" / "model.safetensors.index.json").write_text(json.dumps(content))

    return damage


def long_header(run: Path) -> None:
    path = run / "model" / "model.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


CONFIG, TOKENIZER, WEIGHTS = "model/config.json", "model/tokenizer.json", "model/model.safetensors"
TRAIN = "train --resume --output {run}"
REPORT = "report {run}"
INSPECT = "inspect {run} --file {run}/text.txt"
CASES = {
    # configuration
    "empty config": Case(write(CONFIG, ""), "config.json"),
    "half a config": Case(cut(CONFIG), "config.json"),
    "config is a list": Case(write(CONFIG, "[]"), "config.json"),
    "config is null": Case(write(CONFIG, "null"), "config.json"),
    "config nested 100,000 deep": Case(write(CONFIG, NESTED), "nested"),
    "layers nested 100,000 deep": Case(write(CONFIG, f'{{"model_type":"kalmix","layers":{NESTED}'), "nested"),
    "layers nested 500 deep": Case(config(layers=deep(500)), "nested"),
    "config is not UTF-8": Case(write(CONFIG, b'{"model_type": "\xff\xfe"}'), "UTF-8"),
    "config is a folder": Case(replaced(CONFIG, Path.mkdir), "config.json"),
    "config is a FIFO": Case(replaced(CONFIG, os.mkfifo), "config.json"),
    "config is a link to itself": Case(replaced(CONFIG, lambda path: path.symlink_to(path)), "config.json"),
    "config of another model": Case(config(model_type="gpt2"), "gpt2"),
    "newer format": Case(config(format=FORMAT + 1), f"expected at most {FORMAT}. Update kalmix"),
    "unknown key": Case(config(hidden_sise=8), "hidden_sise"),
    "layers is a text": Case(config(layers="kla"), "layers"),
    "layers is a mapping": Case(config(layers={"mixer": "kla"}), "layers"),
    "unknown mixer": Case(config(layers=["klax", "attention"]), "klax"),
    "a mixer's name is a list": Case(config(layers=[{"mixer": ["kla"]}, "attention"]), "mixer"),
    "hidden_size is a text": Case(config(hidden_size="8"), "hidden_size"),
    "hidden_size is a fraction": Case(config(hidden_size=8.5), "hidden_size"),
    "hidden_size is huge": Case(config(hidden_size=2**40), ""),
    "hidden_size beyond 64 bits": Case(config(hidden_size=10**40), ""),
    "vocab_size of another tokenizer": Case(config(vocab_size=9), "weight"),
    "norm_eps is a text": Case(config(norm_eps="small"), "norm_eps"),
    "norm_eps is NaN": Case(config(norm_eps=float("nan")), "norm_eps"),
    "tie_word_embeddings is a number": Case(config(tie_word_embeddings=3), "tie_word_embeddings"),
    "use_cache is a text": Case(config(use_cache="yes"), "use_cache"),
    "pad_token_id is a text": Case(config(pad_token_id="end"), "pad_token_id"),
    "eos_token_id is a mapping": Case(config(eos_token_id={}), "eos_token_id"),
    "an option of a layer is a text": Case(config(layers=[{"mixer": "kla", "slots": "16"}, "attention"]), "slots"),
    "an option of a layer is a list": Case(config(layers=["kla", {"mixer": "attention", "rotary_base": []}]), "rotary"),
    "a million layers": Case(config(layers=["kla"] * 10**6), "layers"),
    "a layer of a million heads": Case(config(layers=["kla", {"mixer": "attention", "heads": 10**6}]), "heads"),
    "config asks for quantisation": Case(config(quantization_config={"quant_method": "bitsandbytes"}), "quantization"),
    # weights
    "empty weights": Case(write(WEIGHTS, b""), "damaged"),
    "half the weights": Case(cut(WEIGHTS), "damaged"),
    "weights with a header of 2^62 bytes": Case(long_header, "damaged"),
    "weights whose header is nested": Case(write(WEIGHTS, (10**5).to_bytes(8, "little") + NESTED.encode()), "damaged"),
    "weights are a FIFO": Case(replaced(WEIGHTS, os.mkfifo), "model.safetensors"),
    "weights are a folder": Case(replaced(WEIGHTS, Path.mkdir), "model.safetensors"),
    "weights are a broken link": Case(replaced(WEIGHTS, lambda path: path.symlink_to("gone")), "model.safetensors"),
    "NaN among the weights": Case(one(lambda x: x.fill_(float("nan"))), "NaN"),
    "one infinite weight": Case(
        weights(lambda w: w["model.norm.weight"].view(-1)[-1:].fill_(float("inf"))), "infinity"
    ),
    "integer weights": Case(one(lambda x: x.long()), "I64"),
    "boolean weights": Case(one(lambda x: x > 0), "BOOL"),
    "complex weights": Case(one(lambda x: x.to(torch.complex64)), "C64"),
    "a surplus weight": Case(weights(lambda w: w.update({"model.extra.weight": torch.ones(3)})), "model.extra.weight"),
    "a missing weight": Case(weights(lambda w: w.pop("model.norm.weight")), "model.norm.weight"),
    "a weight of another shape": Case(one(lambda x: x[:-1]), "model.embed_tokens.weight"),
    "a weight without dimensions": Case(one(lambda x: x.sum()), "model.embed_tokens.weight"),
    "no weights at all": Case(weights(lambda w: w.clear()), "only 0 weights"),
    "an index that is no mapping": Case(lambda run: (index()(run), write(f"{WEIGHTS}.index.json", "3")(run)), "index"),
    "an index without a map": Case(lambda run: (index()(run), write(f"{WEIGHTS}.index.json", "{}")(run)), "index"),
    "an index nested deep": Case(lambda run: (index()(run), write(f"{WEIGHTS}.index.json", NESTED)(run)), "nested"),
    "an index of a missing file": Case(index(**{"model.norm.weight": "model-2.safetensors"}), "model-2.safetensors"),
    "an index that leaves the folder": Case(index(**{"model.norm.weight": "../../secret.safetensors"}), "secret"),
    "an index of pickles": Case(index(**{"model.norm.weight": "pytorch_model.bin"}), "safetensors"),
    # code
    "pickled weights": Case(pickled("pytorch_model.bin"), "safetensors"),
    "pickled weights under another name": Case(pickled("model.pt"), "safetensors"),
    "pickled weights called safetensors": Case(pickled("model.safetensors"), "damaged"),
    "config names code": Case(code("config.json"), "tokenizer_class"),
    "config names code in a known key": Case(code("config.json", tokenizer_class=False), None),
    "tokenizer names code": Case(code("tokenizer_config.json"), None),
    "inspect: tokenizer names code": Case(code("tokenizer_config.json"), None, INSPECT),
    "inspect: config names code": Case(code("config.json", tokenizer_class=False), None, INSPECT),
    # tokenizer and other files of a model folder
    "empty tokenizer": Case(write(TOKENIZER, ""), "tokenizer.json"),
    "half a tokenizer": Case(cut(TOKENIZER), "tokenizer.json"),
    "tokenizer is a list": Case(write(TOKENIZER, "[]"), "tokenizer.json"),
    "tokenizer nested deep": Case(write(TOKENIZER, NESTED), "tokenizer.json"),
    "tokenizer is not UTF-8": Case(write(TOKENIZER, b'{"version": "\xff"}'), "tokenizer.json"),
    "tokenizer is a FIFO": Case(replaced(TOKENIZER, os.mkfifo), "tokenizer.json"),
    "tokenizer without the token that begins documents": Case(
        write(TOKENIZER, json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 1}, "merges": []}})),
        "begins documents",
    ),
    "tokenizer with more tokens than the model": Case(
        write(
            TOKENIZER,
            json.dumps(
                {
                    "version": "1.0",
                    "added_tokens": [
                        {"id": 10**6, "content": "<|endoftext|>", "single_word": False, "lstrip": False}
                        | {"rstrip": False, "normalized": False, "special": True}
                    ],
                    "model": {"type": "BPE", "vocab": {"a": 0, "<|endoftext|>": 10**6}, "merges": []},
                }
            ),
        ),
        "token",
    ),
    # only tokenizer.json is read
    "tokenizer_config is a list": Case(write("model/tokenizer_config.json", "[]"), None),
    "tokenizer_config nested deep": Case(write("model/tokenizer_config.json", NESTED), None),
    "tokenizer_config is not UTF-8": Case(write("model/tokenizer_config.json", b'{"a": "\xff"}'), None),
    "generation_config is a list": Case(write("model/generation_config.json", "[]"), "generation_config.json"),
    "generation_config nested deep": Case(write("model/generation_config.json", NESTED), "generation_config.json"),
    "generation_config is not UTF-8": Case(write("model/generation_config.json", b'{"a": "\xff"}'), "UTF-8"),
    "generation_config of wrong types": Case(edit("model/generation_config.json", {"num_beams": "many"}), None),
    "generation_config of other options": Case(edit("model/generation_config.json", {"max_length": -1}), None),
    # texts
    "a text that is not UTF-8": Case(write("text.txt", b"caf\xe9"), "UTF-8", INSPECT),
    "a binary text": Case(write("text.txt", b"a\0b"), "binary", INSPECT),
    "an empty text": Case(write("text.txt", b""), "text", INSPECT),
    "a text that is a FIFO": Case(lambda run: os.mkfifo(run / "text.txt"), "regular file", INSPECT),
    "a text that is a link to itself": Case(
        lambda run: (run / "text.txt").symlink_to(run / "text.txt"), "text.txt", INSPECT
    ),
    "a text that is a device": Case(lambda run: (run / "text.txt").symlink_to("/dev/zero"), "regular file", INSPECT),
    # evaluation of a finished run
    "report: half a history": Case(cut("history.json"), "stopped", REPORT),
    "report: history nested deep": Case(write("history.json", NESTED), "stopped", REPORT),
    "report: history is a FIFO": Case(replaced("history.json", os.mkfifo), "stopped", REPORT),
    "report: history is a mapping": Case(write("history.json", "{}"), "stopped", REPORT),
    "report: inputs nested deep": Case(write("inputs.json", NESTED), "inputs.json", REPORT),
    "report: inputs are a list": Case(write("inputs.json", "[1]"), "inputs.json", REPORT),
    "report: NaN among the weights": Case(one(lambda x: x.fill_(float("nan"))), "NaN", REPORT),
    "report: half a tokenizer": Case(cut(TOKENIZER), "tokenizer", REPORT),
    "report: pickled weights": Case(pickled("pytorch_model.bin"), "safetensors", REPORT),
    "report: a text that has become a FIFO": Case(
        lambda run: (os.mkfifo(run / "f"), edit("recipe.json", {"text": str(run / "f")})(run)), "regular file", REPORT
    ),
    # recipes
    "empty recipe": Case(write("recipe.json", ""), "recipe.json", TRAIN),
    "half a recipe": Case(cut("recipe.json"), "recipe.json", TRAIN),
    "recipe nested deep": Case(write("recipe.json", NESTED), "recipe.json", TRAIN),
    "recipe is not UTF-8": Case(write("recipe.json", b'{"text": "\xff"}'), "recipe.json", TRAIN),
    "recipe is a FIFO": Case(replaced("recipe.json", os.mkfifo), "recipe.json", TRAIN),
    "recipe is a list": Case(write("recipe.json", "[]"), "recipe.json", TRAIN),
    "recipe whose layers are a text": Case(edit("recipe.json", {"layers": "kla"}), "layers", TRAIN),
    "recipe whose hidden_size is a text": Case(edit("recipe.json", {"hidden_size": "8"}), "hidden_size", TRAIN),
    "recipe whose hidden_size is a fraction": Case(edit("recipe.json", {"hidden_size": 8.5}), "hidden_size", TRAIN),
    "recipe whose steps are NaN": Case(edit("recipe.json", {"steps": float("nan")}), "steps", TRAIN),
    "recipe whose text is a number": Case(edit("recipe.json", {"text": 3}), "text", TRAIN),
    "recipe whose seed is a text": Case(edit("recipe.json", {"seed": "x"}), "seed", TRAIN),
}


@pytest.mark.parametrize("name", CASES)
def test_hostile_file_gives_one_error_line(
    kalmix, in_time, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case, run = CASES[name], tmp_path / "run"
    shutil.copytree(run_folder, run)
    if case.says is None:
        (run / "text.txt").write_text("a text")
    if case.command == TRAIN:
        (run / "history.json").unlink()  # like an interrupted run
    case.damage(run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *asked: pytest.fail(f"asked {asked}"))
    result = kalmix(*case.command.format(run=run).split())
    assert not list(tmp_path.rglob("ATTACKED"))
    if case.says is None:
        assert result.status == 0, result
        return
    line = result.errors.strip()
    assert result.status == 2, result
    assert line.startswith("error: ") and "\n" not in line, line
    assert case.says in line
    assert len(line.replace(str(run), "")) < 400, line
    assert "Traceback" not in result.output + result.errors


@pytest.mark.slow
def test_special_files_in_a_text_folder_are_skipped(kalmix, in_time, run_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("What is known, and how well.")
    os.mkfifo(folder / "fifo.txt")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket.txt"))
        (folder / "zero.txt").symlink_to("/dev/zero")
        (folder / "loop.txt").symlink_to(folder / "loop.txt")
        (folder / "gone.txt").symlink_to(folder / "nothing.txt")
        (folder / "up").symlink_to(folder)
        result = kalmix("inspect", run_folder, "--file", folder, "--output", tmp_path)
    assert result.status == 0, result
