"""Models in every precision stay close to fp32; what is rounded is what is said to be."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from attn2mamba.convert import convert
from attn2mamba.errors import UserError
from attn2mamba.evaluate.perplexity import text_perplexity
from attn2mamba.evaluate.results import model_fingerprint
from attn2mamba.precision import Stepwise, inner_tensors, load_model, lower_state, quantise, quantised_share

IDS = torch.arange(40).remainder(50)[None]


@pytest.fixture(scope="module")
def wide():
    """A teacher whose matrices int4 kernels take: rows of whole groups."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, intermediate_size=96, tie_word_embeddings=True,
                         initializer_range=0.1)  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def models(wide, randomise):
    return {"teacher": wide, "student": randomise(convert(wide, {"name": "hedgemamba", "window": 4})[0])}


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits.float()


@pytest.mark.parametrize("role", ["teacher", "student"])
@pytest.mark.parametrize(("precision", "tolerance"), [("int8", 0.05), ("int4", 0.4)])
def test_quantised_models_are_close(models, role, precision, tolerance):
    expected = logits(models[role])
    model = copy.deepcopy(models[role]).to(torch.bfloat16)
    quantise(model, precision)
    error = (logits(model) - expected).norm() / expected.norm()
    assert 1e-4 < error < tolerance


def test_what_is_quantised(models):
    student = copy.deepcopy(models["student"]).to(torch.bfloat16)
    quantise(student, "int8")
    quantised = {name for name, p in student.named_parameters() if inner_tensors(p)}
    parts = {name.split("layers.0.")[1] for name in quantised if "layers.0." in name}
    projections = {f"self_attn.{p}_proj.weight" for p in "qkvo"} | {
        f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")
    }
    assert parts == projections | {"self_attn.mixer.gate.weight"}
    assert all("layers." in name for name in quantised)  # neither embeddings nor head
    assert 0.5 < quantised_share(student) < 1 and quantised_share(models["student"]) == 0


def test_int4_leaves_out_what_its_kernel_does_not_take(tiny_teacher):
    teacher = tiny_teacher("llama").to(torch.bfloat16)  # 48 inputs of down_proj are no whole groups of 32
    quantise(teacher, "int4")
    assert inner_tensors(teacher.model.layers[0].mlp.up_proj.weight)
    assert not inner_tensors(teacher.model.layers[0].mlp.down_proj.weight)
    assert logits(teacher).isfinite().all()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "int8", "int4"])
def test_every_precision_loads_and_generates(wide, tiny_tokenizer, tmp_path, precision):
    wide.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), precision).model
    assert model.generate(IDS[:, :8], max_new_tokens=4, do_sample=False).shape == (1, 12)


def test_a_fingerprint_tells_quantised_weights_apart(wide, tiny_tokenizer):
    one, two = (copy.deepcopy(wide).to(torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        two.model.layers[0].mlp.up_proj.weight[0] *= 2
    prints = []
    for model in (one, copy.deepcopy(one), two):
        quantise(model, "int8")
        prints.append(model_fingerprint(model, tiny_tokenizer))
    assert prints[0] == prints[1] != prints[2]


def test_gpt2_is_refused(tiny_teacher):
    with pytest.raises(UserError, match="gpt2 model cannot be quantised to int8"):
        quantise(tiny_teacher("gpt2"), "int8")


def test_errors(teacher_directory, monkeypatch):
    with pytest.raises(UserError, match="precision 'int3' is unknown; choose from fp32"):
        load_model(teacher_directory, "int3")
    with pytest.raises(UserError, match="no kernel on mps"):
        load_model(teacher_directory, "int4", device="mps")
    monkeypatch.setitem(__import__("sys").modules, "torchao.quantization", None)
    with pytest.raises(UserError, match=r"pip install torchao"):
        load_model(teacher_directory, "int8")


def test_a_lowered_state_is_rounded_and_read_step_by_step(models):
    """Fed token by token, a student gives its own logits; with a bf16 state, others, and its state takes half."""
    student = copy.deepcopy(models["student"])
    whole, stepped = logits(student), Stepwise(student)(input_ids=IDS, use_cache=False).logits.detach()
    torch.testing.assert_close(stepped, whole, atol=2e-4, rtol=1e-3)
    full = student(IDS, use_cache=True)
    lower_state(student, torch.bfloat16)
    lowered = student(IDS, use_cache=True)
    name = "cache" if "cache" in full else "past_key_values"
    memory, rounded = (x[name].layers[0].get("memory") for x in (full, lowered))
    assert (memory.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
    assert rounded.nbytes * 2 == memory.nbytes
    difference = (Stepwise(student)(input_ids=IDS, use_cache=False).logits.detach() - whole).norm() / whole.norm()
    assert 1e-4 < difference < 0.5


def test_a_teacher_has_no_state_to_lower(models):
    teacher = copy.deepcopy(models["teacher"])
    lower_state(teacher, torch.bfloat16)
    assert type(teacher) is type(models["teacher"])


def test_perplexity_step_by_step(teacher_directory):
    tokenizer = AutoTokenizer.from_pretrained(teacher_directory)
    model = load_model(teacher_directory).model
    text = ["the cat sat on the mat and the dog sat on the log"]
    expected = text_perplexity(model, tokenizer, text, 8)
    stepped = text_perplexity(Stepwise(model), tokenizer, text, 8)
    assert stepped.nll == pytest.approx(expected.nll, rel=1e-4) and stepped.tokens == expected.tokens
