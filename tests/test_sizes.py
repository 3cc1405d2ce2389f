"""Bytes said against bytes held."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig

from attn2mamba.convert import convert
from attn2mamba.inspection import inspect_teacher, print_inspection
from attn2mamba.sizes import cross_over, human_bytes, human_cross_over, kv_bytes, state_bytes
from attn2mamba.teachers import load_teacher

TINY = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
HEDGEMAMBA = {"name": "hedgemamba"}
MIXERS = [
    {"name": "hedgehog"},
    {"name": "hedgehog", "window": 6},
    HEDGEMAMBA,
    {**HEDGEMAMBA, "window": 6, "share": "none"},
    {**HEDGEMAMBA, "conv_width": 7, "decay": False},
    {**HEDGEMAMBA, "conv": False, "window": 3},
]


def held(model, length: int) -> int:
    """Bytes in the model's own cache after a forward of `length` tokens of one sequence."""
    with torch.no_grad():
        output = model(torch.arange(length).remainder(50)[None], use_cache=True)
    cache = output["cache" if "cache" in output else "past_key_values"]
    if not isinstance(cache, DynamicCache):
        return cache.nbytes()
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mixer", MIXERS, ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_state_bytes_are_those_held(tiny_teacher, family, mixer, dtype):
    student, _ = convert(tiny_teacher(family).to(dtype), mixer)
    expected = state_bytes(student.config, dtype.itemsize)
    assert [held(student, length) for length in (8, 20)] == [expected] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "keep"), [("llama", [0]), ("gemma3_text", "sliding"), ("gemma3_text", [1])])
@pytest.mark.parametrize("length", [5, 8, 20])
def test_a_hybrids_bytes_are_those_held(tiny_teacher, family, keep, length, dtype):
    student, _ = convert(tiny_teacher(family).to(dtype), HEDGEMAMBA, keep)
    kept = kv_bytes(student.config, length, dtype.itemsize, kept_only=True)
    assert held(student, length) == state_bytes(student.config, dtype.itemsize) + kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("length", [5, 8, 20])
def test_kv_bytes_are_those_held(tiny_teacher, family, length, dtype):
    teacher = tiny_teacher(family).to(dtype)
    config = convert(teacher)[0].config
    assert kv_bytes(config, length, dtype.itemsize) == held(teacher, length)


@pytest.mark.parametrize("length", [5, 20])
def test_a_window_in_every_layer(length):
    """Mistral names a window and no layer types."""
    config = MistralConfig(**TINY, num_key_value_heads=2, intermediate_size=48, sliding_window=8)
    teacher = AutoModelForCausalLM.from_config(config).eval()
    assert kv_bytes(convert(teacher)[0].config, length) == held(teacher, length)


@pytest.mark.parametrize("element", [4, 2])
@pytest.mark.parametrize(
    ("family", "mixer", "keep"),
    [
        ("llama", {"name": "hedgehog"}, []),
        ("llama", {**HEDGEMAMBA, "window": 16}, []),
        ("llama", HEDGEMAMBA, [1]),
        ("gemma3_text", HEDGEMAMBA, "sliding"),
    ],
    ids=str,
)
def test_cross_over_is_the_first_length_that_is_smaller(tiny_teacher, family, mixer, keep, element):
    config = convert(tiny_teacher(family), mixer, keep)[0].config

    def smaller(length):
        own = state_bytes(config, element) + kv_bytes(config, length, element, kept_only=True)
        return own < kv_bytes(config, length, element)

    first = next(length for length in range(1, 10_000) if smaller(length))
    assert cross_over(config, element) == first


def test_a_student_that_never_gets_smaller(tiny_teacher):
    """Only layers with a small sliding window are converted; the growing one is kept."""
    teacher = tiny_teacher("gemma3_text")
    config = convert(teacher, HEDGEMAMBA, [1])[0].config
    assert cross_over(config) is None
    assert human_cross_over(None) == "never"
    assert human_cross_over(1234) == "1,234 tokens"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**21, "2.0 MiB"), (5 * 2**40, "5120.0 GiB")]
)
def test_bytes_as_people_read_them(count, text):
    assert human_bytes(count) == text


def test_inspection_needs_no_weights(teacher_directory, capsys):
    from rich.console import Console

    found = inspect_teacher(load_teacher(teacher_directory, config_only=True))
    whole = load_teacher(teacher_directory)
    assert (found.teacher, found.family, found.layers, found.heads) == ("tiny-llama", "llama", 2, [(4, 2, 8)])
    assert found.parameters == sum(p.numel() for p in whole.model.parameters())
    assert found.kv_bytes[1024] == 2 * 2 * 2 * 8 * 2 * 1024
    for variant in found.variants:
        mixer = {"name": "hedgemamba" if "mamba" in variant.mixer else "hedgehog"}
        student, _ = convert(whole.model, {**mixer, "window": 64 if "window" in variant.mixer else 0})
        assert variant.state_bytes == state_bytes(student.config, 2)
        assert variant.cross_over == cross_over(student.config, 2)
        new = sum(p.numel() for name, p in student.named_parameters() if ".mixer." in name)
        assert variant.added_parameters == new
    print_inspection(found, Console(width=200))
    assert "4 query heads on 2 key/value heads of 8" in capsys.readouterr().out
