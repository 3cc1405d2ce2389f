"""A student beside a teacher of another shape: which layers are compared, and the projector's start and training."""

import pytest
import torch

from attn2mamba import losses
from attn2mamba.alignment import Projector, layer_map, layer_widths


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [
        (2, 6, [3, 6]),
        (3, 2, [1, 1, 2]),
        (3, 3, [1, 2, 3]),
        (6, 2, [1, 1, 1, 1, 2, 2]),
        (4, 1, [1, 1, 1, 1]),
        (1, 5, [5]),
        (12, 16, [1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16]),
    ],
)
def test_layers_are_spread_evenly(student, teacher, expected):
    assert layer_map(student, teacher) == expected


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text", "gpt2"])
def test_widths_are_those_of_the_layers(tiny_teacher, family):
    assert layer_widths(tiny_teacher(family)) == [32] * (3 if family == "gemma3_text" else 2)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_equal_widths_need_no_projector(tiny_teacher, layers):
    assert Projector.between(tiny_teacher("llama"), tiny_teacher("llama", num_hidden_layers=layers)) is None


@pytest.mark.parametrize("width", [16, 48])
def test_a_projector_starts_as_the_identity_and_draws_nothing(tiny_teacher, width):
    state = torch.get_rng_state()
    projector = Projector.between(
        (student := tiny_teacher("llama")), tiny_teacher("llama", hidden_size=width, num_hidden_layers=3)
    )
    torch.set_rng_state(state)
    Projector([(32, width)] * 2)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        states = student(torch.arange(6)[None], output_hidden_states=True).hidden_states
    projected = projector(states)
    assert torch.equal(projected[0], states[0])
    for before, after in zip(states[1:], projected[1:], strict=True):
        assert after.shape == (1, 6, width)
        assert torch.equal(after[..., :32], before[..., :width]) and not after[..., 32:].any()


def states_of(seed: int, tokens: int = 400):
    """(student's hidden states of 2 layers and width 6, a teacher's of 4 layers and width 9 that are affine in them
    but for a little noise, valid positions)."""
    generator = torch.Generator().manual_seed(seed)
    ours = [torch.randn(2, tokens, 6, generator=generator) * torch.tensor([1, 1, 1, 1, 1, 100.0]) for _ in range(3)]
    maps = torch.Generator().manual_seed(0)
    theirs: list[torch.Tensor] = [torch.zeros(2, tokens, 9)] * 5
    for entry, x in ((2, ours[1]), (4, ours[2])):
        mixed = x @ torch.randn(6, 9, generator=maps) + 5 * torch.randn(9, generator=maps)
        theirs[entry] = mixed + 0.01 * torch.randn(mixed.shape, generator=generator)
    return ours, theirs, torch.rand(2, tokens, generator=generator) > 0.2


def hidden_loss(projector, ours, theirs, valid) -> torch.Tensor:
    labels = torch.where(valid, 0, losses.IGNORE)
    return losses.hidden_alignment(projector(ours), theirs, labels, int(valid.sum()), layer_map(2, 4))


def test_the_fit_finds_an_affine_map():
    """From several pieces as from one, ignoring invalid positions; it holds on states that it has not seen."""
    projector, apart = Projector([(6, 9)] * 2), Projector([(6, 9)] * 2)
    ours, theirs, valid = states_of(1)
    before = hidden_loss(projector, *states_of(2)).item()
    noisy = [torch.where(valid[..., None], y, 1e6) for y in theirs]
    projector.fit([(ours, noisy, valid)])
    after = hidden_loss(projector, *states_of(2)).item()
    assert before > 0.5 and after < 1e-3
    apart.fit([([x[i : i + 1] for x in ours], [y[i : i + 1] for y in theirs], valid[i : i + 1]) for i in (0, 1)])
    for one, two in zip(projector.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_the_fit_minimises_the_loss_itself():
    """No step away from it helps (but for the ridge), although tokens differ in scale."""
    ours, theirs, valid = states_of(1)
    theirs = [y * torch.logspace(-2, 2, 400)[:, None] for y in theirs]
    projector = Projector([(6, 9)] * 2)
    projector.fit([(ours, theirs, valid)])
    best = hidden_loss(projector, ours, theirs, valid).item()
    optimizer = torch.optim.Adam(projector.parameters(), lr=1e-3)
    for _ in range(50):
        optimizer.zero_grad()
        hidden_loss(projector, ours, theirs, valid).backward()
        optimizer.step()
    assert hidden_loss(projector, ours, theirs, valid).item() > 0.97 * best > 0.1


def test_a_fit_to_few_or_no_tokens_stays_finite():
    for keep in (0, 3):
        projector = Projector([(6, 9)] * 2)
        ours, theirs, valid = states_of(1)
        valid[:], valid[:, :keep] = False, True
        projector.fit([(ours, theirs, valid)])
        assert all(p.isfinite().all() for p in projector.parameters())
