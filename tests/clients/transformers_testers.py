"""Script: run the model tests of transformers on every layer of kalmix and on a hybrid.

    python tests/clients/transformers_testers.py CHECKOUT --output docs/results/transformers-testers

CHECKOUT is a work tree of the repository of transformers, with `tests/causal_lm_tester.py`, at the tag of the installed
version. The tests need the packages `parameterized`, `pytest` and `httpx`. The script writes a table (`.md`) and all
reasons (`.json`).
"""

import argparse
import contextlib
import inspect
import io
import json
import os
import platform
import re
import sys
import time
import types
import unittest
import unittest.mock as mock
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils._pytree import tree_leaves
from transformers import Mamba2Config
from transformers.exporters import base as exporters
from transformers.models.auto import modeling_auto

from kalmix import models
from kalmix.layers import MIXERS
from kalmix.models.backbone import KalmixPreTrainedModel

LAYERS: dict[str, list[Any]] = {name: [name, name] for name in MIXERS}
LAYERS["design"] = [{"mixer": "design", "design": "longhorn"}] * 2
LAYERS["hybrid"] = ["kla", "attention"]
TASKS = {
    "": "Model",
    "_FOR_CAUSAL_LM": "ForCausalLM",
    "_FOR_SEQUENCE_CLASSIFICATION": "ForSequenceClassification",
    "_FOR_TOKEN_CLASSIFICATION": "ForTokenClassification",
}
PEER = "transformers Mamba2"  # the same tests on the model of transformers that is nearest to ours


class Record(unittest.TestResult):
    """Result of each test: "passed", or the reason why it failed or was skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.passed.append(_name(test))

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self.reasons[_name(test)] = reason

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        if err[0].__name__ == "Skipped":  # of pytest.skip
            self.addSkip(test, str(err[1]))
        else:
            self.failed[_name(test)] = _describe(err)

    addFailure = addError  # noqa: N815

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:  # noqa: N802
        if err is not None:
            self.failed[_name(test)] = f"{subtest}: {_describe(err)}"


def _name(test: unittest.TestCase) -> str:
    return test.id().rsplit(".", 1)[-1]


def _describe(err: Any) -> str:
    frame = err[2]
    while frame.tb_next is not None:
        frame = frame.tb_next
    place = f"{Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}"
    return f"{err[0].__name__} at {place}: {str(err[1]).strip()[:400]}"


class AbsentHelpers(types.ModuleType):
    """Stand-in for a module of helpers that a checkout lacks; each helper fails when it is called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*args: Any, **kwargs: Any) -> Any:
            raise unittest.SkipTest(f"the checkout has no {self.__name__}.{name}")

        return absent


class CacheNameTest:
    """The test of transformers 5.24 that calls models with either name of the cache."""

    def test_bc_cache_name_forward(self) -> None:
        # The test expects a warning for the old name, which models of kalmix accept without one.
        test: Any = getattr(super(), "test_bc_cache_name_forward", None)
        if test is None:
            raise unittest.SkipTest("the checkout is older than transformers 5.24")
        original = KalmixPreTrainedModel.__call__

        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            if "past_key_values" in kwargs:
                warnings.warn("`past_key_values` is deprecated", stacklevel=2)
            return original(model, *args, **kwargs)

        with mock.patch.object(KalmixPreTrainedModel, "__call__", call):
            test()


