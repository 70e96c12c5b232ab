"""Recipes as files: those that come with kalmix, and how files and settings are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kalmix import ArgumentError
from kalmix.models.optimizer import optimizer_groups
from kalmix.training import Recipe
from kalmix.training.batching import plan_batches
from kalmix.training.estimates import estimate
from kalmix.training.initial_model import build
from kalmix.training.recipe_files import read_recipe, recipe_names
from kalmix.training.run import train

NAMES = recipe_names()
MILLIONS = {"45m": 45, "180m": 180, "440m": 440, "1b": 1000, "2.8b": 2800}
VARIANTS = ("kla-plus-45m", "kla-code-45m")
TABLE_13 = {"45m": (496, 1.8e9, 131_072), "180m": (1360, 10.9e9, 524_288)}
TABLES_4_AND_5 = {  # blocks, heads, width, batch, tokens, context
    "gka-440m": (28, 8, 1024, 2**20, 8e9, 2048),
    "gka-1b": (28, 12, 1536, 2**21, 20e9, 2048),
    "gka-2.8b": (32, 20, 2560, 2**21, 100e9, 4096),
}


@pytest.mark.parametrize("name", NAMES)
def test_recipe_of_a_paper_has_the_size_of_its_name(name: str) -> None:
    """The model is built on the device "meta", as `--dry-run` does."""
    recipe = read_recipe(name, ["shards=x"])
    found = estimate(recipe, plan_batches(recipe, 8))
    size = name.removesuffix("-128k").rpartition("-")[2]
    assert found.parameters / 1e6 == pytest.approx(MILLIONS[size], rel=0.15)
    assert found.flops is not None and found.flops > 6 * found.parameters * recipe.tokens * 0.5
    assert size.upper() in recipe.description and "(" in recipe.description


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("gka", *VARIANTS))])
def test_recipes_of_table_13(name: str) -> None:
    recipe = read_recipe(name)
    width, tokens, batch = TABLE_13[name.rpartition("-")[2]]
    assert (recipe.tokens, recipe.batch_tokens, recipe.seq_len, recipe.vocab_size) == (tokens, batch, 2048, 32768)
    assert (recipe.betas, recipe.eps, recipe.clip, recipe.cooldown, recipe.warmup) == ((0.8, 0.95), 1e-10, 3.0, 0.4, 0)
    assert (recipe.learning_rates, recipe.weight_decays) == ({"embeddings": 0.3}, {"head": 0.1})
    mixers = [layer["mixer"] for layer in recipe.layers]
    kinds = {"gpt": "attention", "mamba": "mamba2", "gdn": "gated-deltanet", "kla": "kla"}
    first, *_, last = name.split("-")[:-1] * 2
    assert mixers == [kinds[first]] * 11 + [kinds[last]]
    if first == "kla":
        assert recipe.hidden_size == width and all(layer["slots"] == 32 for layer in recipe.layers)
    reference = read_recipe(f"kla-{name.rpartition('-')[2]}")
    counts = [estimate(x, plan_batches(x, 1)).parameters for x in (recipe, reference)]
    assert counts[0] == pytest.approx(counts[1], rel=0.07)


@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        ("kla-plus-45m", {"loss": "marginal"}, {}),
        ("kla-code-45m", {}, {"value": "conv", "rank": 62, "initial_skip": -1.0}),
    ],
    ids=VARIANTS,
)
def test_variants_of_kla_differ_from_it_in_loss_and_block_only(name: str, changes: dict, options: dict) -> None:
    recipe, kla = read_recipe(name), read_recipe("kla-45m")
    model = {"loss_samples": 10, "predict": "marginal"} if name == "kla-plus-45m" else {}
    layers = tuple({**layer, **options} for layer in kla.layers)
    expected = {"layers": layers, "model": {**kla.model, **model}, "description": recipe.description}
    assert recipe == replace(kla, **expected, **changes)
    counts = [estimate(x, plan_batches(x, 1)).parameters for x in (kla, recipe)]
    width = kla.hidden_size  # projections of v and noise, replaced by one of the noise through the rank
    saved = 12 * (2 * width * width - 2 * 62 * width) if options else 0
    assert counts[0] - counts[1] == saved


@pytest.mark.parametrize("name", TABLES_4_AND_5)
def test_recipes_of_tables_4_and_5(name: str) -> None:
    recipe = read_recipe(name)
    blocks, heads, width, batch, tokens, length = TABLES_4_AND_5[name]
    assert (len(recipe.layers), recipe.layers[0]["heads"], recipe.hidden_size) == (blocks, heads, width)
    assert (recipe.batch_tokens, recipe.tokens, recipe.seq_len) == (batch, tokens, length)
    assert (recipe.learning_rate, recipe.warmup, recipe.schedule, recipe.clip) == (1e-3, 0.05, "cosine", 1.0)


@pytest.mark.parametrize("name", ["gka-hybrid-2.8b", "gka-hybrid-2.8b-128k"])
def test_hybrid_of_appendix_m(name: str) -> None:
    recipe = read_recipe(name, ["shards=x"])
    attention = [i for i, layer in enumerate(recipe.layers) if layer["mixer"] == "attention"]
    assert (len(recipe.layers), attention) == (30, [6, 14, 22, 29])
    assert all(layer["heads"] == 20 for layer in recipe.layers)
    if name.endswith("128k"):
        assert (recipe.seq_len, recipe.tokens) == (131_072, 25e9)


@pytest.mark.parametrize("name", [name for name in NAMES if "1b" in name or "2.8b" in name])
@pytest.mark.slow
def test_large_recipe_takes_a_step_at_reduced_size(name: str, shards: Path, tmp_path: Path) -> None:
    """Heads keep their sizes. The hidden size is reduced, because a checkpoint of full width takes gigabytes."""
    settings = ["steps=1", "vocab_size=288", "hidden_size=256", "fsdp=false", "context_parallel=1"]
    recipe = read_recipe(name, [f"shards={shards}", *settings])
    small = {"layers": recipe.layers[5:7], "seq_len": 32, "batch_tokens": 32, "eval_tokens": 0}
    assert train(replace(recipe, **small), tmp_path / "run").finished


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if "1b" in name or "2.8b" in name])
def test_large_recipe_takes_a_step_at_its_width(name: str) -> None:
    """One block of each kind, at the real hidden size, heads and MLP. Only depth, vocabulary and length are reduced."""
    recipe = read_recipe(name, ["shards=x"])
    kinds = {layer["mixer"]: layer for layer in recipe.layers}
    assert set(kinds) == ({"gated-kalmanet", "attention"} if "hybrid" in name else {"gated-kalmanet"})
    model = build(replace(recipe, layers=tuple(kinds.values())), 512, 0).train()
    scale = recipe.lr_scale(recipe.batch_tokens)
    groups = optimizer_groups(
        model,
        learning_rate=scale * recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        learning_rates=recipe.learning_rates,
        weight_decays=recipe.weight_decays,
    )
    optimizer = torch.optim.AdamW(groups, betas=recipe.betas, eps=recipe.eps)
    ids = torch.randint(512, (1, 64), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(2):
        loss = model(ids, labels=ids, skip_logits=True).loss
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        assert norm.isfinite() and norm > 0
        optimizer.step()
    assert losses[1] < losses[0]


@pytest.mark.parametrize("name", ["kla-45m", *VARIANTS, "gpt-mamba-45m", "gpt-gdn-45m"])
def test_recipe_trains_at_reduced_width(name: str, shards: Path, tmp_path: Path) -> None:
    recipe = read_recipe(name, [f"shards={shards}", "steps=2", "vocab_size=288", "hidden_size=16", "eval_tokens=0"])
    layers = tuple({k: v for k, v in x.items() if k not in ("heads", "head_dim")} for x in recipe.layers[-2:])
    ended = train(replace(recipe, layers=layers, seq_len=32, batch_tokens=64), tmp_path / "run")
    assert ended.training[0][1] > ended.training[1][1]


def write(folder: Path, text: str) -> str:
    (folder / "mine.toml").write_text(text)
    return str(folder / "mine.toml")


def test_file_and_settings_are_read(tmp_path: Path) -> None:
    layers = 'layers = [{ mixer = "kla", slots = 4, repeat = 2 }, "attention"]'
    path = write(tmp_path, f"{layers}\ntokens = 1e9\nbetas = [0.8, 0.9]\n[learning_rates]\nhead = 1e-3\n")
    kla = {"mixer": "kla", "slots": 4}
    expected = Recipe(layers=(kla, kla, "attention"), tokens=10**9, betas=(0.8, 0.9), learning_rates={"head": 1e-3})
    assert read_recipe(path) == expected
    assert read_recipe(write(tmp_path, f"\ufeff{Path(path).read_text()}")) == expected  # a byte-order mark of Windows
    assert isinstance(read_recipe(path).tokens, int)
    settings = ["steps=5", "layers=2*kla,attention", "text = a/b=c.txt", "learning_rates.embeddings=0.3", "clip=none"]
    changed = read_recipe(path, settings)
    assert changed == replace(
        expected,
        **{"steps": 5, "tokens": None, "layers": ("kla", "kla", "attention"), "text": "a/b=c.txt", "clip": None},
        learning_rates={"head": 1e-3, "embeddings": 0.3},
    )
    assert read_recipe(path, ["steps=none"]).tokens == 10**9
    assert read_recipe(path, ["report_to=wandb"]).report_to == ("wandb",)
    assert read_recipe(path, ["report_to=none"]).report_to == ()
    assert read_recipe(path, ['report_to=["wandb", "mlflow"]']).report_to == ("wandb", "mlflow")
    assert read_recipe(path, ['shards={"a.b" = 1.0, c = 2.0}']).shards == {"a.b": 1.0, "c": 2.0}


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("steps = ", [], "no TOML"),
        ("step = 3", [], "has no setting 'step'"),
        ("steps = 3", ["stepz=4"], "has no setting 'stepz'.*Did you mean 'steps'"),
        ("steps = 3", ["lr=4"], "has no setting 'lr'.*Did you mean 'learning_rate' or 'learning_rates'"),
        ("steps = 3", ["steps"], "`set` is 'steps'"),
        ("steps = 3", ["steps.more=2"], "it is no mapping"),
        ("steps = 3", ["shards={a/b=1}"], r"`set` is 'shards={a/b=1}', which is no TOML .*folders in single quotes"),
        ("steps = 3", [r'shards={"C:\data"=1}'], r"which is no TOML .*folders in single quotes"),
        ("steps = 3", ["model={a: 1}"], r"`set` is 'model={a: 1}', which is no TOML .*; expected a table of TOML\.$"),
        ("steps = 3", ["steps=many"], "`steps` is 'many'"),
        ("steps = 3.5", [], "`steps` is 3.5"),
        ('steps = 3\nlayers = [{ mixer = "kla", repeat = 0 }]', [], "`repeat` of 0"),
        ("steps = 3\nlayers = 3", [], "`layers`"),
    ],
)
def test_wrong_files_and_settings_are_refused(text: str, settings: list, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message):
        read_recipe(write(tmp_path, text), settings)


def test_example_for_a_laptop_is_a_small_recipe() -> None:
    recipe = read_recipe(str(Path(__file__).parents[2] / "examples" / "laptop.toml"), ["shards=x"])
    batching = plan_batches(recipe, 1)
    found = estimate(recipe, batching)
    assert 1e6 < found.parameters < 2e6 and recipe.steps * batching.step_tokens < 5e5


def test_unknown_recipe_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"'kla-46m', which does not exist.*'kla-45m'"):
        read_recipe("kla-46m")


def test_a_run_of_format_3_has_a_decay_per_key(tmp_path: Path) -> None:
    layers = ("kla", "bayesian", {"mixer": "bayesian", "decays_per_head": 2})
    Recipe(layers=layers, hidden_size=16, steps=3).save(tmp_path)
    assert Recipe.load(tmp_path).layers == layers
    file = tmp_path / "recipe.json"
    file.write_text(file.read_text().replace('"format": 4', '"format": 3'))
    assert Recipe.load(tmp_path).layers == ("kla", {"mixer": "bayesian", "decays_per_head": "key"}, layers[2])
