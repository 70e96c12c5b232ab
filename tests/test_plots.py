"""Wrong arguments of figures."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from kalmix import ArgumentError
from kalmix.analysis import plots


@pytest.mark.parametrize(
    ("weights", "tokens", "names"),
    [
        (torch.ones(1, 3, 3), ["a", "b"], ["kla"]),
        (torch.ones(1, 3, 3), ["a", "b", "c"], ["kla", "gla"]),
        (torch.ones(3, 3), ["a", "b", "c"], ["kla"]),
        (-torch.ones(1, 3, 3).tril(), ["a", "b", "c"], ["kla"]),
        (torch.ones(1, 3, 3), ["a", "b", "c"], ["kla"]),
        (torch.full((1, 3, 3), torch.nan).tril(), ["a", "b", "c"], ["kla"]),
        ("text", ["a", "b", "c"], ["kla"]),
    ],
)
def test_wrong_attention_maps_are_refused(weights, tokens, names, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="weights"):
        plots.attention_maps(tmp_path / "maps.png", weights, tokens, names)


ROW = [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("weights", lambda path: plots.channel_maps(path, torch.ones(2, 3, 3).tril(), "abc", ["one"])),
        ("weights", lambda path: plots.channel_maps(path, torch.ones(1, 3, 3, dtype=torch.cfloat), "abc", ["one"])),
        ("names", lambda path: plots.channel_maps(path, torch.ones(0, 3, 3), "abc", [])),
        ("tokens", lambda path: plots.channel_maps(path, torch.ones(1, 3, 3).tril(), [1, 2, 3], ["one"])),
        ("surprisal", lambda path: plots.beliefs(path, "abc", [1.0], ROW, ROW, ["one"])),
        ("variance", lambda path: plots.beliefs(path, "abc", ROW[0], ROW[0], ROW, ["one"])),
        ("variance", lambda path: plots.beliefs(path, "abc", ROW[0], [[1.0, -2.0, 3.0]], ROW, ["one"])),
        ("gain", lambda path: plots.beliefs(path, "abc", ROW[0], ROW, [[1.0, float("nan"), 3.0]], ["one"])),
        ("variance", lambda path: plots.posterior_variance(path, ROW, "abc", ["one", "two"])),
        ("variance", lambda path: plots.posterior_variance(path, ROW, "ab", ["one"])),
        ("variance", lambda path: plots.posterior_variance(path, [torch.ones(3, 2, 2)], "abc", ["one"])),
        ("variance", lambda path: plots.posterior_variance(path, [[-1.0, 2.0, 3.0]], "abc", ["one"])),
        ("marks", lambda path: plots.posterior_variance(path, ROW, "abc", ["one"], marks={"names": [2]})),
        ("training", lambda path: plots.loss_curve(path, [1.0, 2.0, 3.0, 4.0], [])),
        ("training", lambda path: plots.loss_curve(path, torch.ones(2, 4), [])),
        ("held_out", lambda path: plots.loss_curve(path, [(1.0, 2.0)], [(1.0, float("nan"))])),
        ("references", lambda path: plots.loss_curve(path, [(1.0, 2.0)], [], references={"gzip": "2"})),
        ("references", lambda path: plots.loss_curve(path, [(1.0, 2.0)], [], references=[1.0])),
        ("path", lambda path: plots.loss_curve(path.with_suffix(".xyz"), [(1.0, 2.0)], [])),
        ("path", lambda path: plots.loss_curve(path.with_suffix(""), [(1.0, 2.0)], [])),
    ],
)
def test_wrong_arguments_of_figures_are_named(name: str, draw, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"`{name}`"):
        draw(tmp_path / "figure.svg")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_figures_draw_tensors_that_require_gradients_and_unknown_values(tmp_path: Path) -> None:
    weights = torch.ones(1, 3, 3, dtype=torch.bfloat16, requires_grad=True).tril()
    plots.attention_maps(tmp_path / "maps.svg", weights, "abc", ["one"])
    plots.beliefs(tmp_path / "beliefs.svg", "abc", [float("nan"), 1.0, 2.0], ROW, ROW, ["one"])
    plots.posterior_variance(tmp_path / "variance.svg", [[float("nan"), 1.0, 2.0], torch.ones(3, 4)], "abc", "xy")
    plots.loss_curve(tmp_path / "loss.svg", [], [])
    assert len(list(tmp_path.iterdir())) == 4