def kalmix_tests(layers: list[Any]) -> type[unittest.TestCase]:
    """Build the tests of transformers for models of `layers`, as the test file of a model of transformers does."""
    from tests.causal_lm_tester import CausalLMModelTest, CausalLMModelTester

    # The tests choose labels by these tables, which list the models inside transformers.
    for task, suffix in TASKS.items():
        getattr(modeling_auto, f"MODEL{task}_MAPPING_NAMES")["kalmix"] = f"Kalmix{suffix}"

    class Tester(CausalLMModelTester):
        config_class = models.KalmixConfig
        base_model_class = getattr(models, "KalmixModel", models.KalmixForCausalLM)
        causal_lm_class = models.KalmixForCausalLM
        sequence_classification_class = getattr(models, "KalmixForSequenceClassification", None)
        token_classification_class = getattr(models, "KalmixForTokenClassification", None)

        def get_config(self) -> models.KalmixConfig:
            return models.KalmixConfig(
                vocab_size=self.vocab_size,
                hidden_size=self.hidden_size,
                layers=layers,
                pad_token_id=self.pad_token_id,
                bos_token_id=self.bos_token_id,
                eos_token_id=self.eos_token_id,
                tie_word_embeddings=self.tie_word_embeddings,
            )

    class Tests(CacheNameTest, CausalLMModelTest, unittest.TestCase):
        model_tester_class = Tester
        has_attentions = False  # as Mamba2: a filter has no attention weights

        # The next two are the hooks for caches that hold something else than keys and values.
        def _check_past_key_values_for_generate(
            self, batch_size: int, past_key_values: Any, seq_length: int, config: Any
        ) -> None:
            self.assertEqual(len(past_key_values.layers), config.num_hidden_layers)
            for layer in past_key_values.layers:
                for tensor in tree_leaves(layer.entry.state):
                    self.assertEqual(tensor.shape[0], batch_size)

        def _check_caches_are_equal(self, cache1: Any, cache2: Any) -> None:
            for one, other in zip(cache1.layers, cache2.layers, strict=True):
                self.assertEqual(type(one), type(other))
                torch.testing.assert_close(tree_leaves(one.entry.state), tree_leaves(other.entry.state))

        def test_can_init_all_missing_weights(self) -> None:
            # The test reads the year of a model in a copyright notice, and skips old models.
            recent = mock.Mock(wraps=inspect, getfile=lambda _: inspect.getfile(Mamba2Config))
            with mock.patch("tests.test_modeling_common.inspect", recent):
                super().test_can_init_all_missing_weights()

        def test_left_padding_compatibility(self) -> None:
            # The test concludes from `has_attentions` that a model supports padding.
            with mock.patch.object(type(self), "has_attentions", True):
                super().test_left_padding_compatibility()

        def test_recurrent_layers_mask_padding_on_continued_forward(self) -> None:
            # The test knows recurrent models by the types of layer that transformers defines.
            prepare = self.model_tester.prepare_config_and_inputs_for_common

            def declared() -> tuple[Any, Any]:
                config, inputs = prepare()
                config.get_text_config = lambda: [
                    config.__dict__.pop("get_text_config"),
                    types.SimpleNamespace(layer_types=["linear_attention"]),
                ][1]
                return config, inputs

            with mock.patch.object(self.model_tester, "prepare_config_and_inputs_for_common", declared):
                super().test_recurrent_layers_mask_padding_on_continued_forward()

    return Tests


def mamba2_tests() -> type[unittest.TestCase]:
    """Build the tests of transformers for its own Mamba2, with all the mixins that ours have."""
    from tests.causal_lm_tester import FSDPTesterMixin, TensorParallelTesterMixin, TrainingTesterMixin
    from tests.models.mamba2.test_modeling_mamba2 import Mamba2ModelTest

    return type("Tests", (Mamba2ModelTest, TrainingTesterMixin, TensorParallelTesterMixin, FSDPTesterMixin), {})


def run(name: str, checkout: str, pattern: str, part: int, parts: int, deadline: float) -> dict[str, Any]:
    """Run the tests of one model, or a part of them.

    Args:
        name: key of `LAYERS`, or `PEER`.
        checkout: work tree of transformers.
        pattern: run only tests whose name contains it.
        part: index of the part, from 0 to `parts - 1`.
        parts: number of parts; part `i` has every test whose index leaves the remainder `i`.
        deadline: start no test after this time (`time.time()`).

    Returns:
        A dict with "passed" (names), "failed" and "skipped" (name to reason), "left" (names of tests that were not
        started), and "seconds".
    """
    sys.path.insert(0, checkout)
    helpers = "tests.distributed_testing_utils"
    if not Path(checkout, "tests/distributed_testing_utils.py").exists():
        sys.modules[helpers] = AbsentHelpers(helpers)
    exported_model = getattr(exporters, "ExportedModel", None)  # transformers 5.17 exports programs of torch
    if exported_model is not None and not hasattr(exported_model, "module"):  # the tests of transformers 5.16 call it
        exported_model.module = lambda exported: exported.program.module()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", message=".*is deprecated")  # tests look for these
    cases = mamba2_tests() if name == PEER else kalmix_tests(LAYERS[name])
    names = [test for test in unittest.defaultTestLoader.getTestCaseNames(cases) if pattern in test][part::parts]
    record, left, began = Record(), [], time.perf_counter()
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(io.StringIO()):
        os.dup2(nothing.fileno(), sys.stderr.fileno())  # loggers hold the file itself; this process runs nothing else
        for test in names:
            if time.time() > deadline:
                left.append(test)
                continue
            torch.compiler.reset()
            cases(test).run(record)
    seconds = round(time.perf_counter() - began)
    passed = [test for test in record.passed if test not in record.failed]
    return {"passed": passed, "failed": record.failed, "skipped": record.reasons, "left": left, "seconds": seconds}


