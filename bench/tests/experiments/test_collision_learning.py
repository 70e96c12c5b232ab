"""Recall sequences follow the specification; models differ only in their update; members do not interact."""

import pytest
import torch

from kalmix import ArgumentError
from kalmix_bench.datasets.collision.sequences import (
    CollidingPairs,
    Episode,
    RandomAddresses,
    projection,
    recall_scores,
    stack_episodes,
)
from kalmix_bench.datasets.seeds import STREAMS, stream_seed
from kalmix_bench.experiments.collision.models import HEADS, OBS_NOISE, PRIOR, RESET, UPDATES, RecallModel
from kalmix_bench.experiments.collision.protocol import STUDIES, CollisionCell, CollisionProtocol
from kalmix_bench.experiments.collision.trainer import _clip, evaluate, train

CPU = torch.device("cpu")
PAIRS, CROWD = CollidingPairs(), RandomAddresses()


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def identities(episode):
    """Which identity each token addresses: even, on an axis, is B; odd, between two axes, is A."""
    used = episode.addresses != 0
    first = used.int().argmax(-1)
    return first + (used.sum(-1) > 1)


def test_pairs_come_in_four_phases():
    episode = PAIRS.draw(5, 3, (0.6, 0.8), generator())
    who = identities(episode)
    assert episode.tokens.shape == (5, 16 + 8 * 4 + 8 * 3 + 8, 33)
    assert torch.equal(who[:, :16].sort(1).values, torch.arange(16).expand(5, -1))
    assert who[0, :16].tolist() != who[1, :16].tolist()
    assert torch.equal(who[:, 16:48], (2 * torch.arange(8)).repeat_interleave(4).expand(5, -1))
    assert torch.equal(who[:, 48:72], (2 * torch.arange(8) + 1).repeat_interleave(3).expand(5, -1))
    assert torch.equal(who[:, 72:].sort(1).values, (2 * torch.arange(8)).expand(5, -1))
    asks = episode.tokens[..., 0]
    assert asks[:, :72].eq(0).all() and asks[:, 72:].eq(1).all()
    assert torch.equal(episode.tokens[..., 1:17], episode.addresses)


def test_only_pairs_overlap():
    rho = torch.rand(4, 8, generator=generator(), dtype=torch.float64)
    keys = PAIRS.addresses(rho)
    gram = keys @ keys.mT
    want = torch.eye(16, dtype=torch.float64).repeat(4, 1, 1)
    for pair in range(8):
        want[:, 2 * pair, 2 * pair + 1] = want[:, 2 * pair + 1, 2 * pair] = rho[:, pair]
    assert torch.allclose(gram, want, rtol=0, atol=1e-15)
    drawn = PAIRS.draw(50, 1, (0.85, 0.95), generator())
    a = drawn.addresses[identities(drawn) % 2 == 1].max(-1).values  # rho, as it is above its sine here
    assert 0.85 <= float(a.min()) < 0.86 < 0.94 < float(a.max()) <= 0.95 + 1e-6


def test_pairs_shuffle_their_labels_in_every_sequence():
    episode = PAIRS.draw(6, 2, (0.6, 0.8), generator())
    who, labels = identities(episode), episode.tokens[..., 17:]
    reports = labels.argmax(-1)
    assert labels[:, :-8].sum(-1).eq(1).all() and labels[:, -8:].eq(0).all()
    tables = []
    for row in range(6):
        table = dict(zip(who[row, :16].tolist(), reports[row, :16].tolist(), strict=True))
        assert sorted(table.values()) == list(range(16))
        assert all(table[int(i)] == int(t) for i, t in zip(who[row, :-8], reports[row, :-8], strict=True))
        assert [table[int(i)] for i in who[row, -8:]] == episode.targets[row].tolist()
        assert [table[int(i) + 1] for i in who[row, -8:]] == episode.distractors[row].tolist()
        tables.append(tuple(table[i] for i in range(16)))
    assert len(set(tables)) == 6


def test_random_addresses_query_written_ones():
    episode = CROWD.draw(4, 48, generator())
    raw, labels = episode.tokens[..., 1:65], episode.tokens[..., 65:]
    assert episode.tokens.shape == (4, 56, 129)
    assert torch.allclose(raw.norm(dim=-1), torch.ones(4, 56), atol=1e-6)
    assert torch.allclose(episode.addresses.norm(dim=-1), torch.ones(4, 56), atol=1e-6)
    where = (raw[:, 48:] @ raw[:, :48].mT).argmax(-1)
    assert torch.equal(raw[:, 48:], raw[:, :48].gather(1, where[..., None].expand(-1, -1, 64)))
    assert all(len(set(row.tolist())) == 8 for row in where)
    assert torch.equal(episode.targets, labels[:, :48].argmax(-1).gather(1, where))
    assert labels[:, 48:].eq(0).all() and episode.distractors is None
    assert torch.allclose(projection(64) @ projection(64).mT, torch.eye(16), atol=1e-6)
    seen = torch.nn.functional.normalize(raw @ projection(64).mT, dim=-1)
    assert torch.allclose(seen, episode.addresses, atol=1e-6)


