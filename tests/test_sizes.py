"""Bytes said against bytes held."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Gemma4TextConfig, MistralConfig

from attn2mamba.convert import convert
from attn2mamba.sizes import added_parameters, cross_over, human_bytes, human_cross_over, kv_bytes, state_bytes
from attn2mamba.student import Attn2MambaConfig

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


@pytest.mark.parametrize("window", [6, 20])
def test_a_window_is_never_wider_than_the_teachers(tiny_teacher, window):
    student, _ = convert(tiny_teacher("gemma3_text"), {**HEDGEMAMBA, "window": window})  # two layers slide over 8
    assert held(student, 40) == state_bytes(student.config)


@pytest.mark.parametrize("keep", [[0, 2], [1], "sliding"])
@pytest.mark.parametrize("length", [5, 20])
def test_kept_layers_of_another_shape(differing_layers, tmp_path, keep, length):
    student, _ = convert(differing_layers, HEDGEMAMBA, keep)
    student.save_pretrained(tmp_path)
    config = Attn2MambaConfig.from_pretrained(tmp_path)  # knows the shapes of converted layers only
    assert held(student, length) == state_bytes(config) + kv_bytes(config, length, kept_only=True)
    assert kv_bytes(config, length) == held(differing_layers, length)


@pytest.fixture(scope="module")
def differing_layers():
    """A teacher whose sliding layers have other heads than its full ones."""
    config = Gemma4TextConfig(
        **{**TINY, "num_hidden_layers": 4},
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        head_dim=8,
        global_head_dim=16,
        intermediate_size=48,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=50,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("mixer", MIXERS, ids=str)
def test_added_parameters_are_those_of_the_mixers(tiny_teacher, mixer):
    teacher = tiny_teacher("gemma3_text")
    student, _ = convert(teacher, mixer)
    parts = added_parameters(mixer, student.config.layers)
    new = {name: p.numel() for name, p in student.named_parameters() if ".mixer." in name}
    assert sum(parts.values()) == sum(new.values())
    assert parts["gate"] == sum(n for name, n in new.items() if ".gate." in name)
    assert parts["feature_maps"] == sum(n for name, n in new.items() if ".feature_" in name)