def merge(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one result for the parts of a model's tests; seconds are added."""
    merged: dict[str, Any] = {"passed": [], "failed": {}, "skipped": {}, "left": [], "seconds": 0}
    for result in results:
        for kind in ("passed", "left"):
            merged[kind] += result[kind]
        for kind in ("failed", "skipped"):
            merged[kind] |= result[kind]
        merged["seconds"] += result["seconds"]
    return merged


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return Markdown tables of the results and of the reasons of skips, and the failures."""
    peer = results.get(PEER)
    lines = ["| model | passed | failed | skipped | skipped, but not by Mamba2 |", "|---|---|---|---|---|"]
    for name, result in results.items():
        more = "" if peer is None or name == PEER else len(_extra_skips(result, peer))
        counts = [len(result[kind]) for kind in ("passed", "failed", "skipped")]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} | {more} |")
    left = [f"{len(r['left'])} of {name}" for name, r in results.items() if r.get("left")]
    lines += ["", f"Tests that were not run: {', '.join(left)}."] if left else []
    failures = [f"- {name}: `{test}`: {why}" for name, r in results.items() for test, why in r["failed"].items()]
    lines += ["", *(["Failures:", "", *failures, ""] if failures else [])]
    reasons: dict[str, set[str]] = {}
    for name, result in results.items():
        for test, why in () if name == PEER else result["skipped"].items():
            reasons.setdefault(_general(why), set()).add(test.split(" [")[0])
    lines += ["| reason of a skip | tests | of them skipped by Mamba2 |", "|---|---|---|"]
    for why, tests in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
        same = "" if peer is None else sum(test in {x.split(" [")[0] for x in peer["skipped"]} for test in tests)
        shown = len(tests) if len(tests) > 2 else ", ".join(f"`{test}`" for test in sorted(tests))
        lines.append(f"| {why} | {shown} | {same} |")
    return "\n".join(lines) + "\n"


def _general(reason: str) -> str:
    """Return a reason without the names of the test and of the model."""
    reason = re.sub(r"^Tests::\S+ is skipped: ", "", " ".join(reason.split()).replace("|", "/"))
    reason = re.sub(r"`[\w-]+` is not in `self.pipeline_model_mapping`.*", "The model has no such pipeline", reason)
    reason = re.sub(r" \(enabled: .*", "", reason)
    reason = re.sub(r"tests\.distributed_testing_utils\.\w+", "helpers of distributed tests", reason)
    return re.sub(r"<class '[\w.]*'>|Kalmix\w+", "the model", reason)


def write(output: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write the table and all reasons of the results."""
    python = platform.python_version()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "python": python}
    output.with_suffix(".md").write_text(table(results))
    output.with_suffix(".json").write_text(json.dumps({"versions": versions, "results": results}, indent=1) + "\n")


def _outcome(result: dict[str, Any], test: str) -> str:
    return next((kind for kind in ("passed", "failed", "skipped") if test in result[kind]), "not run")


def _extra_skips(result: dict[str, Any], peer: dict[str, Any]) -> list[str]:
    return [test for test in result["skipped"] if _outcome(peer, test) in ("passed", "failed")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", help="work tree of the repository of transformers")
    parser.add_argument("--model", action="append", choices=[*LAYERS, PEER], help="Repeatable. Default: all")
    parser.add_argument("-k", default="", metavar="TEXT", help="Run only tests whose name contains TEXT")
    parser.add_argument("--slow", action="store_true", help="Run the tests that transformers marks as slow, too")
    parser.add_argument("--jobs", type=int, default=2, help="Processes")
    parser.add_argument("--parts", type=int, default=1, help="Divide the tests of a model among so many processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="Start no test after so many seconds")
    parser.add_argument("--output", type=Path, help="Add results to OUTPUT.md and OUTPUT.json")
    arguments = parser.parse_args()
    checkout = str(Path(arguments.checkout).resolve())
    if arguments.slow:
        os.environ["RUN_SLOW"] = "1"  # how the tests of transformers are told
    names = arguments.model or [*LAYERS, PEER]
    results: dict[str, Any] = {}
    if arguments.output and (earlier := arguments.output.with_suffix(".json")).exists():
        results = json.loads(earlier.read_text())["results"]
    deadline = time.time() + arguments.seconds
    # A process for each model; parts share processes, because imports take longer than many of them.
    per_process = 1 if arguments.parts == 1 else None
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn"), max_tasks_per_child=per_process) as pool:
        futures = {
            name: [
                pool.submit(run, name, checkout, arguments.k, part, arguments.parts, deadline)
                for part in range(arguments.parts)
            ]
            for name in names
        }
        for name in names:
            results[name] = result = merge([future.result() for future in futures[name]])
            counts = ", ".join(f"{len(result[kind])} {kind}" for kind in ("passed", "failed", "skipped", "left"))
            print(f"{name}: {counts}, {result['seconds']} s", flush=True)
            for test, why in result["failed"].items():
                print(f"    {test}: {why}", flush=True)
            if arguments.output:
                write(arguments.output, {name: results[name] for name in [*LAYERS, PEER] if name in results})
    return int(any(results[name]["failed"] or results[name]["left"] for name in names))


if __name__ == "__main__":
    raise SystemExit(main())
