"""Weight files before they are read: sharded or not, whole or not, pickled or not."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attn2mamba.errors import UserError
from attn2mamba.teachers import load_teacher

CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=2
)  # fmt: skip


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


@pytest.fixture
def sharded(tmp_path, model, tiny_tokenizer):
    """The model in at least three safetensors shards, with a tokenizer."""
    model.save_pretrained(tmp_path / "tiny", max_shard_size="15KB")
    tiny_tokenizer.save_pretrained(tmp_path / "tiny")
    assert len(list((tmp_path / "tiny").glob("*.safetensors"))) >= 3
    return tmp_path / "tiny"


@pytest.fixture
def pickled(tmp_path, model, tiny_tokenizer):
    """The model in two pickles, as older versions of transformers saved it."""
    model.config.save_pretrained(tmp_path / "old")
    tiny_tokenizer.save_pretrained(tmp_path / "old")
    weights = list(model.state_dict().items())
    names = {}
    for number, part in enumerate((weights[:5], weights[5:]), start=1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save(dict(part), tmp_path / "old" / file)
        names |= {name: file for name, _ in part}
    (tmp_path / "old" / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return tmp_path / "old"


def error_of(path, **options) -> str:
    with pytest.raises(UserError) as caught:
        load_teacher(str(path), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def same_weights(one: torch.nn.Module, two: torch.nn.Module) -> bool:
    other = two.state_dict()
    return all(torch.equal(tensor, other[name]) for name, tensor in one.state_dict().items())


def test_shards(sharded, model):
    assert same_weights(model, load_teacher(str(sharded)).model)


@pytest.mark.parametrize("cut", [0, 5, 100, -1])
def test_a_shard_cut_short_is_named(sharded, cut):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:cut])
    assert f"{shard.name} is cut short" in error_of(sharded)


def test_a_shard_that_is_not_there_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"lacks {shard.name}" in error_of(sharded)


def test_shards_without_a_usable_index(sharded):
    (sharded / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json cannot be read" in error_of(sharded)
    (sharded / "model.safetensors.index.json").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in error_of(sharded)


def test_pickles_are_read_only_when_asked(pickled, model):
    message = error_of(pickled)
    assert "can run code" in message and "--allow-pickle" in message and "allow_pickle=True" in message
    assert same_weights(model, load_teacher(str(pickled), allow_pickle=True).model)


def test_one_pickle(pickled, model):
    for file in pickled.glob("pytorch_model*"):
        file.unlink()
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    assert same_weights(model, load_teacher(str(pickled), allow_pickle=True).model)


def test_safetensors_go_before_pickles(sharded, model):
    torch.save({"model.norm.weight": torch.zeros(16)}, sharded / "pytorch_model.bin")
    assert same_weights(model, load_teacher(str(sharded), allow_pickle=True).model)


def test_broken_pickles_are_named(pickled):
    shard = pickled / "pytorch_model-00002-of-00002.bin"
    shard.write_bytes(shard.read_bytes()[:-50])
    assert f"{shard.name} is cut short" in error_of(pickled, allow_pickle=True)
    shard.unlink()
    assert f"lacks {shard.name}" in error_of(pickled, allow_pickle=True)


class Mark:
    def __reduce__(self):
        return print, ("run",)


def test_an_allowed_pickle_still_runs_no_code(pickled, capfd):
    for file in pickled.glob("pytorch_model*"):
        file.unlink()
    torch.save({"model.norm.weight": Mark()}, pickled / "pytorch_model.bin")
    assert "cannot be read" in error_of(pickled, allow_pickle=True)
    assert capfd.readouterr().out == ""
