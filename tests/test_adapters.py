"""PEFT adapter directories: merged, they are the base with the adapter; what cannot be merged is refused by name."""

import copy
import json
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attn2mamba.convert import convert
from attn2mamba.errors import UserError
from attn2mamba.teachers import load_teacher

peft = pytest.importorskip("peft")

IDS = torch.arange(5, 29).unsqueeze(0)
CAUSAL = {"task_type": "CAUSAL_LM"}
KINDS = {
    "lora": (peft.LoraConfig, {"target_modules": ["q_proj", "down_proj"]}),
    "lora of the head": (peft.LoraConfig, {"target_modules": ["q_proj", "lm_head"]}),
    "lora of the embeddings": (peft.LoraConfig, {"target_modules": ["q_proj", "embed_tokens"]}),
    "whole head": (peft.LoraConfig, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "whole embeddings": (peft.LoraConfig, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "some tokens": (peft.LoraConfig, {"target_modules": ["q_proj"], "trainable_token_indices": [6, 9]}),
    "both ends alike": (
        peft.LoraConfig,
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "dora": (peft.LoraConfig, {"target_modules": ["q_proj"], "use_dora": True}),
    "ia3": (peft.IA3Config, {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
}


@pytest.fixture
def make(tmp_path, tiny_tokenizer):
    """Build tmp_path/base and an adapter for it in tmp_path/adapter; returns the adapted model, whose trained parts
    are random."""

    def build(kind, settings, tied=False):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            initializer_range=0.2,
        )
        model = LlamaForCausalLM(config)
        model.save_pretrained(tmp_path / "base")
        tiny_tokenizer.save_pretrained(tmp_path / "base")
        model.name_or_path = model.config._name_or_path = str(tmp_path / "base")
        adapted = peft.get_peft_model(model, kind(**{**CAUSAL, **settings})).eval()
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        adapted.save_pretrained(tmp_path / "adapter")
        return adapted

    return build


def error_of(name, **options) -> str:
    with pytest.raises(UserError) as caught:
        load_teacher(str(name), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewrite(path, **changes):
    settings = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(settings | changes))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_is_base_and_adapter(make, tmp_path, kind, tied):
    adapted = make(*KINDS[kind], tied)
    with torch.no_grad():
        expected = adapted(IDS).logits
    teacher = load_teacher(str(tmp_path / "adapter"))
    model = teacher.model
    assert type(model) is LlamaForCausalLM and teacher.name == model.config._name_or_path == "adapter"
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    assert not [name for name, module in model.named_modules() if "peft" in type(module).__module__]
    assert not any(hasattr(owner, "peft_config") or hasattr(owner, "peft_type") for owner in (model, model.config))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert set(model.state_dict()) == set(LlamaForCausalLM(model.config).state_dict())
    assert model.config.tie_word_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)

    model.save_pretrained(tmp_path / "merged")
    teacher.tokenizer.save_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(load_teacher(str(tmp_path / "merged")).model(IDS).logits, model(IDS).logits)


def test_a_merged_teacher_converts(make, tmp_path):
    make(*KINDS["lora of the head"], tied=True)
    teacher = load_teacher(str(tmp_path / "adapter"))
    student, _ = convert(teacher.model)
    student.save_pretrained(tmp_path / "student")
    assert torch.equal(student.get_output_embeddings().weight, teacher.model.lm_head.weight)
    assert student.config.tie_word_embeddings is False


def test_dtype(make, tmp_path):
    make(*KINDS["lora"])
    assert {p.dtype for p in load_teacher(str(tmp_path / "adapter"), dtype=torch.bfloat16).model.parameters()} == {
        torch.bfloat16
    }


def test_the_tokenizer_is_the_adapters_if_it_has_one(make, tmp_path, tiny_tokenizer):
    make(*KINDS["lora"])
    assert load_teacher(str(tmp_path / "adapter")).tokenizer.chat_template is None
    own = copy.deepcopy(tiny_tokenizer)
    own.chat_template = "own"
    own.save_pretrained(tmp_path / "adapter")
    for file in (tmp_path / "base").glob("tokenizer*"):
        file.unlink()
    assert load_teacher(str(tmp_path / "adapter")).tokenizer.chat_template == "own"


def test_config_only_needs_neither_weights_nor_peft(make, tmp_path, monkeypatch):
    make(*KINDS["lora"])
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    (tmp_path / "base" / "model.safetensors").unlink()
    monkeypatch.setitem(sys.modules, "peft", None)
    assert load_teacher(str(tmp_path / "adapter"), config_only=True).config.num_hidden_layers == 2


def test_a_base_that_is_not_there(make, tmp_path):
    make(*KINDS["lora"])
    rewrite(tmp_path / "adapter", base_model_name_or_path="nobody/such-base")
    message = error_of(tmp_path / "adapter")
    assert "adapter 'adapter' (LORA)" in message and "nobody/such-base" in message and "offline" in message
    rewrite(tmp_path / "adapter", base_model_name_or_path="/no/such/base")
    assert "/no/such/base" in error_of(tmp_path / "adapter")
    rewrite(tmp_path / "adapter", base_model_name_or_path=None)
    assert "has no base_model_name_or_path" in error_of(tmp_path / "adapter")
    rewrite(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "adapter"))
    assert "is an adapter too" in error_of(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{")
    assert "adapter_config.json cannot be read" in error_of(tmp_path / "adapter")


def test_another_base(make, tmp_path, tiny_tokenizer):
    make(*KINDS["lora"])
    LlamaForCausalLM(LlamaConfig(vocab_size=300, hidden_size=16, intermediate_size=48, num_hidden_layers=2,
                                 num_attention_heads=4)).save_pretrained(tmp_path / "base")  # fmt: skip
    assert "cannot be merged into its base" in error_of(tmp_path / "adapter")
    LlamaForCausalLM(LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                 num_attention_heads=4, num_key_value_heads=2),
                     ).save_pretrained(tmp_path / "base")  # fmt: skip
    assert "does not fit its base 'base'" in error_of(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (peft.PromptTuningConfig, {"num_virtual_tokens": 3}, "PROMPT_TUNING"),
        (peft.PrefixTuningConfig, {"num_virtual_tokens": 3}, "PREFIX_TUNING"),
        (
            peft.LoraConfig,
            {"target_modules": ["q_proj"], "alora_invocation_tokens": [3]},
            "adapter 'adapter' (LORA) cannot be merged",
        ),
        (peft.LoraConfig, {"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 2]]}, "(LORA) cannot be"),
        (peft.LoraConfig, {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}, "SEQ_CLS"),
    ],
)
def test_kinds_that_cannot_be_merged(make, tmp_path, kind, settings, words):
    make(kind, settings)
    assert words in error_of(tmp_path / "adapter")


def test_broken_and_pickled_adapters(make, tmp_path):
    adapted = make(*KINDS["lora"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert "adapter_model.safetensors is cut short" in error_of(tmp_path / "adapter")
    file.unlink()
    assert "has no weights" in error_of(tmp_path / "adapter")
    torch.save(peft.get_peft_model_state_dict(adapted), tmp_path / "adapter" / "adapter_model.bin")
    assert "--allow-pickle" in error_of(tmp_path / "adapter")
    with torch.no_grad():
        got = load_teacher(str(tmp_path / "adapter"), allow_pickle=True).model(IDS).logits
        torch.testing.assert_close(got, adapted(IDS).logits, atol=1e-5, rtol=1e-5)


def test_without_peft(make, tmp_path, monkeypatch):
    make(*KINDS["lora"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install peft" in error_of(tmp_path / "adapter")


def test_what_is_asked_for_in_vain(make, tmp_path):
    make(*KINDS["lora"])
    assert "save the merged model" in error_of(tmp_path / "adapter", device_map="auto")
    (tmp_path / "adapter" / "model.safetensors").write_bytes((tmp_path / "base" / "model.safetensors").read_bytes())
    assert "a model and an adapter" in error_of(tmp_path / "adapter")
