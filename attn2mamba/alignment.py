"""A student's hidden states beside those of a teacher of another depth or width."""

from collections.abc import Iterable, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel


def layer_map(student_layers: int, teacher_layers: int) -> list[int]:
    """The teacher's layer, counted from 1, that each of the student's layers 1 ... n is compared with: evenly spread,
    the last with the last."""
    return [max(1, round(i * teacher_layers / student_layers)) for i in range(1, student_layers + 1)]


class Projector(nn.Module):
    """A linear map with bias for each of the student's layers, from its width to that of the teacher's layer which it
    is compared with. It trains along with the student and never becomes part of it.

    widths: (student's, teacher's) of each layer of the student. The maps start as the identity on the dimensions that
    both have; see `fit`.
    """

    def __init__(self, widths: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.eye(theirs, ours) for ours, theirs in widths)
        self.biases = nn.ParameterList(torch.zeros(theirs) for _, theirs in widths)

    @classmethod
    def between(cls, student: PreTrainedModel, teacher: PreTrainedModel) -> Self | None:
        """The projector that this pair needs: None where all widths are equal."""
        ours, theirs = layer_widths(student), layer_widths(teacher)
        widths = [(own, theirs[j - 1]) for own, j in zip(ours, layer_map(len(ours), len(theirs)), strict=True)]
        return None if all(own == other for own, other in widths) else cls(widths).to(student.device)

    def forward(self, states: Sequence[Tensor]) -> list[Tensor]:
        """hidden_states of the student -> the same with each layer's output in the teacher's width (entry 0, the
        embedding, stays as it is)."""
        maps = zip(states[1:], self.weights, self.biases, strict=True)
        return [states[0], *(F.linear(x, weight, bias) for x, weight, bias in maps)]

    @torch.no_grad()
    def fit(self, batches: Iterable[tuple[Sequence[Tensor], Sequence[Tensor], Tensor]]) -> None:
        """Start at the least-squares solution of `losses.hidden_alignment` over some batches, each the student's
        hidden_states, the teacher's, and the valid positions (B, T): tokens weighted by the teacher's inverse mean
        square, and each dimension shrunk the more, the fewer tokens there are for its width. In double precision; draws
        nothing."""
        sums, tokens = list[list[Tensor]](), 0
        for ours, theirs, valid in batches:
            layers = layer_map(len(ours) - 1, len(theirs) - 1)
            products = [_products(x[valid], theirs[j][valid]) for x, j in zip(ours[1:], layers, strict=True)]
            if sums:
                products = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(sums, products, strict=True)]
            sums, tokens = products, tokens + int(valid.sum())
        for weight, bias, (square, cross) in zip(self.weights, self.biases, sums, strict=True):
            ridge = square.diagonal().clamp_min(1e-12) * len(square) / max(tokens, 1)
            solution = torch.linalg.solve(square + ridge.diag(), cross)
            weight.copy_(solution[:-1].T)
            bias.copy_(solution[-1])


def _products(inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """X^T X and X^T Y of weighted least squares with a constant: (n, d) and (n, D) -> (d + 1, d + 1), (d + 1, D)."""
    targets = targets.double()
    weight = targets.square().mean(-1, keepdim=True).clamp_min(1e-12).rsqrt()
    inputs = torch.cat([inputs.double(), torch.ones_like(weight)], dim=-1) * weight
    return [inputs.T @ inputs, inputs.T @ (targets * weight)]


@torch.no_grad()
def layer_widths(model: PreTrainedModel) -> list[int]:
    """Width of each layer's output, the last one after the final norm; runs one forward of two tokens."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    return [x.shape[-1] for x in states[1:]]
