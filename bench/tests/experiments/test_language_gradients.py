"""Gradients of models of `kalmix bench language`, compared with those of other kernels."""

import pytest
import torch

from kalmix.errors import ArgumentError
from kalmix_bench.experiments.language.gradients import compare, errors
from kalmix_bench.experiments.language.protocol import PRESETS


@pytest.mark.slow
def test_default_kernels_have_the_gradients_of_the_reference() -> None:
    row = compare("kla", PRESETS["laptop"], torch.device("cpu"), rows=3, part=2, kernel="reference")
    assert row["rows"] == 3
    for name in ("training", "float32"):
        assert row["loss"][name] == pytest.approx(row["loss"]["exact"], rel=1e-5)
        assert 0 < row["errors"][name]["largest"] < 1e-3, row["errors"][name]


def test_errors_name_the_parameter_that_is_wrong() -> None:
    exact = {"a": torch.ones(4), "b": torch.full((2,), 3.0)}
    found = errors({"a": torch.tensor([1.0, 1.0, 1.0, 2.0]), "b": exact["b"]}, exact)
    assert found["parameter"] == "a" and found["largest"] == pytest.approx(0.5)
    assert found["all"] == pytest.approx(1 / 22**0.5)


def test_a_gradient_that_is_not_a_number_is_the_worst() -> None:
    found = errors({"a": torch.ones(2), "b": torch.full((2,), torch.nan)}, {"a": torch.zeros(2), "b": torch.ones(2)})
    assert found["parameter"] == "b" and found["largest"] != found["largest"]


def test_a_layer_without_kernels_is_refused() -> None:
    with pytest.raises(ArgumentError, match="several kernels"):
        compare("attention", PRESETS["laptop"], torch.device("cpu"), rows=1)
