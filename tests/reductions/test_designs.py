"""Every design in the catalogue, and a new one, agrees with the oracle."""

import pytest
import torch

import kalmix
from kalmix.designs import CATALOGUE, Covariance, Design, Evidence, Transition
from kalmix.errors import ArgumentError, DesignError
from kalmix.ops import OPS, Exact
from kalmix.ops._shared.kernel import KernelRequest
from kalmix.testing.cases import outputs

MEMORY, DENSE, RESET = Evidence(kind="memory"), Covariance(kind="dense"), Covariance(kind="reset")
CELLS, DIAGONAL = Evidence(kind="cell"), Covariance(kind="diagonal")
INFORMATION = Covariance(kind="information")
OWN = [
    Design("still-cells", Transition(), CELLS, DIAGONAL),
    Design("diffusing-cells", Transition(diffusion=True), CELLS, DIAGONAL),
    Design("decaying-cells", Transition(decay="cell"), CELLS, DIAGONAL),
    Design("least-squares", Transition(), MEMORY, DENSE),
    Design("forgetting-least-squares", Transition(decay="head"), MEMORY, DENSE),
    Design("random-walk", Transition(diffusion=True), MEMORY, DENSE),
    Design("ridge-regression", Transition(), MEMORY, INFORMATION),
    Design("no-diffusion", Transition("time"), Evidence("state"), Covariance("lag")),
]
B, T, H, G, K, V = 2, 11, 2, 4, 3, 5
OPTIONS = {"ridge": {"solver": Exact()}}  # options that make an op exact


