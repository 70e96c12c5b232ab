"""Evaluation with lm-evaluation-harness: the tasks of examples/reading, and the scores of a model.

The harness pads, batches, groups requests by context, and generates with a cache. Scores must not depend on these.
Tests of the harness need the extra `eval` and are skipped without it.
"""

from __future__ import annotations

import math
import random
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.training.corpus import train_tokenizer
from kalmix.training.data import end_of_text_id, wrap_tokenizer
from kalmix.training.evaluation import surprisals

READING = Path(__file__).parents[1] / "examples" / "reading"
HARNESS = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval: pip install 'kalmix[eval]'")
WORDS = [f"{a}{b}" for a in ("fil", "be", "ev", "pro", "no") for b in ("ter", "lief", "idence", "cess", "thing")]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    draw, file = random.Random(0), tmp_path_factory.mktemp("text") / "small.txt"
    file.write_text("\n\n".join(" ".join(draw.choices(WORDS, k=70)) for _ in range(100)))
    return str(file)


@pytest.fixture(scope="module")
def reading() -> ModuleType:
    spec = spec_from_file_location("reading", READING / "reading.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a tokenizer and a model; its weights are large, so that contexts matter."""
    torch.manual_seed(0)
    tokenizer = wrap_tokenizer(train_tokenizer([Path(text).read_text()], vocab_size=280))
    end, where = end_of_text_id(tokenizer), tmp_path_factory.mktemp("model")
    marks = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    layers = ["kla", {"mixer": "attention", "heads": 2}, {"mixer": "bayesian", "heads": 1, "head_dim": 8}]
    model = KalmixForCausalLM(KalmixConfig(vocab_size=len(tokenizer), hidden_size=16, layers=layers, **marks))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    for part in (model, tokenizer):
        part.save_pretrained(where)
    return str(where)


def test_questions(reading: ModuleType, text: str):
    """Each question has one correct answer, and the text contains it."""
    held_out = " ".join(" ".join(document.split()) for document in reading._held_out(text))
    for row in (rows := reading.endings(text)["test"]):
        assert len(set(row["endings"])) == 4
        assert f"{row['context']} {row['endings'][row['label']]}" in held_out
    assert 0 < rows["label"].count(0) < len(rows)
    for row in reading.last_words(text)["test"]:
        assert row["word"] in row["context"].split()
        assert f"{row['context']} {row['word']}" in held_out
    for row in reading.echoes(text)["test"]:
        said, again, begun = row["prompt"].split("\n")
        assert said == again == f"{begun} {row['rest']}"
    assert "".join(row["text"] for row in reading.documents(text)["test"])
    assert reading.endings(text)["test"].to_list() == rows.to_list()


@HARNESS
def test_harness_scores_equal_the_models(folder: str):
    """Compare log likelihoods in padded batches, and texts generated with a cache in left-padded batches."""
    from lm_eval.models.huggingface import HFLM

    judge = HFLM(folder, trust_remote_code=True, add_bos_token=True, batch_size=3, device="cpu")
    model, tokenizer = KalmixForCausalLM.from_pretrained(folder).eval(), judge.tokenizer

    draw = random.Random(1)
    contexts = [" ".join(draw.choices(WORDS, k=n)) for n in (1, 9, 4, 2, 7, 3)]
    asked = [(context, " " + draw.choice(WORDS)) for context in contexts for _ in range(2)]
    said = judge.loglikelihood([SimpleNamespace(args=pair) for pair in asked], disable_tqdm=True)
    for (context, ending), (found, _) in zip(asked, said, strict=True):
        ids, begun = (torch.tensor(tokenizer(piece)["input_ids"]) for piece in (context + ending, context))
        assert ids[0] == end_of_text_id(tokenizer)
        exact = -surprisals(model, ids, window=999)[len(begun) - 1 :].sum()
        assert found == pytest.approx(float(exact), abs=1e-3)
    assert len({round(found, 2) for found, _ in said}) > 6  # scores differ between contexts

    options = {"until": ["\n"], "do_sample": False, "max_gen_toks": 12}
    texts = judge.generate_until([SimpleNamespace(args=(context, options)) for context in contexts], disable_tqdm=True)
    for context, found in zip(contexts, texts, strict=True):
        ids = tokenizer(context, return_tensors="pt")["input_ids"]
        alone = model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=False)
        assert found == tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True).split("\n")[0]


@HARNESS
def test_the_tasks_run(folder: str, text: str):
    """Run all four tasks as the command line does; the bits per byte of a text equal the model's."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    manager = TaskManager(include_path=str(READING), include_defaults=False, metadata={"text": text})
    given = {"pretrained": folder, "trust_remote_code": True, "add_bos_token": True, "max_length": 4096}
    found = simple_evaluate(
        *("hf", given), tasks=["reading"], task_manager=manager, limit=3, batch_size=2, device="cpu", bootstrap_iters=0
    )
    assert found is not None
    scores = {name: row for name, row in found["results"].items() if name != "reading"}
    assert set(scores) == {"reading_text", "reading_ending", "reading_word", "reading_echo"}
    assert 0 <= scores["reading_ending"]["acc,none"] <= 1
    assert 0 <= scores["reading_echo"]["exact_match,none"] <= 1
    assert scores["reading_word"]["perplexity,none"] > 1

    documents = [sample["doc"]["text"] for sample in found["samples"]["reading_text"]]
    model, tokenizer = KalmixForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    # The harness puts the end-of-text token before a document twice, and scores the second one.
    twice = [end_of_text_id(tokenizer)] * 2
    coded = [torch.tensor([*twice, *tokenizer(x, add_special_tokens=False)["input_ids"]]) for x in documents]
    nats = sum(float(surprisals(model, ids, window=4096).sum()) for ids in coded)
    bits = nats / math.log(2) / sum(len(document.encode()) for document in documents)
    assert scores["reading_text"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-4)
