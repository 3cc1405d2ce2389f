"""`freeze`: what a pattern names, and patterns that cannot be meant."""

import pytest

from attn2mamba.convert import convert
from attn2mamba.errors import UserError
from attn2mamba.freezing import check_freezes, frozen_names
from attn2mamba.recipe import Finetune, Mixer, Recipe, Transfer

FAMILIES = ["llama", "gpt_neox", "gemma3_text", "gpt2"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("embeddings", ["model.embed_tokens.weight"]),
        ("model.norm.weight", ["model.norm.weight"]),
        ("model.layers.1.self_attn.mixer.decay", ["model.layers.1.self_attn.mixer.decay." + x for x in
                                                  ("rate", "step.weight", "step.bias")]),
        ("*.mixer.gate.bias", [f"model.layers.{i}.self_attn.mixer.gate.bias" for i in (0, 1)]),
        ("model.layers.?.mlp", [f"model.layers.{i}.mlp.{x}_proj.weight" for i in (0, 1) for x in
                                ("gate", "up", "down")]),
    ],
)  # fmt: skip
def test_freeze_patterns(tiny_teacher, pattern, expected):
    student, _ = convert(tiny_teacher("llama"), {"name": "hedgemamba"})
    assert frozen_names(student, [pattern]) == {f"backbone.{name}" for name in expected}


@pytest.mark.parametrize(
    ("patterns", "complaint"),
    [
        (["nosuch"], "'nosuch' matches no parameter"),
        (["embeddings", "layers.0"], "'layers.0' matches no parameter"),
        (["*"], "nothing is left to train"),
    ],
)
def test_freezes_that_cannot_be_meant(tiny_teacher, patterns, complaint):
    student, _ = convert(tiny_teacher("llama"), {"name": "hedgemamba"})
    with pytest.raises(UserError, match=complaint):
        frozen_names(student, patterns)


@pytest.mark.parametrize("family", FAMILIES)
def test_freezes_are_known_before_their_stage(tiny_teacher, family):
    """Seen from the first stage's student, which has none of the later stage's parts yet."""
    student, _ = convert(tiny_teacher(family), {"name": "hedgehog"})
    first = Transfer(tokens=1, lr=1)

    def recipe(*freeze):
        mixer = Mixer(name="hedgemamba")
        stage = Finetune(mixer=mixer, freeze=list(freeze), tokens=1, lr=1)
        return Recipe(sequence_length=8, batch_size=1, stages=[first, stage])

    check_freezes(recipe("embeddings", "*.mixer.gate"), student.config)
    with pytest.raises(UserError, match=r"'\*.mixer.gait' matches no parameter"):
        check_freezes(recipe("*.mixer.gait"), student.config)
