"""What `inspect` says of a teacher or of a converted model, from shapes alone."""

import io
import json
import resource
import sys
from dataclasses import asdict

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, GPTNeoXConfig, LlamaConfig, MambaConfig

from attn2mamba.convert import convert
from attn2mamba.errors import UserError
from attn2mamba.hardware import parse_hardware
from attn2mamba.inspection import Terms, inspect_model
from attn2mamba.inspection_text import human_seconds, print_inspection
from attn2mamba.recipe import load_recipe
from attn2mamba.sizes import kv_bytes, state_bytes
from attn2mamba.teachers import Teacher, load_teacher

PYTHIA_1B = GPTNeoXConfig(
    hidden_size=2048,
    num_hidden_layers=16,
    num_attention_heads=8,
    intermediate_size=8192,
    vocab_size=50304,
    rotary_pct=0.25,
)
PYTHIA_4 = GPTNeoXConfig(**{**PYTHIA_1B.to_dict(), "num_hidden_layers": 4})
GEMMA = Gemma3TextConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=16,
    sliding_window=512,
)


def inspected(config, terms=None):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return inspect_model(Teacher(model, None, "a teacher", config), terms)


def terms(name="default", hardware="a100-80gb", *changes, **options):
    return Terms(name, load_recipe(name, changes), parse_hardware(hardware), **options)


def printed(found) -> str:
    stream = io.StringIO()
    print_inspection(found, Console(file=stream, width=80))
    return stream.getvalue()


def test_the_parameters_that_the_paper_adds_to_pythia_1b():
    """Shared feature maps add 2.1M, the gate 67.1M (arXiv 2604.14191)."""
    found = inspected(PYTHIA_1B)
    parts = {variant.mixer: variant.parts for variant in found.variants}
    assert parts["hedgehog"]["feature_maps"] == pytest.approx(2.1e6, rel=0.01)
    assert parts["hedgemamba"]["gate"] == pytest.approx(67.1e6, rel=0.002)
    for variant in found.variants:
        assert variant.added_parameters == sum(variant.parts.values())
    assert found.layers == 16 and found.parameters == found.active_parameters
    (kind,) = found.attention
    assert (kind.heads, kind.kv_heads, kind.head_dim, kind.sliding_window) == (8, 8, 256, None)
    assert found.positions.rotary[0]["dims"] == 64


def test_layers_that_keep_sliding_would_leave():
    found = inspected(GEMMA)
    assert found.keep_sliding == [0, 1, 2, 3, 4]
    assert [(kind.layers, kind.sliding_window) for kind in found.attention] == [([0, 1, 2, 3, 4], 512), ([5], None)]
    hybrid = found.variants[-1]
    assert hybrid.mixer == "hedgemamba, keep sliding"
    assert hybrid.bytes[1024] == hybrid.state_bytes + 5 * 511 * 2 * 16 * 2
    assert "`keep: sliding` would keep 5 of them (window 512)" in " ".join(printed(found).split())


def test_a_model_that_no_machine_would_hold():
    """The gates alone would take gigabytes in fp32."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = LlamaConfig(hidden_size=16384, num_hidden_layers=4, num_attention_heads=128, num_key_value_heads=8)
    assert inspected(config, terms()).variants[1].parts["gate"] > 1e9
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 3e8 / (1 if sys.platform == "darwin" else 1024)


def test_training_adds_up():
    one = inspected(PYTHIA_4, terms("paper", "h100-sxm")).training
    eight = inspected(PYTHIA_4, terms("paper", "h100-sxm", utilisation=0.2, devices=8)).training
    assert [stage.kind for stage in one.stages] == ["transfer", "finetune"]
    assert one.flops == sum(stage.flops for stage in one.stages) == eight.flops
    assert one.memory_bytes == one.stages[1].memory.total
    assert one.seconds == pytest.approx(4 * eight.seconds, rel=0.01)
    assert one.fits is True
    assert one.stages[1].memory.optimizer == 8 * one.stages[1].trainable_parameters
    assert inspected(PYTHIA_4, terms("paper", "1e13")).training.fits is None


def test_half_precision_is_quicker_but_not_in_the_recurrence():
    full = inspected(PYTHIA_4, terms("paper", "h100-sxm")).training
    half = inspected(PYTHIA_4, terms("paper", "h100-sxm", "precision=bf16")).training
    assert 5 < full.seconds / half.seconds < 989 / 67


def test_a_recipe_that_does_not_fit_the_teacher():
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=256)
    found = inspected(config, terms())
    assert found.training is None and "256" in found.refused["recipe default"]
    assert "recipe default is not possible: this model has positions for 256" in " ".join(printed(found).split())


def test_a_model_without_attention():
    with pytest.raises(UserError, match="Mamba"):
        inspected(MambaConfig(vocab_size=50, hidden_size=16, state_size=4, num_hidden_layers=1))


@pytest.mark.parametrize("keep", [[], "sliding"])
def test_a_converted_model(tiny_teacher, tiny_tokenizer, tmp_path, keep):
    student, _ = convert(tiny_teacher("gemma3_text"), {"name": "hedgemamba", "window": 4}, keep)
    student.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    found = inspect_model(load_teacher(str(tmp_path), config_only=True))
    assert (found.kind, found.family, found.layers) == ("student", "gemma3_text", 3)
    assert found.mixer == student.config.mixer and found.kept_layers == ([0, 2] if keep else [])
    assert found.parameters == sum(p.numel() for p in student.parameters())
    assert found.state_bytes == state_bytes(student.config, 2)
    assert found.bytes[8192] == found.state_bytes + kv_bytes(student.config, 8192, 2, kept_only=True)
    text = " ".join(printed(found).split())
    assert "HedgeMamba" in text and "converted already" in text and "window 4" in text


@pytest.mark.parametrize("config", [PYTHIA_4, GEMMA], ids=["pythia", "gemma"])
def test_what_is_printed_fits_eighty_columns(config):
    lines = printed(inspected(config, terms())).splitlines()
    assert all(len(line) <= 80 for line in lines)
    cells = [line for line in lines if line.startswith("│")]
    assert all(line.split("│")[1].strip() for line in cells), "a row was broken"


def test_json_holds_numbers():
    found = json.loads(json.dumps(asdict(inspected(GEMMA, terms()))))
    assert found["kv_bytes"]["1024"] == (5 * 511 + 1024) * 2 * 16 * 2
    assert isinstance(found["training"]["stages"][0]["memory"]["total"], int)


@pytest.mark.parametrize(
    ("seconds", "text"), [(59, "59 seconds"), (3600, "60.0 minutes"), (4 * 86400, "4.0 days"), (1e9, "31.7 years")]
)
def test_time_as_people_read_it(seconds, text):
    assert human_seconds(seconds) == text