def test_margins_are_those_of_equation_20_and_of_section_e_5_5():
    episode = Episode(torch.zeros(0), torch.zeros(0), torch.tensor([[[0, 1]]]), torch.tensor([[[1, 2]]]))
    logits = torch.tensor([[[[2.0, 1.0, 9.0], [0.0, 0.0, 0.0]]]])
    found = recall_scores(logits, episode)
    assert float(found["margin"]) == pytest.approx((2 / (1 + torch.e**-1) - 1) / 2)
    probabilities = logits.softmax(-1)
    assert float(found["label_margin"]) == pytest.approx(
        float(probabilities[0, 0, 0, 0] - probabilities[0, 0, 0, 1]) / 2
    )
    assert float(found["accuracy"]) == 0
    assert float(found["cross_entropy"]) == pytest.approx(float(-logits.log_softmax(-1)[0, 0, [0, 1], [0, 1]].mean()))


def written(name, k, v, raw):
    """The memory of Table 2, token by token, read at its keys."""
    memory, covariance, read = torch.zeros(16, 16).double(), PRIOR * torch.eye(16).double(), []
    for key, value, num_signals in zip(k, v, raw, strict=True):
        error = value - memory.T @ key
        if name == "linear-attention":
            memory = memory + torch.outer(key, value)
        elif name == "gla":
            memory = num_signals.sigmoid()[:, None] * memory + torch.outer(key, value)
        elif name == "deltanet":
            memory = memory + num_signals.sigmoid() * torch.outer(key, error)
        else:
            if UPDATES[name].rates:
                decay = num_signals[1:].exp().expand(16)
                memory, covariance = decay[:, None] * memory, decay[:, None] * covariance * decay
                error = value - memory.T @ key
            kept, signal = RESET * torch.eye(16).double(), num_signals[:1]
            predicted = kept if name == "reset" else covariance + torch.eye(16) * (1 + signal.exp()).log()
            warped = predicted @ key
            gain = warped / (OBS_NOISE + key @ warped)
            memory, covariance = memory + torch.outer(gain, error), predicted - torch.outer(gain, warped)
        read.append(memory.T @ key)
    return torch.stack(read)


