"""Losses: a mean over valid tokens, however a batch is cut or padded."""

import pytest
import torch

from attn2mamba import losses
from attn2mamba.losses import IGNORE

B, T, V, H = 2, 5, 7, 3


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_labels() -> torch.Tensor:
    labels = torch.arange(B * T).reshape(B, T) % V
    labels[0, 2:] = IGNORE
    labels[1, 0] = IGNORE
    return labels


def cross_entropy(student, labels, total):
    return losses.cross_entropy(student, labels, total)


def kl(student, labels, total, teacher=None):
    teacher = randn(B, T, V, seed=1)[: len(student)] if teacher is None else teacher
    return losses.logit_kl(student, teacher, labels, total)


def hidden(student, labels, total, teacher=None):
    """`student` stands for the only layer's output."""
    teacher = randn(B, T, V, seed=1)[: len(student)] if teacher is None else teacher
    return losses.hidden_alignment([student, student], [teacher, teacher], labels, total)


ALL = [cross_entropy, kl, hidden]


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_kl_is_the_formula(temperature):
    student, teacher, labels = randn(B, T, V), randn(B, T, V, seed=1), some_labels()
    expected, count = 0.0, 0
    for b, t in (labels != IGNORE).nonzero().tolist():
        p = (teacher[b, t] / temperature).softmax(-1)
        q = (student[b, t] / temperature).softmax(-1)
        expected += float((p * (p / q).log()).sum()) * temperature**2
        count += 1
    actual = losses.logit_kl(student, teacher, labels, count, temperature)
    assert float(actual) == pytest.approx(expected / count, rel=1e-5)


@pytest.mark.parametrize("shared", [[0, 1, 2, 3, 4], [0, 2, 3, 6]])
@pytest.mark.parametrize(("ours", "theirs"), [(7, 9), (9, 7), (7, 7)])
def test_kl_over_the_shared_ids(shared, ours, theirs):
    """Whichever has more rows, and whatever the others say, even where they would win by far."""
    student, teacher, labels = randn(B, T, ours), randn(B, T, theirs, seed=1), some_labels() % 5
    labels[0, 2:] = IGNORE
    count = int((labels != IGNORE).sum())
    expected = 0.0
    for b, t in (labels != IGNORE).nonzero().tolist():
        p = teacher[b, t, shared].softmax(-1)
        q = student[b, t, shared].softmax(-1)
        expected += float((p * (p / q).log()).sum()) / count
    ids = torch.tensor(shared)
    assert float(losses.logit_kl(student, teacher, labels, count, shared=ids)) == pytest.approx(expected, rel=1e-5)

    padding = [torch.tensor([i for i in range(rows) if i not in shared]) for rows in (ours, theirs)]
    for logits, others in zip((student, teacher), padding, strict=True):
        logits[..., others] = 1e4 * randn(B, T, len(others), seed=3)
    student.requires_grad_()
    loss = losses.logit_kl(student, teacher, labels, count, shared=ids)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert not student.grad[..., padding[0]].any() and student.grad[..., shared].any()


@pytest.mark.parametrize("loss", ALL)
def test_a_longer_sequence_of_the_same_costs_the_same(loss):
    labels, student, teacher = some_labels(), randn(B, T, V), randn(B, T, V, seed=1)
    count = int((labels != IGNORE).sum())
    options = {} if loss is cross_entropy else {"teacher": torch.cat([teacher] * 4, 1)}
    longer = loss(torch.cat([student] * 4, 1), torch.cat([labels] * 4, 1), 4 * count, **options)
    assert float(longer) == pytest.approx(float(loss(student, labels, count)), rel=1e-5)


@pytest.mark.parametrize("loss", [kl, hidden])
def test_masked_positions_carry_nothing(loss):
    student, teacher, labels = randn(B, T, V), randn(B, T, V, seed=1), some_labels()
    changed = torch.where((labels == IGNORE).unsqueeze(-1), 100 * randn(B, T, V, seed=2), teacher)
    before, after = (loss(student, labels, 4, teacher=t) for t in (teacher, changed))
    assert not torch.equal(teacher, changed)
    assert float(after) == pytest.approx(float(before), rel=1e-6)


