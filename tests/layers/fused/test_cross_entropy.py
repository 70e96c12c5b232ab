"""Cross-entropy of a linear head: both forms against the composition of PyTorch's functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from forms import DEVICE, form
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kalmix import ArgumentError
from kalmix.layers.fused import cross_entropy, linear_cross_entropy

pytest.importorskip("triton")
FORMS = ["eager", "triton"]
SHAPES = [((2, 5), 8, 37), ((1,), 1, 1), ((7,), 3, 64), ((3, 2, 2), 16, 4100)]  # tokens, width, words


def problem(shape=(2, 5), width=8, words=37, dtype=torch.float32):
    """Return hidden states, weight, bias and targets, a third of which are ignored."""
    torch.manual_seed(0)
    targets = torch.randint(words, shape)
    targets[torch.rand(shape) < 1 / 3] = -100
    tensors = torch.randn(*shape, width), torch.randn(words, width) / width**0.5, torch.randn(words)
    return [*(x.to(DEVICE, dtype) for x in tensors), targets.to(DEVICE)]


def composed(hidden, weight, targets, bias=None):
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())


def differentiated(loss, tensors, targets) -> list[Tensor]:
    """Return the loss of hidden states, weight and perhaps a bias, and gradients of 3 times the loss."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    value = loss(*leaves[:2], targets, *leaves[2:])
    return [value, *torch.autograd.grad(3 * value, leaves)]