@pytest.mark.parametrize("name", UPDATES)
def test_updates_are_those_of_table_2(name):
    k = torch.randn(1, 7, 1, 16, generator=generator()).double()
    v = torch.randn(1, 7, 2, 16, generator=generator(1)).double()
    update = UPDATES[name]
    raw = torch.randn(1, 7, 2, update.num_signals, generator=generator(2)).double()
    if update.rates:
        log_decay = -torch.rand(1, 7, 2, update.rates, generator=generator(3)).double()
        raw = torch.cat([raw[..., :-1], log_decay], -1)
    got = UPDATES[name].read(k / 4, k / 4, v, raw)
    for head in range(2):
        want = written(name, k[0, :, 0] / 4, v[0, :, head], raw[0, :, head])
        assert torch.allclose(got[0, :, head], want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("queries_write", [True, False])
@pytest.mark.parametrize("name", ["deltanet", "bayesian"])
def test_a_query_can_be_kept_from_writing(name, queries_write):
    """Then asking twice at one address gives one answer."""
    episode = stack_episodes([PAIRS.draw(2, 1, (0.6, 0.8), generator())])
    twice = Episode(*(torch.cat([x[:, :, :-1], x[:, :, -2:-1]], 2) for x in episode[:2]), *episode[2:])
    logits = RecallModel(name, 33, 16, [0], queries_write)(twice)
    assert torch.allclose(logits[:, :, -1], logits[:, :, -2], atol=1e-5) is not queries_write


@pytest.mark.parametrize("name", ["bayesian-decay-per-key", "bayesian-decay-per-head"])
def test_decays_begin_like_those_of_the_layer_and_are_learned(name):
    model, episode = RecallModel(name, 33, 16, [0, 1]), stack_episodes([PAIRS.draw(2, 1, (0.6, 0.8), generator())] * 2)
    decay = model.blocks[0].decay
    log_decay = decay(torch.zeros(4, 3, HEADS, 1)).detach()
    assert log_decay.shape == (4, 3, HEADS, 16 if name.endswith("key") else 1)
    assert float(log_decay.min()) > -1.6 * 1.001 and float(log_decay.max()) < 0  # rate 16, step 0.1
    assert torch.equal(log_decay[0], log_decay[1]) and not torch.equal(log_decay[0], log_decay[2])  # members differ
    assert model.blocks[0].raw.bias.view(2, HEADS, 2)[..., 1].eq(0).all()
    model(episode).square().mean().backward()
    assert all(bool(x.grad.ne(0).any()) for x in decay.parameters())


@pytest.mark.parametrize("name", ["gla", "bayesian", "bayesian-decay-per-key", "bayesian-decay-per-head"])
def test_members_do_not_mix(name):
    episodes = [PAIRS.draw(2, 1, (0.6, 0.8), generator(seed)) for seed in (3, 4)]
    both, alone = (RecallModel(name, 33, 16, seeds) for seeds in ([3, 4], [4]))
    assert torch.allclose(both(stack_episodes(episodes))[1], alone(stack_episodes(episodes[1:]))[0], atol=1e-5)


def test_gradients_are_clipped_per_member():
    gradients = [torch.tensor([[3.0], [0.3]]), torch.tensor([[4.0], [0.4]])]
    _clip(gradients, 1.0)
    assert torch.allclose(torch.cat(gradients, 1), torch.tensor([[0.6, 0.8], [0.3, 0.4]]), atol=1e-5)


def test_training_of_a_seed_does_not_depend_on_other_members():
    protocol = CollisionProtocol(steps=4, batch_size=2, learning_rate=3e-3, test_sequences=3)
    study = STUDIES["crowding"]

    def learn(seeds):
        model = RecallModel("deltanet", study.task.inputs, study.task.labels, seeds)
        reports = []
        loss = train(model, study, seeds, protocol, CPU, lambda done, loss: reports.append(done))
        assert reports == [0.25, 0.5, 0.75, 1.0]
        return torch.stack([loss, *evaluate(model, study, {"writes": 24}, protocol, CPU).values()])

    first, again, other = learn([0, 1]), learn([0, 1]), learn([1])
    assert torch.equal(first, again)
    assert torch.allclose(first[:, 1], other[:, 0], atol=1e-4)
    assert not torch.allclose(first[:, 0], first[:, 1], atol=1e-3)


def test_a_model_learns_to_recall():
    protocol, study = CollisionProtocol(steps=40, batch_size=8, learning_rate=1e-2, test_sequences=8), STUDIES["recall"]
    model = RecallModel("reset", study.task.inputs, study.task.labels, [0])
    before = evaluate(model, study, {"flood": 1, "overlap": (0.7, 0.7)}, protocol, CPU)
    train(model, study, [0], protocol, CPU, lambda done, loss: None)
    after = evaluate(model, study, {"flood": 1, "overlap": (0.7, 0.7)}, protocol, CPU)
    assert float(after["accuracy"]) > 0.5 > float(before["accuracy"])
    assert float(after["cross_entropy"]) < float(before["cross_entropy"])


@pytest.mark.parametrize("study", STUDIES)
@pytest.mark.slow
def test_no_test_sequence_was_trained_on(study, monkeypatch):
    """Seed 0 is included: PyTorch's CPU generator treats 2^32 as 0."""
    study_spec, protocol = (
        STUDIES[study],
        CollisionProtocol(steps=16, batch_size=4, learning_rate=3e-3, test_sequences=4),
    )
    drawn, draw = [], type(study_spec).draw
    monkeypatch.setattr(type(study_spec), "draw", lambda *asked: drawn.append(draw(*asked)) or drawn[-1])
    seeds = [0, 1, 2, 2**30 - 1]
    model = RecallModel("linear-attention", study_spec.task.inputs, study_spec.task.labels, seeds)
    train(model, study_spec, seeds, protocol, CPU, lambda done, loss: None)
    trained, drawn[:] = sequences(drawn, study_spec.task.labels), []
    for condition in study_spec.training_conditions:
        evaluate(model, study_spec, condition, protocol, CPU)
    tested = sequences(drawn, study_spec.task.labels)
    assert len(trained) == 16 * len(seeds) * 4 and len(tested) >= 4 * len(study_spec.training_conditions)
    assert not trained & tested


def sequences(episodes, labels):
    """The labels that each sequence writes, and those it asks for: no overlap changes them."""
    both = [torch.cat([e.tokens[..., -labels:].argmax(-1), e.targets], 1) for e in episodes]
    return {tuple(row) for batch in both for row in batch.tolist()}


def test_streams_share_no_seed_of_32_bits():
    seeds = [0, 1, 5, 2**30 - 1]
    found = [stream_seed(stream, seed) for stream in STREAMS for seed in seeds]
    assert len({seed % 2**32 for seed in found}) == len(found)
    for seed in (-1, 2**30, 2**32):
        with pytest.raises(ArgumentError, match="seed"):
            CollisionCell("recall", "reset", seed, CollisionProtocol())
