"""RULER by generation: lm-eval's rows and scores at one length, and the score of every needle with its position."""

from __future__ import annotations

import json
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from kalmix._extras import optional_imports

with optional_imports():
    import nltk
    from datasets import Dataset

from kalmix.errors import ArgumentError
from kalmix.evaluation.harness import load_task, local_copies, quiet, seed_generators, task_manager

ESSAYS = {"niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery"}
QUESTIONS = {"ruler_qa_squad", "ruler_qa_hotpot"}
DECILES = 10
NO_ROOM = "Could not generate any sample"  # message of lm-eval if no row of a needle task fits


class Needle(NamedTuple):
    """Needle that a row asks for.

    Attributes:
        row: number of the row.
        token: number of the prompt's token where its value begins.
        tokens: tokens of the prompt.
        score: 1 if the generated text contains its value, otherwise 0.
    """

    row: int
    token: int
    tokens: int
    score: int

    @property
    def decile(self) -> int:
        """Tenth of the prompt that contains the needle, 0 to 9."""
        return min(DECILES - 1, DECILES * self.token // self.tokens)


@contextmanager
def tokenizer_copy(tokenizer: Any) -> Iterator[str]:
    """Yield a temporary folder with a tokenizer, and without any code; lm-eval loads a tokenizer by name."""
    with TemporaryDirectory() as name:
        tokenizer.save_pretrained(name)
        path = Path(name, "tokenizer_config.json")
        settings = json.loads(path.read_text(encoding="utf-8"))
        settings.pop("auto_map", None)
        path.write_text(json.dumps(settings), encoding="utf-8")
        yield name


def load_ruler_task(task: str, length: int, limit: int | None, tokenizer: str, data: Path | None) -> Any:
    """Load a task of RULER with rows of one length, as lm-eval draws them.

    Args:
        task: name of the task in lm-eval.
        length: largest number of tokens of prompt and answer.
        limit: number of rows. lm-eval draws 500; the first are kept.
        tokenizer: folder of the tokenizer that measures lengths.
        data: folder with copies of what lm-eval downloads: `baber/paul_graham_essays`, `nltk_data`, `dev-v2.0.json` of
            SQuAD and `hotpot_dev_distractor_v1.json`. `None` for the network.

    Raises:
        ArgumentError: data are missing, or no row fits into `length`.
    """
    seed_generators()
    if data is not None:
        nltk.data.path.insert(0, str(data / "nltk_data"))
    try:
        if task in ESSAYS:
            _check_sentences(data)
        with _no_downloads_of_nltk(), _local_questions(data):
            _check_room(task, length, tokenizer)
            metadata = {"tokenizer": tokenizer, "max_seq_lengths": [length]}
            found = load_task(task_manager(metadata), task, data)
    except ArgumentError as error:
        if NO_ROOM not in str(error.__cause__):  # lm-eval's error; the text of ours is shortened
            raise
        problem = f"{length:,} leaves no room for a row of {task!r}"
        expected = "more tokens, or a tokenizer with longer tokens"
        raise ArgumentError("lengths", problem=problem, expected=expected) from None
    finally:
        if data is not None:
            nltk.data.path.remove(str(data / "nltk_data"))
    rows: Dataset = found.dataset["test"]
    found.dataset["test"] = rows.select(range(min(len(rows), limit or len(rows))))
    return found


def needles(samples: Sequence[dict[str, Any]], tokenizer: Any) -> list[Needle]:
    """Return every needle that the rows of a needle task ask for.

    Args:
        samples: lm-eval's records of the rows, each with the prompt and the generated text.
        tokenizer: a fast tokenizer.
    """
    found = []
    for sample in samples:
        doc, answer = sample["doc"], sample["filtered_resps"][0].lower()
        text = doc["input"]
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in encoded["offset_mapping"]]
        for value in doc["outputs"]:
            token = bisect_left(ends, text.index(value) + 1)
            found.append(Needle(doc["index"], token, len(ends), int(value.lower() in answer)))
    return found


def deciles(found: Sequence[Needle]) -> list[dict[str, int]]:
    """Return the numbers of needles and of found needles in each tenth of the prompts."""
    groups = [[x.score for x in found if x.decile == n] for n in range(DECILES)]
    return [{"needles": len(scores), "found": sum(scores)} for scores in groups]


def _check_sentences(data: Path | None) -> None:
    """Check that NLTK can split essays into sentences; download its model if `data` is `None`.

    Raises:
        ArgumentError: the model is missing.
    """
    try:
        nltk.data.find("tokenizers/punkt_tab")
        return
    except LookupError:
        pass
    with quiet():  # NLTK's default for errors is the stream that was `sys.stderr` at its import
        if data is None and nltk.download("punkt_tab", print_error_to=sys.stderr):
            return
    expected = "nltk_data/tokenizers/punkt_tab in --data, or a network"
    raise ArgumentError("data", problem="lacks the sentence tokenizer punkt_tab of NLTK", expected=expected)


@contextmanager
def _no_downloads_of_nltk() -> Iterator[None]:
    """Make `nltk.download` do nothing.

    lm-eval calls it when it imports the code of needle tasks, also of those without essays, which need no model.
    """
    module: Any = nltk
    download = module.download
    module.download = lambda *args, **options: False
    try:
        yield
    finally:
        module.download = download


@contextmanager
def _local_questions(data: Path | None) -> Iterator[None]:
    """Make lm-eval read the questions of SQuAD and HotpotQA from files in `data`; `None` changes nothing."""
    if data is None:
        yield
        return
    with quiet(), local_copies(data):
        from lm_eval.tasks.ruler import qa_utils
    # lm-eval's loader of tasks then uses this module, and does not import it anew.
    module: Any = qa_utils
    module.__mtime__ = Path(module.__file__).stat().st_mtime_ns
    download = module.download_json

    def read(url: str) -> Any:
        path = data / url.rsplit("/", 1)[-1]
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing")
        return json.loads(path.read_text(encoding="utf-8"))

    module.download_json = read
    try:
        yield
    finally:
        module.download_json = download
        module.read_squad.cache_clear()
        module.read_hotpotqa.cache_clear()


def _check_room(task: str, length: int, tokenizer: str) -> None:
    """Check that the smallest row of a task fits into `length`: lm-eval would look for a smaller one forever.

    Raises:
        ArgumentError: it does not.
    """
    if task not in {"ruler_vt", "ruler_cwe", "ruler_fwe"}:
        return
    with quiet():
        from lm_eval.tasks.ruler import cwe_utils, fwe_utils, vt_utils
        from lm_eval.tasks.ruler.common_utils import get_tokenizer

        measure = get_tokenizer(tokenizer)
        room = length
        if task == "ruler_vt":  # an example of at most 500 tokens precedes the question
            text, room = vt_utils.generate_input_output(5, 1, 4, is_icl=True)[0], min(length - 900, 440)
        elif task == "ruler_cwe":
            text, room = cwe_utils.generate_input_output(10, length)[1], length - 150
        else:
            text, room = fwe_utils.TEMPLATE, length // 2
    if (needed := len(measure(text).input_ids)) > room:
        problem = f"{length:,} leaves {max(0, room):,} tokens for the shortest row of {task!r}, which has {needed:,}"
        raise ArgumentError("lengths", problem=problem, expected="more tokens, or a tokenizer with longer tokens")
