"""What is minimised: fp32, per token, masked. Every loss here is a sum over valid tokens divided by `total`.

`total` is the number of valid tokens in the whole optimiser step (all micro-batches and ranks), so that a step's
gradient does not depend on how it was cut up, and a piece without valid tokens adds exactly 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE = -100


def token_mean(per_token: Tensor, valid: Tensor, total: int) -> Tensor:
    """Sum of per_token (...) where valid (same shape, bool), over `total`; 0 when nothing is valid."""
    return torch.where(valid, per_token, 0.0).sum() / max(total, 1)


def cosine_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """1 - cosine of each head's output, mean over heads: (B, T, H, v) twice -> (B, T)."""
    return 1 - F.cosine_similarity(prediction.float(), target.float(), dim=-1).mean(dim=-1)


def mse_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Squared error over the target's mean square in the sequence, so that every layer counts alike, whatever else is
    in the micro-batch: (B, T, H, v) twice -> (B, T)."""
    target = target.float()
    scale = target.square().mean(dim=(1, 2, 3)).clamp_min(1e-12)
    return (prediction.float() - target).square().mean(dim=(-2, -1)) / scale.unsqueeze(1)


def attention_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of attention weights (Hedgehog, arXiv 2402.04347, eq. 6), less the target's entropy so that a
    perfect match is 0: (B, H, T, T) twice -> (B, T)."""
    prediction, target = prediction.float(), target.float()
    ratio = torch.log((target + 1e-12) / (prediction + 1e-12))
    return (target * ratio).sum(dim=-1).mean(dim=1)


def next_token_labels(input_ids: Tensor, document_ids: Tensor | None) -> Tensor:
    """Labels (B, T): position t is to predict token t + 1; IGNORE at the end and, when document_ids is given (documents
    do not see each other), at a document's last token."""
    labels = F.pad(input_ids[:, 1:], (0, 1), value=IGNORE)
    if document_ids is not None:
        labels = labels.masked_fill(F.pad(document_ids[:, 1:] != document_ids[:, :-1], (0, 1)), IGNORE)
    return labels


def cross_entropy(logits: Tensor, labels: Tensor, total: int) -> Tensor:
    """Next-token cross-entropy in nats. logits (B, T, V), labels (B, T) as `next_token_labels` makes them."""
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss / max(total, 1)


def logit_kl(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    total: int,
    temperature: float = 1.0,
    shared: Tensor | None = None,
) -> Tensor:
    """KL(teacher || student) of the next-token distributions at the labelled positions, times temperature squared
    (Hinton et al. 2015), so that its gradient does not shrink with it. logits (B, T, V), labels (B, T).

    shared: (n,) ascending ids that both models know, where their rows differ in number or some are padding. Both
    distributions are then over these ids alone: the other logits, whatever they are, neither count nor get a gradient.
    """
    valid = labels != IGNORE
    student_log, teacher_log = (
        F.log_softmax(columns(logits[valid], shared).float() / temperature, dim=-1) for logits in (student, teacher)
    )
    return F.kl_div(student_log, teacher_log, reduction="sum", log_target=True) * temperature**2 / max(total, 1)


def columns(logits: Tensor, shared: Tensor | None) -> Tensor:
    """(..., V) -> (..., n): the logits of the ascending ids `shared`; without a copy where those are the first n."""
    if shared is None:
        return logits
    first = int(shared[-1]) + 1
    return logits[..., :first] if first == len(shared) else logits[..., shared.to(logits.device)]


def hidden_alignment(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    labels: Tensor,
    total: int,
    layers: Sequence[int] | None = None,
) -> Tensor:
    """Squared error of each layer's output over the teacher's mean square, mean over the student's layers. Sequences as
    transformers returns hidden_states: entry 0 is the embedding, entry i the output of layer i, the last one after the
    final norm. layers: the teacher's entry for each of the student's layers; None where the depths are equal."""
    valid = labels != IGNORE
    losses = []
    for ours, entry in zip(student[1:], layers or range(1, len(teacher)), strict=True):
        theirs = teacher[entry].float()
        error = (ours.float() - theirs).square().mean(-1) / theirs.square().mean(-1).clamp_min(1e-12)
        losses.append(token_mean(error, valid, total))
    return torch.stack(losses).mean()
