"""Language models at equal cost: equal parameters, the best learning rate, tests of a model, exact continuation."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix.models import KalmixForCausalLM
from kalmix_bench.experiments.language import experiment, precompile, probes, report, run
from kalmix_bench.experiments.language.architectures import HYBRID, LAYERS, ModelSize, count_parameters, make_blocks
from kalmix_bench.experiments.language.experiment import Language
from kalmix_bench.experiments.language.plan import plan_table
from kalmix_bench.experiments.language.protocol import (
    MAIN,
    PRESETS,
    TUNE,
    LanguageCell,
    RunSize,
    best_rates,
    main_cells,
    tuned_rates,
    tuning_cells,
)
from kalmix_bench.experiments.language.run import run_cell, summarize, training_seconds
from kalmix_bench.runner.experiment import CellStopped
from kalmix_bench.runner.published_names import published_name

PAPER = PRESETS["paper"]
TINY = RunSize(
    ModelSize(parameters=40_000, hidden_size=16, depth=1, vocab_size=512),
    **{"seq_len": 32, "tokens": 1280, "batch_tokens": 128, "batch_size": 4, "eval_tokens": 256, "probe_rows": 2},
    bf16=False,
)


@pytest.mark.parametrize("stage", [TUNE, MAIN])
@pytest.mark.slow
def test_all_models_have_the_same_number_of_parameters(stage: str) -> None:
    size = PAPER.size(stage).model
    assert PRESETS["short"].with_zero_init(True).size(stage).model == PAPER.tune.model
    assert PRESETS["medium"].size(stage).model == size
    found = {name: count_parameters(name, size) / size.parameters for name in LAYERS}
    assert set(PAPER.layers) == set(LAYERS)
    assert not {name: ratio for name, ratio in found.items() if not 0.98 <= ratio <= 1.02}


@pytest.mark.parametrize("name", [name for name in LAYERS if name.endswith(HYBRID)])
def test_every_fourth_block_of_a_hybrid_is_attention(name: str) -> None:
    blocks = make_blocks(name, PAPER.main.model)
    assert [n % 4 == 3 for n in range(len(blocks))] == [block["mixer"] == "attention" for block in blocks]
    assert {block["mixer"] for block in blocks} == {"attention", name.removesuffix(HYBRID)}


def test_layers_that_replace_an_mlp_follow_each_other_without_one() -> None:
    assert all("mlp" not in block for block in make_blocks("kla", PAPER.main.model))
    assert {"mlp" in block for block in make_blocks("kla+attention", PAPER.main.model)} == {True, False}


@pytest.mark.parametrize("name", ["kla", "mamba2", "kla-noise-free"])
def test_layers_that_replace_an_mlp_can_have_one(name: str) -> None:
    size = PAPER.main.model
    blocks, others = make_blocks(f"{name}+mlp", size), make_blocks("kda", size)
    assert len(blocks) == len(others) == size.depth
    assert all(block["mlp"] > 0 for block in blocks)
    assert {key: value for key, value in blocks[0].items() if key != "mlp"} == make_blocks(name, size)[0]


@pytest.mark.parametrize("name", ["klaa", "attention+attention", "kla+kla", "kda+mlp", "kla+mlp+attention"])
def test_unknown_layers_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match="`layer` is"):
        make_blocks(name, PAPER.main.model)


def test_a_layer_takes_options_after_a_colon() -> None:
    size = PAPER.tune.model
    blocks = make_blocks('bayesian+attention:{"decays_per_head": 1}', size)
    assert [block.get("decays_per_head") for block in blocks[:4]] == [1, 1, 1, None]
    assert make_blocks('bayesian:{"decays_per_head": "key"}', size) == make_blocks("bayesian-decay-per-key", size)
    named = [LanguageCell(TUNE, f"kla:{options}", TINY, 1e-3, 0, "c") for options in ('{"slots":4}', '{ "slots": 4 }')]
    assert named[0] == named[1] and named[0].layer == 'kla:{"slots": 4}'
    for wrong in ("kla:slots", "kla:[4]", 'kla:{"slot": 4}'):
        with pytest.raises(ArgumentError):
            make_blocks(wrong, size)


def test_layers_too_large_for_the_parameters_are_refused() -> None:
    with pytest.raises(ArgumentError, match="expected at least"):
        make_blocks("attention", replace(PAPER.main.model, parameters=10_000_000))


def test_precompiling_takes_a_step_of_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    from kalmix.training import initial_model

    models, build = [], initial_model.build

    def build_and_keep(*arguments: Any) -> KalmixForCausalLM:
        models.append(build(*arguments))
        return models[-1]

    monkeypatch.setattr(initial_model, "build", build_and_keep)
    wide = replace(TINY, model=replace(TINY.model, hidden_size=32, parameters=80_000))
    precompile.step("gated-deltanet", PRESETS["laptop"]._replace(tune=TINY, main=wide), torch.device("cpu"))
    assert [model.config.hidden_size for model in models] == [16, 32]
    assert all(value.grad is not None for model in models for value in model.parameters())


def test_cells_survive_json_and_differ_in_each_setting() -> None:
    cell = LanguageCell(MAIN, "kla", TINY, 1e-3, 0, "c")
    others = [replace(cell, **{name: value}) for name, value in (("seed", 1), ("learning_rate", 2e-3), ("corpus", "d"))]
    texts = {json.dumps(x.to_dict()) for x in (cell, *others, replace(cell, stage=TUNE), replace(cell, layer="gla"))}
    assert len(texts) == 6 and json.loads(json.dumps(cell.to_dict())) == cell.to_dict()


def test_zero_init_defines_other_cells_and_begins_output_projections_with_zeros() -> None:
    from kalmix.training import initial_model

    plain = LanguageCell(MAIN, "gated-deltanet", TINY, 1e-3, 0, "c")
    zero = replace(plain, size=replace(TINY, model=replace(TINY.model, zero_init=True)))
    assert "zero_init" not in plain.to_dict()["size"]["model"]
    assert zero.to_dict()["size"]["model"]["zero_init"]
    for cell, expected in ((plain, False), (zero, True)):
        recipe = cell.recipe("shards")
        block = initial_model.build(recipe, recipe.vocab_size, 0).model.layers[0]
        for part in (block.mixer, block.mlp):
            assert bool((part.out_proj.weight == 0).all()) is expected


def test_embedding_norm_defines_other_cells_and_starts_the_residual_stream_with_variance_one() -> None:
    from kalmix.training import initial_model

    plain = LanguageCell(MAIN, "kla", TINY, 1e-3, 0, "c")
    normed = replace(plain, size=replace(TINY, model=replace(TINY.model, embedding_norm=True)))
    assert "embedding_norm" not in plain.to_dict()["size"]["model"]
    assert normed.to_dict()["size"]["model"]["embedding_norm"]
    for cell, expected in ((plain, 0.02), (normed, 1.0)):
        recipe = cell.recipe("shards")
        model = initial_model.build(recipe, recipe.vocab_size, 0).eval()
        stream = model(torch.arange(recipe.vocab_size)[None], output_hidden_states=True).hidden_states[0]
        assert stream.square().mean().sqrt().item() == pytest.approx(expected, rel=0.1)
        assert sum(value.numel() for value in model.parameters()) == count_parameters(cell.layer, cell.size.model)


def test_another_warmup_defines_other_cells_which_choose_their_own_rates_and_have_their_own_table() -> None:
    plain = LanguageCell(TUNE, "kla", TINY, 1e-3, 0, "c")
    longer = replace(plain, size=replace(TINY, warmup=0.2))
    assert plain.to_dict()["optimizer"]["warmup"] == plain.recipe("shards").warmup == 0.03
    assert longer.to_dict()["optimizer"]["warmup"] == longer.recipe("shards").warmup == 0.2
    assert plain.to_dict()["size"] == longer.to_dict()["size"]
    slow, fast = {**plain.to_dict(), "loss": 2.0}, {**longer.to_dict(), "learning_rate": 4e-3, "loss": 3.0}
    preset = PRESETS["laptop"]._replace(tune=TINY)
    for chosen, rate in ((preset, 1e-3), (preset.with_warmup(0.2), 4e-3)):
        choice = experiment._Choice(chosen, ["kla"], [1e-3, 4e-3], 1, (MAIN,))
        assert [cell.learning_rate for cell in choice.cells(MAIN, "c", [slow, fast])] == [rate]
    assert "warmup" not in report._condition(slow) and "warmup of 20%" in report._condition(fast)
    fast["learning_rate"] = slow["learning_rate"]
    assert len(report.group_rows([slow, fast])) == 2


def test_the_best_rate_of_each_layer_is_chosen_without_those_that_diverged() -> None:
    rows = [
        {"language": name, "learning_rate": rate, **({"diverged": "x"} if loss is None else {"loss": loss})}
        for name, rate, loss in (("kla", 1e-3, 3.0), ("kla", 2e-3, 2.5), ("kla", 4e-3, None), ("gla", 4e-3, None))
    ]
    assert best_rates(rows, ["kla"]) == best_rates(rows, ["gla", "kla"]) == {"kla": 2e-3}
    with pytest.raises(ArgumentError, match="no run of 'gla'"):
        best_rates(rows, ["gla"])
    with pytest.raises(ArgumentError, match=r"`tuned_on` is 'c'; .* \(there is none\)"):
        tuned_rates([], ["kla"], "c")
    rows += [{"language": "kla", "learning_rate": rate, "loss": loss} for rate, loss in ((1e-3, 2.8), (2e-3, 3.5))]
    assert best_rates(rows, ["kla"]) == {"kla": 1e-3}  # means over two seeds: 2.9 and 3.0
    cells = main_cells(PAPER, ["kla"], {"kla": 2e-3}, 3, "c")
    assert [(cell.seed, cell.learning_rate) for cell in cells] == [(0, 2e-3), (1, 2e-3), (2, 2e-3)]
    assert len(tuning_cells(PAPER, PAPER.layers, PAPER.rates, "c")) == 3 * len(LAYERS)
    tuning = tuning_cells(PRESETS["short"], ["kla", "gla"], [1e-3, 2e-3], "c", seeds=2)
    assert [cell.seed for cell in tuning] == [0] * 4 + [1] * 4
    assert [cell.layer for cell in tuning[:4]] == ["kla", "gla", "kla", "gla"]
    assert [cell.layer for cell in main_cells(PAPER, ["kla", "gla"], {"gla": 2e-3}, 2, "c")] == ["gla", "gla"]


def test_seconds_leave_out_the_first_step_and_pauses() -> None:
    rates = [None, 100.0, 50.0, None, 50.0]
    rows = [
        {"tokens": 100 * (n + 1), **({} if rate is None else {"tokens_per_second": rate})}
        for n, rate in enumerate(rates)
    ]
    tokens, seconds = training_seconds(rows)
    assert tokens.tolist() == [100, 200, 300, 400, 500]
    assert seconds.tolist() == [1, 2, 4, 6, 8]
    assert np.isnan(training_seconds([{"tokens": 100}])[1]).all()


def test_a_log_becomes_curves_by_tokens_and_seconds() -> None:
    history = [{"loss": 4.0 - n / 100, "tokens": 10 * (n + 1), "tokens_per_second": 5.0} for n in range(300)]
    history += [{"eval_loss": 3.0, "eval_bits_per_byte": 1.5, "tokens": 1500}, {"eval_loss": 2.0, "tokens": 3000}]
    row = summarize(history, 1000)
    assert row["loss"] == 2.0 and row["epochs"] == 3.0 and row["training_seconds"] == 600.0
    assert row["held_out"] == {"tokens": [1500, 3000], "seconds": [300.0, 600.0], "loss": [3.0, 2.0]}
    assert len(row["curve"]["loss"]) == run.CURVE_POINTS and row["curve"]["tokens"][-1] == 3000


class Copier:
    """Model that predicts the token that followed the last occurrence of the current one."""

    config, device = SimpleNamespace(vocab_size=64), torch.device("cpu")

    def __call__(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, 64)
        for row, ids in enumerate(input_ids.tolist()):
            last: dict[int, int] = {}
            for t, token in enumerate(ids):
                if token in last:
                    logits[row, t, ids[last[token] + 1]] = 50.0
                last[token] = t
        return SimpleNamespace(logits=logits)


class Words:
    """Tokenizer with 40 words, a separator and a line break."""

    def get_vocab(self) -> dict[str, int]:
        return {f"Ġ{'abcdefgh'[n % 8]}{'rstuv'[n // 8]}": n + 10 for n in range(40)} | {"Ġ": 3, "xx": 4}

    def encode(self, text: str, **_: Any) -> list[int]:
        return {" =": [1, 2], "\n": [5]}[text]


def test_recall_scores_the_values_behind_repeated_keys() -> None:
    pairs = probes.draw_pairs(Words(), 0, 8, 3)
    assert pairs is not None and probes.draw_pairs(Words(), 0, 21, 3) is None
    for tokens, values in zip(pairs.tokens, pairs.values, strict=True):
        first, second = tokens[1:].view(2, 8, 5)
        assert tokens[0] == 0 and torch.equal(first[:, 3], values)
        assert sorted(map(tuple, first.tolist())) == sorted(map(tuple, second.tolist()))
        assert torch.equal(tokens[1:][pairs.scored], second[:, 3]) and len(set(first[:, ::3].flatten().tolist())) == 16
    model: Any = Copier()
    scores = probes.score_tokens(model, pairs.tokens)
    assert not scores.correct[:, pairs.scored].all()  # it looks at one token, the separator
    found = probes.recall(model, Words(), 0, 60, 3)
    assert list(found) == ["4"] and 0 <= found["4"]["accuracy"] <= found["4"]["choice"] <= 1


def test_copying_and_positions_are_scored_on_long_documents() -> None:
    lengths, draw = [40, 9, 33, 200], np.random.default_rng(0)
    texts = [draw.permutation(64)[np.arange(n) % 64].astype(np.uint16) for n in lengths]
    shards: Any = SimpleNamespace(
        documents=4,
        lengths=lambda numbers: np.array(lengths)[numbers],
        read=lambda document, start, length: texts[document][start : start + length],
    )
    assert probes.long_documents(shards, 33, 2).tolist() == [texts[0][:33].tolist(), texts[2][:33].tolist()]
    model: Any = Copier()
    found = probes.copying(model, shards, 64, 8)
    assert list(found) == ["8", "32", "128"] and found["32"]["rows"] == 3
    assert found["32"]["accuracy"] > 0.9 and found["32"]["loss"] < 0.5 < found["32"]["first_loss"]
    assert probes.loss_by_position(model, probes.long_documents(shards, 201, 8), 50) == {"documents": 0}
    positions = probes.loss_by_position(model, probes.long_documents(shards, 200, 8), 50)
    assert positions["edges"] == [0, 16, 32, 64, 128, 199] and len(positions["loss"]) == 5
    assert positions["longer_loss"] < positions["trained_loss"]


def _row(name: str, seed: int = 0, stage: str = MAIN, rate: float = 1e-3, loss: float = 3.0) -> dict[str, Any]:
    cell = LanguageCell(stage, name, PAPER.size(stage), rate, seed, "0123456789abcdef")
    history = [{"loss": 5.0 - n / 10, "tokens": 1000 * n, "tokens_per_second": 500.0} for n in range(1, 11)]
    history += [
        {"eval_loss": loss + 1, "tokens": 5000},
        {"eval_loss": loss, "eval_bits_per_byte": 1.0, "tokens": 10000},
    ]
    tests = {
        "positions": {
            "documents": 2,
            "edges": [0, 16, 32, 64],
            "loss": [5.0, 4.0, 3.5],
            "trained_loss": 4.0,
            "longer_loss": 3.5,
        },
        "copying": {"8": {"accuracy": 0.5, "loss": 1.0}, "16": {"accuracy": 0.25, "loss": 2.0}},
        "recall": {"4": {"accuracy": 0.5, "choice": 0.75, "loss": 1.0}},
        **{"decode_rows": 8, "decode_ms": 4.5, "state_bytes": {"16": 4096, "64": 16384}},
    }
    origin = {"seconds": 1.0, "versions": {}, "device": "NVIDIA H200", "commit": "abc", "peak_memory": None}
    results = {"parameters": cell.size.model.parameters, **summarize(history, 10_000)}
    return json.loads(json.dumps({**cell.to_dict(), **origin, **results, **(tests if stage == MAIN else {})}))


def test_a_report_is_drawn_from_rows_alone(tmp_path: Path) -> None:
    from rich.console import Console

    diverged = {name: value for name, value in _row("gla").items() if name not in ("loss", "held_out", "curve")}
    rows = [_row(name) for name in LAYERS if name != "gla"]
    rows += [_row("kla", seed=1, loss=3.5), {**diverged, "diverged": "x"}]
    rows += [_row("kla", stage=TUNE, rate=rate, loss=loss) for rate, loss in ((1e-3, 3.0), (2e-3, 2.9), (4e-3, 2.8))]
    sizes = [f'kla+mlp:{{"slots": {slots}}}' for slots in (32, 4, 64, 16)]
    rows += [_row(layer, stage=TUNE, rate=2e-3, loss=2.9) for layer in sizes]
    assert Language().select(rows) == rows
    console = Console(record=True, width=240)
    (figure,) = report.write_report(rows, tmp_path, console)
    assert figure.stat().st_size > 10_000 and figure.with_suffix(".svg").exists()
    text = console.export_text()
    assert "0.004 *" in text and "3.2500 ± 0.2500" in text and "diverged" in text and "37.5" in text
    assert re.findall(r'"slots": (\d+)', text) == ["16", "32", "4", "64"]  # the same order in every process
    assert published_name('kla+mlp:{"slots": 64}') == "KLA + MLPs (slots 64)"
    found = {(x.layer, x.score): x for x in report.findings(rows)}
    assert found["kla", "held-out loss"].seeds == 2 and found["kla", "copying accuracy"].value.mean == 0.375
    assert ("gla", "held-out loss") not in found


@pytest.mark.slow
def test_models_that_shared_a_device_have_no_speed(tmp_path: Path) -> None:
    from rich.console import Console

    alone, shared = _row("gla"), {**_row("kla"), "jobs_per_device": 2}
    console = Console(record=True, width=240)
    later = {**_row("gla", seed=1), "jobs_per_device": 2, "tokens_per_second": 7.0, "commit": "later"}
    report.write_report([alone, shared, later], tmp_path, console)
    text = console.export_text()
    assert " ".join(text.split()).count("commit abc, later") == 2
    cost = {words[0]: words for words in map(str.split, text[text.index("cost") :].splitlines()) if words}
    assert "500" in cost["gla"] and "4.50" in cost["gla"]
    assert "500" not in cost["kla"] and "4.50" not in cost["kla"] and "KiB" in cost["kla"]
    assert "Times and speeds leave out models that shared a device." in " ".join(text.split())
    panels = {panel.title: panel.curves for panel in report._panels(report.group_rows([alone, shared, later]), "")}
    assert len(panels["by tokens"]) == 2 and len(panels["by time"]) == 1
    cells = [LanguageCell(MAIN, name, PAPER.main, 1e-3, 0, "c") for name in ("gla", "kla")]
    console = Console(record=True, width=240)
    console.print(plan_table(cells, None, "H200", 0.3, [{**alone, "mfu": 0.125}, {**shared, "mfu": 0.125}]))
    plan = {words[1]: words for words in map(str.split, console.export_text().splitlines()) if words[1:2]}
    assert ("0.125" in plan["gla"], "0.125" in plan["kla"]) == (True, False)  # where none was measured, the assumed MFU


@pytest.mark.slow
def test_losses_at_equal_time_are_interpolated_between_finished_runs_alone(tmp_path: Path) -> None:
    from rich.console import Console

    def finished(name: str, tokens: int, loss: float, speed: float, **options: Any) -> dict[str, Any]:
        row = _row(name, loss=loss)
        size = {**row["size"], "tokens": tokens}
        return {**row, "size": size, "tokens": tokens, "tokens_per_second": speed, **options}

    rows = [finished("attention", tokens, loss, 100.0) for tokens, loss in ((1000, 4.0), (4000, 3.0))]
    rows += [finished("gla", 1000, 5.0, 1.0), finished("gla", 4000, 4.5, 200.0)]  # the speed of the longest run counts
    rows += [finished("kla", 1000, 4.0, 50.0), finished("kla", 4000, 2.0, 50.0)]
    rows += [finished("afa", 1000, 4.0, 50.0), finished("afa", 4000, 2.0, 50.0, jobs_per_device=2)]
    console = Console(record=True, width=240)
    report.write_report(rows, tmp_path, console)
    text = console.export_text()
    lines = map(str.split, text[text.index("equal training") :].splitlines())
    table = {words[0]: words[4:] for words in lines if words[1:2] == ["0.001"]}
    none = ["not", "measured"]
    assert table["attention"] == ["3.0000", "0.002M", "3.5000", "0.004M", "3.0000"]
    assert table["gla"] == ["4.5000", "0.004M", "4.5000", "0.008M", *none]
    assert table["kla"] == ["2.0000", "0.001M", "4.0000", "0.002M", "3.0000"]
    assert table["afa"] == [*none, *none]  # without speed
    assert "attention trains on 0.004M tokens in 40.0 s; gla trains on 0.004M tokens in 20.0 s" in " ".join(
        text.split()
    )
    report.write_report(rows[1::2], tmp_path, console)  # one number of tokens
    assert "equal training" not in console.export_text(clear=False)[len(text) :]
    assert report.loss_at(999, {1000: 4.0, 4000: 3.0}) is None


@pytest.mark.slow
def test_a_stopped_run_continues_exactly_and_ends_with_all_tests(word_shards: Path, tmp_path: Path) -> None:
    cell = LanguageCell(
        MAIN, "gated-deltanet+attention", replace(TINY, model=replace(TINY.model, depth=4)), 1e-2, 0, "c"
    )
    whole = run_cell(cell, word_shards, tmp_path / "whole", lambda done, status: False)
    with pytest.raises(CellStopped):
        run_cell(cell, word_shards, tmp_path / "cut", lambda done, status: done >= 0.4)
    assert list((tmp_path / "cut" / "checkpoints").glob("checkpoint-*"))
    again = run_cell(cell, word_shards, tmp_path / "cut", lambda done, status: False)
    for name in ("loss", "tokens", "epochs", "copying", "recall", "positions", "state_bytes"):
        assert again[name] == whole[name], name
    assert again["held_out"]["loss"] == whole["held_out"]["loss"] and len(whole["held_out"]["loss"]) == 10
    assert whole["positions"]["documents"] == 2 and set(whole["copying"]) == {"4", "16", "64"}
    assert whole["state_bytes"]["128"] > whole["state_bytes"]["32"] and whole["decode_ms"] > 0
    tested = run_cell(cell, word_shards, tmp_path / "whole", lambda done, status: False)  # stopped while it was tested
    assert tested["loss"] == whole["loss"] and tested["copying"] == whole["copying"]


def test_a_diverged_run_is_a_row(word_shards: Path, tmp_path: Path, diverging: None) -> None:
    cell = LanguageCell(TUNE, "attention", TINY, 1e-2, 0, "c")
    row = run_cell(cell, word_shards, tmp_path / "run", lambda done, status: False)
    assert "diverged" in row["diverged"] and "loss" not in row


def test_committed_rows_are_reported(kalmix, tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "results" / "2026-11-23-x86-64-cpu-language"
    result = kalmix("bench", "report", folder, "--output", tmp_path)
    assert result.status == 0, result.errors
    assert "4.7801" in result.output and "0.04 *" in result.output and (tmp_path / "language.svg").exists()
