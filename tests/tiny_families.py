"""A tiny configuration of any causal LM that transformers knows: sizes by field name, exceptions by family."""

import inspect
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 64
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 32


def _all(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, Any] = {
    **_all(HIDDEN, "hidden_size n_embd d_model dim_model emb_dim embedding_size embedding_dim"),
    **_all(HIDDEN, "input_embedding_size output_embedding_size"),
    **_all(2, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"),
    **_all(HEADS, "num_attention_heads n_head n_heads attention_heads decoder_attention_heads encoder_attention_heads"),
    **_all(KV_HEADS, "num_key_value_heads"),
    **_all(HEAD_DIM, "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim rotary_dim"),
    **_all(16, "kv_lora_rank q_lora_rank o_lora_rank global_head_dim index_topk"),
    **_all(48, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dim_ff d_inner ffn_hidden_size"),
    **_all(48, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"),
    **_all(4, "num_local_experts num_experts n_routed_experts moe_num_experts index_n_heads"),
    **_all(2, "num_experts_per_tok moe_topk moe_k top_k_experts"),
    **_all(1, "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group"),
    **_all(VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    **_all(HEAD_DIM, "hidden_size_per_layer_input mamba_d_state"),
    **_all(0, "pad_token_id bos_token_id eos_token_id decoder_start_token_id"),
    **_all(4, "mamba_n_heads n_mamba_heads mamba_num_heads"),
    **_all(16, "mamba_d_head mamba_head_dim"),
    **_all(6, "sliding_window"),
    "is_decoder": True,
    "initializer_range": 0.3,
}

SHARED = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note": {"text_config": None},
    "dots3_note_text": {"num_key_value_heads": HEADS},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": SHARED,
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}},
    "gemma4_text": SHARED,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "nemotron_h": {"n_groups": 1},
    "reformer": {"axial_pos_embds": False},
    "roc_bert": {
        "pronunciation_vocab_size": 8,
        "shape_vocab_size": 8,
        "enable_shape": False,
        "enable_pronunciation": False,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "hybrid"] * 3},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Two layers, four heads on two, hidden size 32; a field that the class lacks is left out."""
    cls = CONFIG_MAPPING[model_type]
    known = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    known |= set(inspect.signature(cls.__init__).parameters)
    values = {name: value for name, value in SIZES.items() if name in known}
    if "kv_lora_rank" in known and "num_key_value_heads" in known:  # latent attention has a key for each head
        values["num_key_value_heads"] = HEADS
    if "text_config" in cls.sub_configs:
        values = {"text_config": tiny_config(cls().text_config.model_type).to_dict()}
    return cls(**{**values, **EXCEPTIONS.get(model_type, {}), **changes})


def tiny_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Random weights large enough that attention, biases and norms show in the logits."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            else:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    return model
