"""What `inspect` says of a teacher, from shapes alone."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, MixtralConfig

from attn2mamba.inspection import inspect_teacher
from attn2mamba.teachers import Teacher


def inspected(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return inspect_teacher(Teacher(model, None, "a teacher", config))


def test_the_parameters_that_the_paper_adds_to_pythia_1b():
    """Shared feature maps add 2.1M, the gate 67.1M (arXiv 2604.14191)."""
    pythia = GPTNeoXConfig(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=8, intermediate_size=8192, vocab_size=50304
    )
    found = inspected(pythia)
    added = {variant.mixer: variant.added_parameters for variant in found.variants}
    assert found.heads == [(8, 8, 256)] and found.layers == 16
    assert added["hedgehog"] == pytest.approx(2.1e6, rel=0.01)
    assert added["hedgemamba"] - added["hedgehog"] == pytest.approx(67.1e6, rel=0.02)


def test_a_mixture_of_experts():
    config = MixtralConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32
    )
    assert inspected(config).heads == [(4, 2, 8)]
