"""Losses equal their definitions."""

import math

import pytest
import torch
import torch.nn.functional as F
from distributed.processes import leave_group
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import Trainer, TrainingArguments

from kalmix import ArgumentError, Segments
from kalmix.layers.fused import cross_entropy as fused_cross_entropy
from kalmix.models import LanguageModel
from kalmix.models.losses import cross_entropy, head_nll, marginal_likelihood, next_token_targets, target_nll

from .conftest import build, tokens


def test_next_token_targets():
    labels = torch.tensor([[1, 2, 3, 4, 5]])
    assert next_token_targets(labels, None).tolist() == [[2, 3, 4, 5, -100]]
    packed = Segments.packed(torch.tensor([0, 2, 5]))
    assert next_token_targets(labels, packed).tolist() == [[2, -100, 4, 5, -100]]
    padded = Segments.padded(torch.tensor([[0, 1, 1, 1, 0]]))
    assert next_token_targets(labels, padded).tolist() == [[-100, 3, 4, -100, -100]]


def test_cross_entropy():
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[1, -100, 4], [0, 2, -100]])
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(cross_entropy(logits, targets), expected)
    for count in (8, torch.tensor(8)):
        torch.testing.assert_close(cross_entropy(logits, targets, count), expected * 4 / 8)
    assert cross_entropy(logits, torch.full_like(targets, -100)) == 0
    assert cross_entropy(logits.bfloat16(), targets).dtype == torch.float32


def test_model_loss_is_shifted_cross_entropy(model):
    ids = tokens(2, 7)
    out = model(ids, labels=ids)
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=24).loss, out.loss * 12 / 24)


def gaussians():
    """Return a problem with a one-dimensional read-out, so that quadrature gives the exact integral."""
    torch.manual_seed(0)
    weight = 3 * torch.randn(1, 4)
    mean, variance = torch.randn(2, 3, 1), 0.2 + torch.rand(2, 3, 1)
    targets = torch.tensor([[0, 3, 1], [2, -100, 0]])
    return (lambda readout: readout @ weight), mean, variance, targets


def scored(decode):
    """Return the argument `score` of `marginal_likelihood` for a function from read-outs to logits."""
    return lambda readouts, targets: target_nll(decode(readouts), targets)


def exact(decode, mean, variance, targets):
    grid = torch.linspace(-9, 9, 20001, dtype=torch.float64)
    density = torch.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi)
    readouts = mean[..., 0, None].double() + variance[..., 0, None].double().sqrt() * grid
    log_p = decode(readouts[..., None].float()).double().log_softmax(-1)
    p = log_p.gather(-1, targets.clamp(min=0)[..., None, None].expand(*readouts.shape, 1))[..., 0].exp()
    nll = -torch.log(torch.trapezoid(p * density, grid, dim=-1))
    return nll[targets != -100].mean()


def test_the_trainer_smooths_labels_of_next_tokens(tmp_path):
    model, ids = build("kla"), tokens(2, 8)
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to="none")
    loss = Trainer(model, arguments).compute_loss(model, {"input_ids": ids, "labels": ids})
    logits = model(ids).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)


@pytest.mark.slow
def test_marginal_likelihood_converges_to_the_integral():
    """The error is positive (the logarithm is concave) and falls like 1 / S."""
    decode, mean, variance, targets = gaussians()
    truth = exact(decode, mean, variance, targets)
    gaps = []
    for samples, repeats in ((1, 4000), (8, 500), (64, 100)):
        with torch.no_grad():
            runs = [
                marginal_likelihood(scored(decode), mean, variance, targets, samples, samples) for _ in range(repeats)
            ]
        runs = torch.stack(runs).double()
        gaps.append((float(runs.mean() - truth), float(runs.std() / math.sqrt(repeats))))
    assert gaps[0][0] > gaps[1][0] > gaps[2][0] - 3 * gaps[2][1]
    assert all(gap > -4 * error for gap, error in gaps)
    assert gaps[2][0] < gaps[0][0] / 20 + 4 * gaps[2][1]


