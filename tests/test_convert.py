"""Conversion and handover: every tensor accounted for, the teacher untouched, the function kept."""

import copy

import pytest
import torch
from transformers import (
    PreTrainedModel,
)

from attn2mamba.convert import attention_geometry, convert, hand_over
from attn2mamba.errors import UserError
from attn2mamba.student.attention import MASKED, MASKLESS, mixer_attentions
from attn2mamba.student.mixers import Mixer

FAMILIES = ["llama", "gpt_neox", "gemma3_text", "gpt2"]
HEDGEMAMBA = {"name": "hedgemamba"}
IDS = torch.arange(1, 31)[None]


@torch.no_grad()
def logits(model, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(ids, use_cache=False).logits


def state(model) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def assert_same_state(actual, expected) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def error_of(function, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("mixer", [{"name": "hedgehog"}, {**HEDGEMAMBA, "window": 5}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_accounted_for(tiny_teacher, family, mixer):
    teacher = tiny_teacher(family)
    student, report = convert(teacher, mixer)
    own = student.state_dict()
    assert set(report.origins) == set(own)
    copied = {name for name, origin in report.origins.items() if origin == "copied"}
    assert copied == {f"backbone.{name}" for name in teacher.state_dict()}
    assert all(".mixer." in name for name in set(own) - copied)
    assert sum(report.parameters.values()) == sum(x.numel() for x in student.parameters())  # tied ones count once
    assert_same_state({name: own[f"backbone.{name}"] for name in teacher.state_dict()}, teacher.state_dict())
    initialised = sum(report.parameters[name] for name in set(own) - copied)
    assert f"{len(copied)} tensors copied" in str(report)
    assert f"{len(own) - len(copied)} tensors initialised ({initialised / 1e6:.2f}M parameters)" in str(report)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_mixer_starts_as_the_identity(tiny_teacher, family):
    """The family's own initialiser leaves it alone, whether the model is converted or built from its configuration."""
    student, _ = convert(tiny_teacher(family), HEDGEMAMBA)
    for model in (student, type(student)(student.config)):
        for attention in mixer_attentions(model):
            fresh = Mixer(student.config.mixer, student.config.layers[attention.layer_idx])
            assert_same_state(state(attention.mixer), fresh.state_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_teacher_is_left_as_it_was(tiny_teacher, randomise, family):
    teacher = tiny_teacher(family)
    before, implementation, expected = state(teacher), teacher.config._attn_implementation, logits(teacher)
    config, modules = (
        copy.deepcopy(teacher.config.to_dict()),
        [(n, type(m)) for n, m in teacher.named_modules()],
    )
    student, _ = convert(teacher, HEDGEMAMBA)
    with torch.no_grad():
        for parameter in randomise(student).parameters():
            parameter.add_(1)
    assert_same_state(state(teacher), before)
    assert teacher.config._attn_implementation == implementation
    assert teacher.config.to_dict() == config
    assert [(n, type(m)) for n, m in teacher.named_modules()] == modules
    assert not teacher.training and all(p.requires_grad for p in teacher.parameters())
    assert torch.equal(logits(teacher), expected)
    assert teacher.generate(IDS, max_new_tokens=2, pad_token_id=0).shape[1] == 32


def test_an_error_on_the_way_leaves_the_teacher_as_it_was(tiny_teacher, monkeypatch):
    teacher = tiny_teacher("llama")
    expected, implementation = logits(teacher), teacher.config._attn_implementation
    monkeypatch.setattr(teacher.lm_head, "forward", lambda x: 1 / 0)
    with pytest.raises(UserError, match="division by zero"):
        convert(teacher)
    monkeypatch.undo()
    assert teacher.config._attn_implementation == implementation
    assert torch.equal(logits(teacher), expected)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {}, [4, 2, 8, 8, 32]),
        ("llama", {"head_dim": 12}, [4, 2, 12, 12, 32]),
        ("llama", {"num_key_value_heads": 1}, [4, 1, 8, 8, 32]),
        ("gpt_neox", {}, [4, 4, 8, 8, 32]),
        ("gemma3_text", {}, [4, 2, 16, 16, 32]),
        ("gpt2", {}, [4, 4, 8, 8, 32]),
    ],
)
def test_geometry_is_what_the_attention_gets(tiny_teacher, family, changes, expected):
    teacher = tiny_teacher(family, **changes)
    assert attention_geometry(teacher) == [expected] * teacher.config.num_hidden_layers
    student, _ = convert(teacher, HEDGEMAMBA)
    assert logits(student).isfinite().all()


@pytest.mark.parametrize(
    ("family", "keep", "kept"),
    [("llama", [], []), ("llama", [1], [1]), ("gpt2", [0], [0]), ("gemma3_text", "sliding", [0, 2])],
)
def test_kept_layers_keep_their_attention(tiny_teacher, family, keep, kept):
    student, _ = convert(tiny_teacher(family), HEDGEMAMBA, keep)
    assert student.config.kept_layers == kept
    assert [m.layer_idx for m in mixer_attentions(student)] == [
        i for i in range(len(student.config.layers)) if i not in kept
    ]
    assert student.backbone.config._attn_implementation == (MASKED if kept else MASKLESS)
    assert {type(layer).__name__ == "StateLayer" for layer in student.new_cache().layers} == (
        {True, False} if kept else {True}
    )


@pytest.mark.parametrize(
    ("family", "keep", "message"),
    [
        ("llama", [2], "layer 2 does not exist; the teacher has layers 0 to 1"),
        ("llama", [-1], "layer -1 does not exist"),
        ("llama", [0, 1], "nothing to convert"),
        ("llama", "sliding", "no sliding-window layer"),
        ("mamba", [], "recurrence"),
    ],
)
def test_what_cannot_be_converted(tiny_teacher, family, keep, message):
    assert message in error_of(convert, tiny_teacher(family), None, keep)


@pytest.mark.parametrize("keep", [[], [1]], ids=str)
def test_a_student_is_not_a_teacher(tiny_teacher, keep):
    assert "converted already" in error_of(convert, convert(tiny_teacher("llama"), None, keep)[0])


def test_settings_of_the_teacher_carry_over(tiny_teacher):
    teacher = tiny_teacher("llama")
    teacher.generation_config.repetition_penalty = 1.25
    teacher.model.embed_tokens.weight.requires_grad_(False)
    student, _ = convert(teacher.train())
    assert student.generation_config.repetition_penalty == 1.25
    assert student.generation_config is not teacher.generation_config
    assert student.training and all(m.training for m in student.modules())
    assert student.get_output_embeddings().weight is student.get_input_embeddings().weight
    assert not student.get_input_embeddings().weight.requires_grad
    assert student.config.vocab_size == 50 and student.config.hidden_size == 32


def test_a_16_bit_teacher_gives_a_16_bit_student(tiny_teacher):
    student, _ = convert(tiny_teacher("llama", dtype=torch.bfloat16), HEDGEMAMBA)
    assert {p.dtype for p in student.parameters()} == {torch.bfloat16}
    assert student.backbone.model.rotary_emb.inv_freq.dtype == torch.float32
    assert logits(student).dtype == torch.bfloat16


def hedgehog(tiny_teacher, randomise, family: str = "llama", **mixer) -> PreTrainedModel:
    """A student as stage 1 leaves it: feature maps, and the window's weight, far from where they started."""
    return randomise(convert(tiny_teacher(family), {"name": "hedgehog", **mixer})[0]).eval()


@pytest.mark.parametrize("mixer", [{}, {"window": 5}, {"share": "none"}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_handover_keeps_the_function(tiny_teacher, randomise, family, mixer):
    student = hedgehog(tiny_teacher, randomise, family, **mixer)
    ids = torch.randint(50, (1, 1024), generator=torch.Generator().manual_seed(0))
    before, tensors, embedding = logits(student, ids), state(student), student.get_input_embeddings().weight
    report = hand_over(student, {**HEDGEMAMBA, **mixer})
    torch.testing.assert_close(logits(student, ids), before, atol=1e-5, rtol=1e-5)
    assert_same_state({name: student.state_dict()[name] for name in tensors}, tensors)
    assert set(report.origins) == {name for name, _ in student.named_parameters()}
    assert {
        name for name, origin in report.origins.items() if origin == "copied"
    } == report.origins.keys() & tensors.keys()
    assert report.parameters == {name: p.numel() for name, p in student.named_parameters()}
    assert student.config.mixer["conv"] and student.config.mixer["name"] == "hedgemamba"
    assert student.get_input_embeddings().weight is embedding


def test_handover_keeps_what_is_tied_and_frozen(tiny_teacher, randomise):
    student = hedgehog(tiny_teacher, randomise)
    student.get_input_embeddings().weight.requires_grad_(False)
    hand_over(student, HEDGEMAMBA)
    assert student.get_output_embeddings().weight is student.get_input_embeddings().weight
    frozen = [name for name, p in student.named_parameters() if not p.requires_grad]
    assert frozen == ["backbone.model.embed_tokens.weight"]


def test_a_handed_over_model_is_saved_as_what_it_became(tiny_teacher, randomise, tmp_path):
    student = hedgehog(tiny_teacher, randomise)
    hand_over(student, HEDGEMAMBA)
    randomise(student).save_pretrained(tmp_path)
    assert torch.equal(logits(type(student).from_pretrained(tmp_path)), logits(student))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            {"name": "hedgehog"},
            {**HEDGEMAMBA, "share": "none"},
            "share cannot change between stages: heads -> none",
        ),
        ({"name": "hedgehog", "window": 5}, {**HEDGEMAMBA}, "window cannot change between stages: 5 -> 0"),
        (HEDGEMAMBA, {"name": "hedgehog"}, "no place for the trained"),
        (HEDGEMAMBA, {**HEDGEMAMBA, "conv_width": 3}, "no place for the trained conv.weight"),
    ],
)
def test_a_handover_that_would_lose_training_is_refused(tiny_teacher, randomise, before, after, message):
    student = randomise(convert(tiny_teacher("llama"), before)[0]).eval()
    expected, tensors, mixer = logits(student), state(student), student.config.mixer
    assert message in error_of(hand_over, student, after)
    assert_same_state(state(student), tensors)
    assert student.config.mixer == mixer
    assert torch.equal(logits(student), expected)