@pytest.mark.parametrize("loss", ALL)
def test_a_batch_without_valid_tokens_gives_zero(loss):
    student = randn(B, T, V).requires_grad_()
    value = loss(student, torch.full((B, T), IGNORE), 0)
    value.backward()
    assert value.item() == 0
    assert torch.equal(student.grad, torch.zeros_like(student))


@pytest.mark.parametrize("loss", ALL)
def test_pieces_add_up_to_the_whole(loss):
    labels, count = some_labels(), int((some_labels() != IGNORE).sum())
    teacher = randn(B, T, V, seed=1)
    gradients = []
    for pieces in ([slice(0, 2)], [slice(0, 1), slice(1, 2)]):
        student = randn(B, T, V).requires_grad_()
        for piece in pieces:
            options = {} if loss is cross_entropy else {"teacher": teacher[piece]}
            loss(student[piece], labels[piece], count, **options).backward()
        gradients.append(student.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-7)


@pytest.mark.parametrize("loss", [losses.cosine_loss, losses.mse_loss])
def test_matching_outputs_cost_nothing(loss):
    target = randn(B, T, H, 4)
    assert loss(target, target).abs().max() < 1e-6
    assert loss(randn(B, T, H, 4, seed=1), target).min() > 0.1
    assert loss(target, target).shape == (B, T)


def test_matching_attention_weights_cost_nothing():
    target = randn(B, H, T, T).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
    other = torch.ones(T, T).tril().expand(B, H, T, T)
    other = other / other.sum(-1, keepdim=True)
    assert losses.attention_loss(target, target).abs().max() < 1e-6
    loss = losses.attention_loss(other, target)
    expected = (target * (target / other).log()).nan_to_num(0).sum(-1).mean(1)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)


def test_mse_weighs_layers_alike_and_knows_no_neighbours():
    prediction, target = randn(B, T, H, 4), randn(B, T, H, 4, seed=1)
    loss = losses.mse_loss(prediction, target)
    torch.testing.assert_close(losses.mse_loss(100 * prediction, 100 * target), loss)
    torch.testing.assert_close(losses.mse_loss(prediction[:1], target[:1]), loss[:1])


def test_hidden_alignment_compares_the_outputs_of_layers(tiny_teacher):
    """transformers' hidden_states start with the embedding and end after the final norm."""
    models = [tiny_teacher("llama", seed=seed) for seed in (0, 1)]
    seen: list[list[torch.Tensor]] = []
    for model in models:
        outputs: list[torch.Tensor] = []
        for module in (model.model.layers[0], model.model.norm):
            module.register_forward_hook(lambda m, a, output, kept=outputs: kept.append(output))
        seen.append(outputs)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        states = [m(ids, use_cache=False, output_hidden_states=True).hidden_states for m in models]
    labels = losses.next_token_labels(ids, None)
    error = [((x - y).square().mean(-1) / y.square().mean(-1))[:, :-1].mean() for x, y in zip(*seen, strict=True)]
    actual = losses.hidden_alignment(states[0], states[1], labels, 7)
    torch.testing.assert_close(actual, torch.stack(error).mean())


def test_hidden_alignment_by_a_layer_map():
    student, teacher = ([randn(B, T, 4, seed=10 * n + i) for i in range(n + 1)] for n in (2, 3))
    labels = torch.zeros(B, T, dtype=torch.long)
    error = [
        ((x - y).square().mean(-1) / y.square().mean(-1)).mean()
        for x, y in zip(student[1:], (teacher[2], teacher[3]), strict=True)
    ]
    actual = losses.hidden_alignment(student, teacher, labels, B * T, layers=[2, 3])
    torch.testing.assert_close(actual, torch.stack(error).mean())
    with pytest.raises(ValueError):
        losses.hidden_alignment(student, teacher, labels, B * T)


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        (None, [2, 3, 4, 5, IGNORE]),
        ([0, 0, 1, 1, 1], [2, IGNORE, 4, 5, IGNORE]),
        ([0, 1, 2, 3, 4], [IGNORE] * 5),
    ],
)
def test_next_token_labels(documents, expected):
    ids = torch.arange(1, 6)[None]
    documents = documents if documents is None else torch.tensor([documents])
    assert losses.next_token_labels(ids, documents).tolist() == [expected]