def test_one_sample_without_variance_equals_cross_entropy():
    decode, mean, variance, targets = gaussians()
    given = scored(decode), mean, torch.zeros_like(variance), targets
    certain = marginal_likelihood(*given, samples=1)
    torch.testing.assert_close(certain, cross_entropy(decode(mean), targets))
    torch.testing.assert_close(marginal_likelihood(*given, 7, 3), certain)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, 100])
def test_chunk_size_does_not_change_the_loss(chunk_size):
    """Loss and gradients agree, because backward draws the same samples as forward."""
    decode, mean, variance, targets = gaussians()
    results = []
    for size in (7, chunk_size):
        m, v = mean.clone().requires_grad_(), variance.clone().requires_grad_()
        torch.manual_seed(5)
        loss = marginal_likelihood(scored(decode), m, v, targets, samples=7, chunk_size=size)
        torch.manual_seed(99)
        results.append((loss.detach(), *torch.autograd.grad(loss, (m, v))))
    for whole, sliced in zip(*results, strict=True):
        torch.testing.assert_close(sliced, whole, rtol=1e-5, atol=1e-6)


def test_backward_stores_one_number_per_sample_and_target():
    """Memory for backward does not contain logits or hidden layers of each sample."""
    decode, mean, variance, targets = gaussians()

    def stored_bytes(samples: int) -> int:
        storages = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            marginal_likelihood(scored(decode), mean.requires_grad_(), variance.requires_grad_(), targets, samples)
        return sum(storage.nbytes() for storage in storages.values())

    a_sample = (stored_bytes(40) - stored_bytes(4)) / 36
    assert a_sample <= 3 * targets.numel() * 4  # bytes; its logits alone would be 4 x 6 numbers


def test_marginal_loss_equals_equation_24():
    """Compare with equation 24, written out for a model with an MLP after its last layer."""
    model = build(
        [{"mixer": "kla", "slots": 4}, {"mixer": "kla", "slots": 4, "mlp": 24}], loss="marginal", loss_samples=5
    )
    ids = tokens(2, 6)
    torch.manual_seed(2)
    loss = model(ids, labels=ids).loss
    with torch.no_grad():
        core = model.model
        hidden = core.layers[0](core.embed_tokens(ids)).hidden_state
        block = core.layers[1]
        read, context = block.mixer.read(block.norm(hidden), variance=True)
        torch.manual_seed(2)
        p = 0
        for _ in range(5):
            readout = read.mean + read.variance.sqrt() * torch.randn_like(read.mean)
            after = hidden + block.mixer.project_out(readout, context)
            after = after + block.mlp(block.mlp_norm(after))
            logits = model.lm_head(core.norm(after))
            p = p + logits.softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]) / 5
    torch.testing.assert_close(loss.detach(), -p.log().mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("cap", [None, 1.0])
def test_marginal_loss_by_chunks_equals_that_of_all_logits(cap, packed, monkeypatch):
    """Value and gradients, in float64, with ignored targets; chunks have three tokens."""
    monkeypatch.setattr(fused_cross_entropy, "CHUNK_BYTES", 3 * 40 * 8)
    model = build([{"mixer": "kla", "slots": 4, "mlp": 24}], loss="marginal", loss_samples=4, logit_cap=cap)
    model = model.double().train()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    ids = tokens(1, 14) if packed else tokens(2, 7)
    labels = ids.masked_fill(torch.arange(ids.numel()).view_as(ids) % 5 == 3, -100)
    bounds = {"cu_seq_lens_q": torch.tensor([0, 6, 14], dtype=torch.int32)} if packed else {}

    def differentiate(loss):
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    torch.manual_seed(3)
    found = differentiate(model(ids, labels=labels, skip_logits=True, **bounds).loss)
    core = model.model(ids, output_posterior=True, output_layout=True, **bounds)
    targets, posterior = next_token_targets(labels, core.layout.segments), core.posterior
    torch.manual_seed(3)
    log_p = []
    for _ in range(4):
        readout = posterior.mean + posterior.variance.sqrt() * torch.randn_like(posterior.mean)
        logits = model.head_logits(model.model.norm(model.model.layers.finish(posterior, readout)))
        log_p.append(logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1))
    expected = math.log(4) - torch.stack(log_p).logsumexp(0)
    assert 0 < (targets == -100).sum() < targets.numel() - 5
    torch.testing.assert_close(found, differentiate(expected[targets != -100].mean()), check_dtype=False)


