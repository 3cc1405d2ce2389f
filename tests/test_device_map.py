"""device_map: layers on other devices and offloaded ones, with each layer's state beside its weights.

There is no second device here, so one is pretended: tensors that live on the CPU, say that they are on `xla:1`, and
fail when they meet others, as tensors on two devices do. What makes a tensor without saying where makes it on the CPU.
"""

import accelerate
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoModelForCausalLM

from attn2mamba.convert import convert
from attn2mamba.errors import UserError
from attn2mamba.teachers import load_teacher

AWAY = torch.device("xla", 1)
MOVES = {torch.Tensor.to, torch.Tensor.copy_}


class Away(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return pretend(func, args, kwargs or {})


class PretendedDevice(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return pretend(func, args, kwargs or {})


def is_device(x) -> bool:
    return isinstance(x, torch.device) or (isinstance(x, str) and x in ("cpu", str(AWAY)))


def pretend(func, args, kwargs):
    """Call func with the pretended device replaced by the CPU; what comes out of away tensors is away."""
    leaves = tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    away = any(isinstance(x, Away) for x in tensors)
    if away and func == torch.Tensor.device.__get__:
        return AWAY
    if func is not torch.device:
        if away and func not in MOVES:
            alone = all(isinstance(x, Away) or not x.dim() for x in tensors)
            assert alone, f"{func.__name__}: expected all tensors to be on the same device"
        goals = [torch.device(x) for x in leaves if is_device(x)]
        if goals:
            away = goals[0] == AWAY
            args, kwargs = tree_map(lambda x: "cpu" if is_device(x) else x, (args, kwargs))
        elif func is torch.Tensor.copy_:
            away = isinstance(args[0], Away)

    def mark(x):
        changes = isinstance(x, torch.Tensor) and isinstance(x, Away) != away
        return x.as_subclass(Away if away else torch.Tensor) if changes else x

    with torch._C.DisableTorchFunctionSubclass():
        return tree_map(mark, func(*args, **kwargs))


def test_the_pretended_device_is_one_of_its_own():
    with PretendedDevice():
        here, there = torch.ones(2, 2), torch.ones(2, 2, device=AWAY)
        assert (there @ there).device == there.new_zeros(1).device == here.to(AWAY).device == AWAY
        assert there.to("cpu").device == here.device != AWAY
        for mixed in (lambda: here + there, lambda: torch.cat([there, here]), lambda: there[here.bool()]):
            with pytest.raises(AssertionError, match="same device"):
                mixed()


def cache_of(output):
    return output["cache" if "cache" in output else "past_key_values"]


def answers(model):
    """What a model says to plain, padded, cached and packed text: logits, the cache, and what it generates."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (2, 9), generator=generator)
    left = torch.ones_like(ids)
    left[0, :3] = 0
    found = [model(ids).logits, model(ids, attention_mask=left).logits, model(ids, attention_mask=left.flip(1)).logits]
    first = model(ids, attention_mask=left, use_cache=True)
    longer = torch.cat([left, left.flip(1)], dim=1)  # more padding after cached tokens
    second = model(ids, attention_mask=longer, past_key_values=cache_of(first))
    found += [first.logits, second.logits]
    found.append(model(ids, document_ids=torch.tensor([[0] * 4 + [1] * 5] * 2)).logits)
    for options in ({}, {"num_beams": 2}):
        found.append(model.generate(ids, attention_mask=left, max_new_tokens=3, do_sample=False, **options))
    return found, cache_of(second)


def places(layers, prefix="", rest="cpu"):
    """A device_map with `layers` {index: device}, and all else, layer 0 included, on `rest`."""
    names = ["lm_head", *(f"model.{name}" for name in ("embed_tokens", "rotary_emb", "norm", "layers.0"))]
    return {prefix + name: rest for name in names} | {f"{prefix}model.layers.{i}": x for i, x in layers.items()}


STUDENTS = {
    "pure": ({"name": "hedgemamba"}, ()),
    "window": ({"name": "hedgemamba", "window": 4}, ()),
    "hybrid": ({"name": "hedgemamba"}, (1,)),
}


@pytest.fixture(params=STUDENTS)
def student(request, tiny_teacher, randomise):
    mixer, keep = STUDENTS[request.param]
    return randomise(convert(tiny_teacher("gemma3_text"), mixer, keep=keep)[0]).eval()


def on_device(cache, index):
    layer = cache.layers[index]
    return {x.device for x in (layer.tensors.values() if hasattr(layer, "tensors") else (layer.keys, layer.values))}


@torch.no_grad()
def test_each_layers_state_is_on_its_device(student):
    expected, _ = answers(student)
    with PretendedDevice():
        accelerate.dispatch_model(student, places({1: str(AWAY), 2: str(AWAY)}, "backbone."), main_device="cpu")
        found, cache = answers(student)
        assert on_device(cache, 0) == {torch.device("cpu")} and on_device(cache, 1) == on_device(cache, 2) == {AWAY}
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("place", [places({1: "disk", 2: "cpu"}, "backbone."), "auto"], ids=["disk", "auto"])
@torch.no_grad()
def test_a_saved_student_with_a_device_map(student, tmp_path, place):
    expected, _ = answers(student)
    student.save_pretrained(tmp_path / "student")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "student", device_map=place).eval()
    assert any(p.device.type == "meta" for p in loaded.parameters()) == (place != "auto")
    for one, other in zip(expected, answers(loaded)[0], strict=True):
        torch.testing.assert_close(one, other)


def test_a_decoder_layer_is_not_split(student, tiny_teacher):
    assert set(student._no_split_modules) >= set(tiny_teacher("gemma3_text")._no_split_modules)


@torch.no_grad()
def test_a_teacher_with_a_device_map(teacher_directory, tmp_path):
    whole = load_teacher(teacher_directory).model
    spread = load_teacher(teacher_directory, device_map=places({1: "disk"})).model
    assert spread.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    ids = torch.arange(1, 20).unsqueeze(0)
    torch.testing.assert_close(spread(ids).logits, whole(ids).logits)
    assert torch.equal(load_teacher(teacher_directory, device_map="auto").model(ids).logits, whole(ids).logits)
    with pytest.raises(UserError, match="device_map"):
        load_teacher(teacher_directory, device_map={"": "cuda:77"})


def test_a_teacher_spread_over_devices_is_not_converted(teacher_directory):
    spread = load_teacher(teacher_directory, device_map=places({1: "disk"})).model
    with pytest.raises(UserError, match="load it on one device, convert and save it, then load the student with"):
        convert(spread)
    convert(load_teacher(teacher_directory, device_map="auto").model)
