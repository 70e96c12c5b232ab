"""Training with gradient checkpointing, torch.compile, mixed precision and sampled read-outs."""

import pytest
import torch

from kalmix.models.losses import cross_entropy

from .conftest import LAYERS, build, tokens


def gradients(model, seed=0, **inputs):
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(first, second, **close):
    torch.testing.assert_close(second[0], first[0], **close)
    for name, gradient in first[1].items():
        torch.testing.assert_close(second[1][name], gradient, **close)


@pytest.mark.parametrize("options", [{}, {"loss": "marginal", "loss_samples": 2}, {"propagate": "sample"}])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(options, reentrant):
    model = build(["kla", "afa", "attention", "kla"], **options).train()
    ids = tokens(2, 6)
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6])}
    plain = gradients(model, **inputs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    assert_equal(plain, gradients(model, **inputs), rtol=0, atol=0)
    model.gradient_checkpointing_disable()
    assert_equal(plain, gradients(model, **inputs), rtol=0, atol=0)


@pytest.mark.slow
def test_compiles_to_one_graph():
    """Loss and gradients of the compiled model equal those of the eager model, with padding."""
    model = build([{"mixer": "attention", "heads": 2}, {"mixer": "kla", "slots": 2}]).train()
    ids = tokens(2, 5)
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1] * 5])}
    eager = gradients(model, **inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(**inputs).loss
    model.zero_grad()
    loss.backward()
    again = (loss.detach(), {name: p.grad for name, p in model.named_parameters()})
    assert_equal(eager, again, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layers", LAYERS)
def test_every_layer_learns(layers):
    """Each model halves its loss within 30 steps, and the marginal loss too if its last layer has a posterior."""
    for options in ({}, {"loss": "marginal", "loss_samples": 2}):
        model = build(layers, **options).train()
        if options and not model.model.layers.last_block.mixer.has_posterior:
            continue
        ids = tokens(2, 12)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if losses[-1] < losses[0] / 2:
                break
        assert losses[-1] < losses[0] / 2, options


def test_propagated_samples():
    """In training, all blocks but the last pass on a sample, whose expectation is the mean."""
    model = build(["kla", "kla"], propagate="sample")
    mean = build(["kla", "kla"])
    ids = tokens(1, 4)
    assert torch.equal(model(ids).logits, mean(ids).logits)
    model.train()
    core = model.model
    with torch.no_grad():
        x = core.embed_tokens(ids)
        first = core.layers(x, output_hidden_states=True)
        second = core.layers(x, output_hidden_states=True)
        assert not torch.equal(first.hidden_states[1], second.hidden_states[1])
        known = core.layers[0](x, output_belief=True)
        samples = core.layers(x.expand(2000, -1, -1), output_hidden_states=True).hidden_states[1]
    error = (samples.mean(0, keepdim=True) - known.hidden_state) / (known.belief.variance / 2000).sqrt()
    assert error.abs().max() < 5
    torch.manual_seed(0)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in core.layers[0].mixer.dynamics_parameters())
    one = build(["kla"], propagate="sample").train()
    assert torch.equal(one(ids).logits, one(ids).logits)


def test_mixed_precision():
    model = build("hybrid").train()
    ids = tokens(2, 8)
    exact, expected = gradients(model, input_ids=ids, labels=ids)
    with torch.autocast("cpu", torch.bfloat16):
        rough, got = gradients(model, input_ids=ids, labels=ids)
    assert abs(float(rough - exact)) < 0.02 * float(exact)
    for name, gradient in expected.items():
        assert torch.isfinite(got[name]).all()
        assert (got[name] - gradient).norm() < 0.1 * gradient.norm() + 1e-4, name


@pytest.mark.parametrize("layers", sorted(LAYERS.keys() - {"gpt", "kla", "hybrid"}))
def test_mixed_precision_of_other_layers(layers):
    model = build(layers).train()
    ids = tokens(2, 8)
    exact = model(input_ids=ids, labels=ids).loss.detach()
    with torch.autocast("cpu", torch.bfloat16):
        rough, got = gradients(model, input_ids=ids, labels=ids)
    assert abs(float(rough - exact)) < 0.02 * float(exact)
    assert all(torch.isfinite(gradient).all() for gradient in got.values())


def test_accumulated_batches_share_one_target_count():
    """The losses of two halves, divided by the count of the whole batch, sum to its loss."""
    model = build("hybrid")
    ids, labels = tokens(4, 6), tokens(4, 6)
    labels[1, 2:] = -100
    whole = model(ids, labels=labels).loss
    count = (labels[:, 1:] != -100).sum()
    halves = [model(ids[i : i + 2], labels=labels[i : i + 2], num_items_in_batch=count).loss for i in (0, 2)]
    torch.testing.assert_close(sum(halves), whole)


def test_loss_of_a_batch_without_targets_is_zero():
    logits = torch.randn(1, 2, 3, requires_grad=True)
    loss = cross_entropy(logits, torch.full((1, 2), -100))
    loss.backward()
    assert loss == 0 and (logits.grad == 0).all()