def test_marginal_loss_does_not_keep_logits(monkeypatch):
    """The peak of memory, forward and backward, is below the logits of one sample, for a chunk of 1/32 of them."""
    batch, length, words = 4, 256, 1024
    logits = 4 * batch * length * words
    monkeypatch.setattr(fused_cross_entropy, "CHUNK_BYTES", logits // 32)
    options = {"loss": "marginal", "loss_samples": 3, "logit_cap": 15.0, "vocab_size": words}
    model, ids = build([{"mixer": "kla", "slots": 4}], **options).train(), torch.randint(words, (batch, length))
    core = model.model(ids, output_posterior=True)
    mean, variance = (x.detach().requires_grad_() for x in core.posterior[1:3])
    head = model.lm_head
    weight_bytes = 4 * head.weight.numel()

    def peak(score) -> int:
        model.zero_grad()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            marginal_likelihood(score, mean, variance, ids, samples=3).backward()
        held = most = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        return most

    assert peak(lambda x, targets: target_nll(head(x), targets)) > 2 * logits
    assert peak(lambda x, targets: head_nll(head, x, targets, 15.0)) < logits / 4 + 3 * weight_bytes


@pytest.mark.slow
def test_a_compiled_marginal_loss_has_the_gradient_of_its_samples():
    """The backward pass draws the samples again; if it drew others, its gradient would not be that of the loss."""
    model, ids = build("kla", loss="marginal", loss_samples=4).double(), tokens(2, 16)
    compiled = torch.compile(model, dynamic=False)
    parameters = list(model.parameters())
    directions = [torch.randn_like(x) for x in parameters]

    def loss() -> torch.Tensor:
        torch.manual_seed(5)
        return compiled(ids, labels=ids).loss

    def moved(step: float) -> float:
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=step)
        return loss().item()

    loss().backward()
    pairs = ((x.grad, y) for x, y in zip(parameters, directions, strict=True) if x.grad is not None)
    slope = float(sum((x * y).sum() for x, y in pairs))
    above, below = moved(1e-5), moved(-2e-5)
    assert slope == pytest.approx((above - below) / 2e-5, rel=1e-4) and abs(slope) > 1e-2


def test_marginal_loss_trains_the_variances():
    model = build("hybrid", loss="marginal", loss_samples=4, loss_chunk_size=2).train()
    ids = tokens(2, 6)
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all((parameter.grad != 0).any() for parameter in model.model.layers.last_block.mixer.dynamics_parameters())


def test_marginal_loss_needs_a_posterior():
    model = build("gpt", loss="marginal")
    assert model(tokens(1, 3)).loss is None
    with pytest.raises(ArgumentError, match=r"ends with Attention.*posterior"):
        model(tokens(1, 3), labels=tokens(1, 3))


