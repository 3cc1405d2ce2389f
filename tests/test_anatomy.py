"""What is told of a model from its modules and calls, on the meta device."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from attn2mamba.anatomy import active_parameters, attention_calls, attention_parts, expert_layers, positions

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def build(family, **options):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **{**TINY, **options}), dtype=torch.bfloat16
        )


@pytest.mark.parametrize(
    ("family", "options", "dims", "nope"),
    [
        ("llama", {}, 8, []),
        ("phi", {"partial_rotary_factor": 0.5}, 4, []),
        ("smollm3", {}, 8, [3]),
        ("cohere2", {}, 8, [3]),
        ("exaone4", {}, 8, [3]),
    ],
)
def test_rotary_positions(family, options, dims, nope):
    model = build(family, **options)
    found = positions(model, attention_calls(model))
    assert (found.kind, found.nope_layers, found.limit) == ("rope", nope, None)
    assert [(entry["layers"], entry["dims"], entry["scaling"]) for entry in found.rotary] == [(None, dims, None)]


def test_rotary_positions_that_differ_by_layer():
    model = build("gemma3_text", layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8)
    found = {entry["layers"]: entry["theta"] for entry in positions(model, attention_calls(model)).rotary}
    assert found == {"sliding_attention": 10_000, "full_attention": 1_000_000}


def test_scaled_positions():
    model = build("gpt_oss", num_local_experts=4, num_experts_per_tok=2)
    (found,) = positions(model, attention_calls(model)).rotary
    assert (found["theta"], found["scaling"], found["factor"]) == (150_000, "yarn", 32)


@pytest.mark.parametrize(("family", "limit"), [("gpt2", 1024), ("opt", 64)])
def test_learned_positions(family, limit):
    options = {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64} if family == "opt" else {}
    model = build(family, **options)
    found = positions(model, attention_calls(model))
    assert (found.kind, found.limit, found.rotary) == ("learned", limit, [])


@pytest.mark.parametrize(
    ("family", "norms", "biases"),
    [
        ("llama", [], []),
        ("qwen2", [], ["q_proj", "k_proj", "v_proj"]),
        ("qwen3", ["q_norm", "k_norm"], []),
        ("gpt_neox", [], ["query_key_value", "dense"]),
    ],
)
def test_norms_and_biases(family, norms, biases):
    assert attention_parts(build(family)) == (norms, biases)


def test_soft_capping_and_sinks():
    assert {call.softcap for call in attention_calls(build("gemma2")).values()} == {50.0}
    model = build("gpt_oss", num_local_experts=4, num_experts_per_tok=2)
    assert all(call.sinks for call in attention_calls(model).values())


ONE_EXPERT = 3 * 32 * 24
ONE_GROUP = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("family", "options", "layers", "expert", "shared"),
    [
        ("mixtral", {"num_local_experts": 8}, 4, 3 * 32 * 48, 0),
        ("qwen2_moe", {"num_experts": 8, "shared_expert_intermediate_size": 40}, 4, ONE_EXPERT, 3 * 32 * 40 + 32),
        ("qwen3_moe", {"num_experts": 8}, 4, ONE_EXPERT, 0),
        ("olmoe", {"num_experts": 8}, 4, 3 * 32 * 48, 0),
        ("granitemoeshared", {"num_local_experts": 8, "shared_intermediate_size": 40}, 4, 3 * 32 * 48, 3 * 32 * 40),
        ("glm4_moe", {"n_routed_experts": 8, **ONE_GROUP}, 3, ONE_EXPERT, ONE_EXPERT),
        ("gpt_oss", {"num_local_experts": 8}, 4, 3 * 32 * 48 + 2 * 48 + 32, 0),
    ],
)
def test_experts(family, options, layers, expert, shared):
    model = build(family, **MOE, **options)
    (found,) = expert_layers(model)
    assert (found.layers, found.experts, found.active) == (layers, 8, 2)
    assert (found.parameters, found.shared_parameters) == (layers * 8 * expert, layers * shared)
    total = sum(p.numel() for p in model.parameters())
    assert active_parameters(model) == total - layers * 6 * expert


def test_a_dense_model_is_active_as_a_whole():
    model = build("llama")
    assert not expert_layers(model) and active_parameters(model) == sum(p.numel() for p in model.parameters())