def signals(design, width=None):
    torch.manual_seed(0)
    width = width or (1 if design.evidence.columns else V)
    per_key = design.transition.decay == "key"
    cells, state = design.evidence.kind == "cell", design.evidence.kind == "state"
    key_width, width = (4, 4) if state else (K, width)  # complex pairs
    shapes = (
        dict.fromkeys(design.signals, (H,)) | {"frequency": (H, key_width // 2)}
        if state
        else {
            "log_decay": (G, K, width) if cells else (B, T, G, K) if per_key else (B, T, G),
            "process_noise": (G, K, width) if cells else (B, T, G),
            "precision": (B, T, G, width),
        }
    )
    drawn = {name: torch.randn(shapes.get(name, (B, T, G))).double().exp() for name in design.signals}
    if "log_decay" in drawn:
        drawn["log_decay"] = -drawn["log_decay"]
    return {
        "q": torch.randn(B, T, H, key_width).double(),
        "k": torch.randn(B, T, H, key_width).double(),
        "v": torch.randn(B, T, G, width).double(),
        **drawn,
    }


def leaves_with_gradients(filtered):
    """Return the leaves that have gradients: not the times and positions of a history."""
    return [x for x in outputs(filtered) if x.requires_grad]


def kernels(op):
    request = KernelRequest("cpu", torch.float64, K, V, T)
    return [kernel.name for kernel in OPS[op].kernels if kernel.unsupported_reason(request) is None]


@pytest.mark.parametrize("design", [*CATALOGUE.values(), *OWN], ids=lambda design: design.name)
def test_filter_agrees_with_the_oracle(design):
    given = signals(design)
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    want = leaves_with_gradients(kalmix.oracle(design, **leaves, variance=design.has_variance))
    weights = [torch.randn_like(x) for x in want]
    gradients = torch.autograd.grad(want, list(leaves.values()), weights)
    names = [name for name in kernels(design.op) if name in ("reference", "chunked")]
    assert "reference" in names
    for kernel in names:
        options = {"variance": design.has_variance, "kernel": kernel} | OPTIONS.get(design.op, {})
        got = leaves_with_gradients(kalmix.filter(design, **leaves, **options))
        assert all(float((x - y).detach().abs().max()) < 1e-10 for x, y in zip(got, want, strict=True))
        d_got = torch.autograd.grad(got, list(leaves.values()), weights)
        assert all(float((x - y).norm() / y.norm()) < 1e-10 for x, y in zip(d_got, gradients, strict=True))


def test_designs_are_data():
    assert CATALOGUE["kla"] == kalmix.designs.KLA
    assert hash(kalmix.designs.KLA) == hash(CATALOGUE["kla"])
    with pytest.raises(AttributeError):
        kalmix.designs.KLA.name = "other"  # type: ignore[misc]
    assert kalmix.designs.KLA.signals == ("log_decay", "process_noise", "precision")
    assert kalmix.designs.BAYESIAN.signals == ("log_decay", "process_noise", "obs_noise")
    assert kalmix.designs.BAYESIAN.optional == ("angle",)


def test_the_catalogue_is_the_table_of_the_papers():
    ops = {name: design.op for name, design in CATALOGUE.items()}
    additive = dict.fromkeys(("linear-attention", "retnet", "gla", "mamba2"), "additive")
    delta = dict.fromkeys(("deltanet", "gated-deltanet", "kda", "longhorn"), "delta")
    assert ops == additive | delta | {
        "kla": "diagonal",
        "bayesian": "dense",
        "gated-kalmanet": "ridge",
        "afa": "attend",
    }
    assert all(design.citation and design.equations for design in CATALOGUE.values())


ILLEGAL = [
    ((Transition(), Evidence(kind="input"), DENSE), "No op filters evidence 'input' with covariance 'dense'"),
    ((Transition(), CELLS, DENSE), "No op filters evidence 'cell' with covariance 'dense'"),
    ((Transition(diffusion=True), MEMORY, RESET), "diffusion has no effect"),
    ((Transition(diffusion=True), MEMORY, INFORMATION), "process noise"),
    (
        (Transition(decay="forgetting"), MEMORY, DENSE),
        "'forgetting' is not supported; expected 'none', 'head', 'key' or 'matrix'",
    ),
    ((Transition(decay="cell"), MEMORY, DENSE), "'cell' is not supported; expected 'none', 'head', 'key' or 'matrix'"),
    ((Transition(decay="key"), CELLS, DIAGONAL), "'key' is not supported; expected 'none' or 'cell'"),
    ((Transition(rotation=True), MEMORY, RESET), "rotation is not supported"),
]


@pytest.mark.parametrize(("parts", "sentence"), ILLEGAL, ids=[sentence for _, sentence in ILLEGAL])
def test_illegal_combinations_raise_a_one_line_error(parts, sentence):
    with pytest.raises(DesignError, match=sentence) as caught:
        Design("mine", *parts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("part", "value"), [(Transition, "slot"), (Evidence, "nothing"), (Covariance, "half")])
def test_unknown_parts_fail(part, value):
    with pytest.raises(DesignError, match="; expected '"):
        part(value)


def test_complex_values_have_no_noise_per_column():
    with pytest.raises(DesignError, match="`columns` is True with kind 'state'"):
        Evidence("state", columns=True)


def test_only_the_oracle_accepts_a_matrix():
    design = Design("any", Transition(decay="matrix"), MEMORY, DENSE)
    given = signals(design) | {"matrix": torch.randn(B, T, G, K, K).double() / K}
    rotated = kalmix.oracle(design, **given).mean
    assert rotated.shape == (B, T, G, V)
    with pytest.raises(DesignError, match=r"use kalmix\.oracle"):
        kalmix.filter(design, **given)
    diagonal = given | {"matrix": torch.diag_embed(torch.full((B, T, G, K), 0.5).double())}
    decays = {name: x for name, x in given.items() if name != "matrix"} | {
        "log_decay": torch.full((B, T, G), 0.5).log()
    }
    same = Design("same", Transition(decay="head"), MEMORY, DENSE)
    assert float((kalmix.oracle(design, **diagonal).mean - kalmix.oracle(same, **decays).mean).abs().max()) < 1e-6


def test_requesting_an_absent_variance_raises():
    for call in (kalmix.filter, kalmix.oracle):
        with pytest.raises(DesignError, match="has no variance"):
            call(kalmix.designs.KDA, **signals(kalmix.designs.KDA), variance=True)


def test_names_instead_of_designs_and_parts_are_refused():
    for call in (kalmix.filter, kalmix.oracle):
        with pytest.raises(ArgumentError, match="`design` is 'kda'; expected a Design"):
            call("kda", **signals(kalmix.designs.KDA))
    for part, value in {"transition": "head", "evidence": Transition("head"), "covariance": None}.items():
        parts = {"transition": Transition("head"), "evidence": MEMORY, "covariance": DENSE}
        with pytest.raises(ArgumentError, match=f"`{part}` is .*; expected a {part.title()}"):
            Design("wrong", **parts | {part: value})
    with pytest.raises(ArgumentError, match="`name` is 3; expected a string"):
        Design(3, **parts)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", [lambda: Transition("head", diffusion="yes"), lambda: Evidence("memory", columns=1)])
def test_flags_of_parts_are_booleans(part):
    with pytest.raises(ArgumentError, match="expected True or False"):
        part()


def test_the_oracle_checks_shapes():
    design, given = kalmix.designs.DELTANET, signals(kalmix.designs.DELTANET)
    short = {name: given[name][:, :1] for name in ("q", "k", "v", "reset", "obs_noise")}
    for name, wrong in short.items():
        with pytest.raises(ArgumentError, match=r"`(q|k|v|reset|obs_noise)` has shape"):
            kalmix.oracle(design, **given | {name: wrong})
    with pytest.raises(ArgumentError, match="`segments`"):
        kalmix.oracle(design, **given, segments=kalmix.Segments.packed(torch.tensor([0, 99])))


@pytest.mark.parametrize("design", CATALOGUE.values(), ids=lambda design: design.name)
def test_signals_of_wrong_shape_are_refused(design):
    given = signals(design)
    for name in design.signals:
        for wrong in (given[name].repeat_interleave(2, 0), given[name].sum()):
            with pytest.raises(ArgumentError):
                kalmix.filter(design, **given | {name: wrong})


@pytest.mark.parametrize("design", CATALOGUE.values(), ids=lambda design: design.name)
def test_missing_and_unknown_signals_are_named(design):
    given = signals(design)
    for call in (kalmix.filter, kalmix.oracle):
        with pytest.raises(DesignError, match=f"lacks {design.signals[-1]}"):
            call(design, **{name: x for name, x in given.items() if name != design.signals[-1]})
        with pytest.raises(DesignError, match=f"does not accept gain; it accepts {', '.join(design.signals) or 'no'}"):
            call(design, **given, gain=given["v"])


def test_default_priors_are_the_oracles():
    for design in CATALOGUE.values():
        given = signals(design)
        got, want = kalmix.filter(design, **given, **OPTIONS.get(design.op, {})), kalmix.oracle(design, **given)
        assert float((got.mean - want.mean).abs().max()) < 1e-12


def test_values_of_a_design_with_a_noise_per_column_have_width_1():
    with pytest.raises(ArgumentError, match=r"`v` has width 2; expected width 1.*one noise per column"):
        kalmix.filter(kalmix.designs.LONGHORN, **signals(kalmix.designs.LONGHORN, width=2))


@pytest.mark.parametrize("name", ["deltanet", "linear-attention", "gated-kalmanet"])
def test_noises_of_another_dtype_are_named(name):
    given = signals(CATALOGUE[name])
    given |= {"obs_noise": given["obs_noise"].half()}
    with pytest.raises(ArgumentError, match="`obs_noise` has dtype"):
        kalmix.filter(CATALOGUE[name], **given)


@pytest.mark.parametrize("name", ["retnet", "gated-deltanet"])
def test_decays_per_key_are_refused_by_designs_with_one_per_head(name):
    given = signals(CATALOGUE[name])
    given |= {"log_decay": given["log_decay"][..., None].expand(B, T, G, K)}
    for run in (kalmix.filter, kalmix.oracle):
        with pytest.raises(ArgumentError, match=r"`log_decay` has shape.*one decay per head"):
            run(CATALOGUE[name], **given)