def losses_and_gradients(model, ids, **options):
    """Return the loss, and gradients of all parameters, of a model with and without logits."""
    results = []
    for skip_logits in (False, True):
        torch.manual_seed(0)  # of the samples of a marginal likelihood
        output = model(ids, labels=ids, skip_logits=skip_logits, **options)
        assert (output.logits is None) == skip_logits
        results.append([output.loss, *torch.autograd.grad(output.loss, list(model.parameters()))])
    return results


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}, {"loss": "marginal", "loss_samples": 2}])
def test_loss_without_logits_is_the_same(options):
    model, ids = build(["attention", "kla"], **options), tokens(2, 7)
    mask = torch.tensor([[1] * 7, [0, 0, 1, 1, 0, 1, 1]])
    torch.testing.assert_close(*losses_and_gradients(model, ids, attention_mask=mask))
    torch.testing.assert_close(*losses_and_gradients(model, ids, num_items_in_batch=24))


def test_logits_are_skipped_in_training_if_the_configuration_says_so():
    model, ids = build("kla", skip_logits=True), tokens(2, 7)
    assert model(ids, labels=ids).logits is not None
    model.train()
    assert model(ids, labels=ids).logits is None
    assert model(ids, shift_labels=ids).logits is None
    assert model(ids).logits is not None
    assert model(ids, labels=ids, skip_logits=False).logits is not None
    with pytest.raises(ArgumentError, match="skip_logits"):
        model(ids, skip_logits=True)


def test_a_changed_head_is_called():
    """A hook, a head of another class, or a replaced `forward` changes the logits, and so the loss."""
    model, ids = build("kla"), tokens(2, 7)
    head = model.lm_head
    plain = model(ids, labels=ids).loss

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    doubled = Doubled(16, 40, bias=False)
    doubled.load_state_dict(head.state_dict())
    handle = head.register_forward_hook(lambda module, inputs, output: 2 * output)
    losses = [model(ids, labels=ids, skip_logits=True).loss]
    handle.remove()
    head.forward = doubled.forward
    losses.append(model(ids, labels=ids, skip_logits=True).loss)
    del head.forward
    torch.testing.assert_close(model(ids, labels=ids, skip_logits=True).loss, plain)
    model.lm_head = doubled
    losses.append(model(ids, labels=ids, skip_logits=True).loss)
    for loss in losses:
        torch.testing.assert_close(loss, model(ids, labels=ids).loss)
    assert (losses[0] - plain).abs() > 0.01


@pytest.mark.slow
def test_loss_without_logits_compiles_to_one_graph():
    model, ids = build(["attention"]), tokens(2, 7)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(ids, labels=ids, skip_logits=True).loss
    expected = model(ids, labels=ids).loss
    parameters = list(model.parameters())
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters))


def test_language_model_computes_its_loss():
    torch.manual_seed(0)
    model = LanguageModel(vocab_size=40, hidden_size=16, layers=["kla"])
    hidden = model(model.embed_tokens(tokens(2, 7))).hidden_state
    targets = torch.where(torch.rand(2, 7) < 0.3, -100, tokens(2, 7, seed=2))
    torch.testing.assert_close(model.loss(hidden, targets), cross_entropy(model.logits(hidden), targets))
    torch.testing.assert_close(model.loss(hidden, targets, 24), cross_entropy(model.logits(hidden), targets, 24))


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "fsdp with its own head"])
def test_loss_without_logits_of_a_distributed_model(wrapper, tmp_path):
    model, ids = build(["kla", "attention"], tie_word_embeddings=wrapper == "ddp"), tokens(2, 7)
    expected = model(ids, labels=ids).loss
    expected.backward()
    gradients = {name: x.grad for name, x in model.named_parameters()}
    model.zero_grad()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        if wrapper == "ddp":
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
        else:
            mesh = torch.distributed.init_device_mesh("cpu", (1,))
            parts = [*model.model.layers, *([model.lm_head] if "head" in wrapper else [])]
            for part in parts:
                fully_shard(part, mesh=mesh)
            wrapped = fully_shard(model, mesh=mesh)
        loss = wrapped(ids, labels=ids, skip_logits=True).loss
        loss.backward()
        found = {name: x.grad for name, x in model.named_parameters()}
        found = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}
        loss = loss.detach()
    finally:
        wrapped = None
        leave_group()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, gradients)