@pytest.fixture
def small_chunks(monkeypatch):
    """Make chunks of two tokens of 37 float32 words."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 300)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("shape", "width", "words"), SHAPES)
def test_equals_the_composition(shape, width, words, name, dtype, biased, small_chunks):
    """In half precision, errors are those of the composition: both round logits and their gradient."""
    *tensors, targets = problem(shape, width, words, dtype)
    targets.view(-1)[0] = words - 1
    tensors = tensors if biased else tensors[:2]
    exact = differentiated(composed, [x.double() for x in tensors], targets)
    with form(name):
        found = differentiated(linear_cross_entropy, tensors, targets)
    assert [x.dtype for x in found] == [torch.promote_types(dtype, torch.float32), *(x.dtype for x in tensors)]
    usual = differentiated(composed, tensors, targets)
    for x, y, truth in zip(found, usual, exact, strict=True):
        assert x.shape == truth.shape
        rounding = torch.finfo(dtype).eps * truth.abs().max().clamp(min=1)
        assert (x - truth).abs().max() <= 2 * (y - truth).abs().max() + 16 * rounding


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("size", [1, 3 * 37 * 4, 9 * 37 * 4, 10 * 37 * 4, 2**28])
def test_size_of_chunks_changes_nothing(size, name, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", size)
    *tensors, targets = problem()
    with form(name):
        found = differentiated(linear_cross_entropy, tensors, targets)
    torch.testing.assert_close(found, differentiated(composed, tensors, targets))


@pytest.mark.parametrize("words", [280, 1000])
def test_unwritten_memory_is_not_read(words, monkeypatch):
    """In bfloat16, matrix products of x86 CPUs with AMX read up to 31 numbers behind a row, and multiply them by 0.

    On other machines, the results are finite anyway, so look at these numbers, too.
    """
    product = torch.mm

    def checked_product(left, right, *, out):
        rows = left.as_strided((len(left), left.stride(0)), left.stride())
        assert rows.isfinite().all()
        return product(left, right, out=out)

    monkeypatch.setattr(torch, "mm", checked_product)
    *tensors, targets = problem((32,), 8, words, torch.bfloat16)
    with form("eager"):
        assert all(x.isfinite().all() for x in differentiated(linear_cross_entropy, tensors, targets))


def test_chunks_are_bounded_and_even():
    sizes = {rows: cross_entropy._chunk_size(rows, 2**20) for rows in (0, 1, 256, 257, 1000, 1025)}
    assert sizes == {0: 1, 1: 1, 256: 256, 257: 129, 1000: 250, 1025: 205}
    assert cross_entropy._chunk_size(5, 2**30) == 1


@pytest.mark.parametrize("name", FORMS)
def test_all_targets_may_be_ignored(name):
    *tensors, targets = problem()
    with form(name):
        for found in differentiated(linear_cross_entropy, tensors, torch.full_like(targets, -100)):
            assert found.eq(0).all()
        empty = differentiated(linear_cross_entropy, [tensors[0][:0], *tensors[1:]], targets[:0])
        assert all(x.eq(0).all() for x in empty)


def test_count_divides_the_sum_of_the_losses():
    hidden, weight, _, targets = problem()
    mean, scored = linear_cross_entropy(hidden, weight, targets), int((targets != -100).sum())
    for count in (24, torch.tensor(24)):
        found = linear_cross_entropy(hidden, weight, targets, count=count)
        torch.testing.assert_close(found, mean * scored / 24)


@pytest.mark.parametrize("name", FORMS)
def test_autocast_multiplies_in_half_precision_and_sums_in_float32(name, small_chunks):
    *tensors, targets = problem((40,))
    with form(name), torch.autocast(DEVICE, torch.bfloat16):
        found = differentiated(linear_cross_entropy, tensors, targets)
        usual = differentiated(composed, tensors, targets)
    exact = differentiated(composed, [x.double() for x in tensors], targets)
    assert all(x.dtype == torch.float32 for x in found)
    for x, y, truth in zip(found, usual, exact, strict=True):
        assert (x - truth).abs().max() <= 2 * (y - truth).abs().max()
    weight = tensors[1].requires_grad_()
    with form(name), torch.autocast(DEVICE, torch.bfloat16):
        (total,) = torch.autograd.grad(linear_cross_entropy(tensors[0], weight, targets, count=1), weight)
    assert not torch.equal(total, total.bfloat16().float()), "the sum over tokens was rounded"


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True), (False,) * 3])
def test_only_gradients_that_are_needed_are_computed(needs):
    *tensors, targets = problem()
    for x, needed in zip(tensors, needs, strict=True):
        x.requires_grad_(needed)
    hidden, weight, bias = tensors
    for found, like, needed in zip(
        cross_entropy._linear_cross_entropy(hidden, weight, bias, targets, hidden.dtype, list(needs))[1:],
        tensors,
        needs,
        strict=True,
    ):
        assert found.shape == (like.shape if needed else (0,))
    loss, expected = linear_cross_entropy(hidden, weight, targets, bias), composed(hidden, weight, targets, bias)
    torch.testing.assert_close(loss, expected)
    if wanted := [x for x in tensors if x.requires_grad]:
        torch.testing.assert_close(torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted))


@pytest.mark.parametrize("name", FORMS)
def test_large_factors_of_the_loss_do_not_overflow(name):
    """Gradient scaling multiplies losses in float16 by more than float16 holds."""
    hidden, weight, _, targets = problem(dtype=torch.float16)
    leaves = [hidden.requires_grad_(), (weight / 1000).requires_grad_()]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    with form(name):
        found = torch.autograd.grad(2**17 * linear_cross_entropy(*leaves, targets), leaves[0])
    expected = torch.autograd.grad(2**17 * composed(*exact, targets), exact[0])
    torch.testing.assert_close(found[0].double(), expected[0], rtol=0.01, atol=0.01)


def test_second_backward_pass_gives_the_same_gradients():
    hidden, weight, _, targets = problem()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = linear_cross_entropy(hidden, weight, targets)
    first = [x.clone() for x in torch.autograd.grad(loss, leaves, retain_graph=True)]
    torch.testing.assert_close(list(torch.autograd.grad(2 * loss, leaves, retain_graph=True)), [2 * x for x in first])


@pytest.mark.parametrize("name", FORMS)
def test_second_derivatives(name):
    *tensors, targets = problem()

    def second(loss):
        leaves = [x.detach().requires_grad_() for x in tensors]
        first = torch.autograd.grad(loss(*leaves[:2], targets, leaves[2]).square(), leaves, create_graph=True)
        return torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), leaves)

    with form(name):
        torch.testing.assert_close(second(linear_cross_entropy), second(composed))


def test_transforms_of_torch_func():
    hidden, weight, _, targets = problem()

    def loss(hidden):
        return linear_cross_entropy(hidden, weight, targets)

    def expected(hidden):
        return composed(hidden, weight, targets)

    torch.testing.assert_close(torch.func.grad(loss)(hidden), torch.func.grad(expected)(hidden))
    tangent = torch.randn_like(hidden)
    torch.testing.assert_close(
        torch.func.jvp(loss, (hidden,), (tangent,)), torch.func.jvp(expected, (hidden,), (tangent,))
    )


@pytest.mark.parametrize("name", FORMS)
def test_compiles_to_one_custom_op(name, small_chunks):
    *tensors, targets = problem()
    called = []

    def backend(graph, _):
        called.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    with form(name):
        torch.compile(linear_cross_entropy, fullgraph=True, backend=backend)(*tensors[:2], targets)
        compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
        found = differentiated(compiled, tensors, targets)
    assert called.count(torch.ops.kalmix.linear_cross_entropy.default) == 1
    torch.testing.assert_close(found, differentiated(composed, tensors, targets))


@pytest.mark.parametrize("name", FORMS)
def test_large_logits(name):
    *tensors, targets = problem()
    tensors[0] *= 1000
    with form(name):
        found = differentiated(linear_cross_entropy, tensors, targets)
    torch.testing.assert_close(found, differentiated(composed, tensors, targets))


@pytest.mark.parametrize("name", FORMS)
def test_nan_and_infinite_logits(name):
    """NaN reaches the loss; a word that a bias of -inf rules out has no gradient."""
    *tensors, targets = problem(words=4100)
    targets = 4098 + targets % 2
    tensors[2][:4097] = -torch.inf  # more than one block of the kernel
    with form(name):
        found = differentiated(linear_cross_entropy, tensors, targets)
        torch.testing.assert_close(found, differentiated(composed, tensors, targets))
        tensors[0][1, 3, 2] = torch.nan
        assert linear_cross_entropy(*tensors[:2], targets).isnan()
        targets[1, 3] = -100
        assert linear_cross_entropy(*tensors[:2], targets).isfinite()


def test_logits_are_not_kept():
    """The peak of memory, beyond inputs and gradients, is below a tenth of the logits."""
    hidden, weight, _, targets = (x.cpu() for x in problem((1024,), 4, 1024))  # a GPU also allocates workspace
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def peak(loss):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss(hidden, weight, targets).backward()
        held = most = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        for x in leaves:
            x.grad = None
        return most

    logits = 4 * 1024 * 1024
    assert peak(composed) > logits
    with pytest.MonkeyPatch.context() as patch, form("eager"):
        patch.setattr(cross_entropy, "CHUNK_BYTES", logits // 32)
        assert peak(linear_cross_entropy) < logits / 10


def test_strided_inputs():
    *tensors, targets = problem()
    tensors = [x.mT.contiguous().mT if x.ndim > 1 else x.expand(2, -1).T.contiguous()[:, 0] for x in tensors]
    columns = torch.stack([targets, targets], dim=-1)[..., 0]
    for name in FORMS:
        with form(name):
            found = differentiated(linear_cross_entropy, tensors, columns)
        torch.testing.assert_close(found, differentiated(composed, tensors, targets))


def test_meta_tensors():
    *tensors, targets = (x.to("meta") for x in problem())
    found = differentiated(linear_cross_entropy, tensors, targets)
    assert [x.shape for x in found] == [(), *(x.shape for x in tensors)]


def test_wrong_inputs():
    hidden, weight, bias, targets = problem()
    for arguments, message in (
        ((hidden[..., 1:], weight, targets), "hidden"),
        ((hidden, weight[0], targets), "weight"),
        ((hidden, weight.double(), targets), "weight"),
        ((hidden, weight, targets[:1]), "targets"),
        ((hidden, weight, targets.int()), "targets"),
        ((hidden, weight, targets, bias[1:]), "bias"),
    ):
        with pytest.raises(ArgumentError, match=message):
            linear_cross_entropy(*arguments)


@pytest.mark.parametrize("target", [-1, 37])
def test_target_outside_the_vocabulary(target):
    hidden, weight, _, targets = (x.cpu() for x in problem())  # values are not read on a GPU
    targets[0, 0] = target
    with pytest.raises(IndexError, match=f"contains {target}; expected tokens from 0 to 36, or -100"):
        linear_cross_entropy(hidden, weight, targets)


@pytest.mark.parametrize("target", [-1, 37])
def test_kernel_gives_nan_for_a_target_outside_the_vocabulary(target):
    from kalmix.layers.fused.triton.cross_entropy import replace_with_gradient

    logits, nll = torch.randn(2, 37, device=DEVICE), torch.zeros(2, device=DEVICE)
    replace_with_gradient(logits, torch.tensor([target, 3], device=DEVICE), nll, -100, True)
    assert nll[0].isnan() and nll[1].isfinite()
