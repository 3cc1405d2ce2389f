"""What was measured is kept: by model, measure, version and options."""

import copy

import pytest
import torch

from attn2mamba.errors import UserError
from attn2mamba.evaluate.results import Results, model_fingerprint

KEY = {"measure": "m", "version": 1, "options": {"context": [1, 2]}, "model": "f", "precision": "fp32"}


def test_units_are_found_again(tmp_path):
    Results(tmp_path).save(KEY, "a", {"scores": {"x": [1.0]}})
    results = Results(tmp_path)
    results.save(KEY, "b", {"scores": {"x": [2.0]}})
    assert list(Results(tmp_path).units(KEY)) == ["a", "b"]
    for name, value in (("version", 2), ("options", {"context": [1]}), ("model", "g"), ("precision", "bf16")):
        assert Results(tmp_path).units({**KEY, name: value}) == {}


def test_fresh_knows_nothing_and_writes_anew(tmp_path):
    Results(tmp_path).save(KEY, "a", {"old": 1})
    fresh = Results(tmp_path, fresh=True)
    assert fresh.units(KEY) == {}
    fresh.save(KEY, "b", {"new": 1})
    assert fresh.units(KEY) == Results(tmp_path).units(KEY) == {"b": {"new": 1}}


@pytest.mark.parametrize("text", ["", "{", "[]\n", '{"key": 1}\n["a", {}]\n', '{"measure": "other"}\n["a", {}]\n'])
def test_a_broken_file_is_as_none(tmp_path, text):
    Results(tmp_path).save(KEY, "a", {})
    (file,) = tmp_path.glob("*.jsonl")
    file.write_text(text)
    assert Results(tmp_path).units(KEY) == {}
    Results(tmp_path).save(KEY, "b", {})
    assert Results(tmp_path).units(KEY) == {"b": {}}


@pytest.mark.parametrize("rest", ['["c", {"scores"', '["c"', '["c", {}, 1]\n', "\x00\x00", "7\n"])
def test_a_line_that_a_kill_cut_short_costs_itself_alone(tmp_path, rest):
    results = Results(tmp_path)
    for unit in "ab":
        results.save(KEY, unit, {"x": 1})
    (file,) = tmp_path.glob("*.jsonl")
    with file.open("a") as out:
        out.write(rest)
    assert list(Results(tmp_path).units(KEY)) == ["a", "b"]
    results.save(KEY, "d", {})
    assert list(Results(tmp_path).units(KEY)) == ["a", "b", "d"]


@pytest.mark.parametrize("fresh", [False, True])
def test_two_processes_lose_nothing_to_each_other(tmp_path, fresh):
    """Both open the file while it is empty."""
    first, second = Results(tmp_path, fresh), Results(tmp_path)
    assert first.units(KEY) == second.units(KEY) == {}
    for unit in "ab":
        first.save(KEY, unit, {})
    second.save(KEY, "c", {})
    first.save(KEY, "d", {})
    assert list(Results(tmp_path).units(KEY)) == ["a", "b", "c", "d"]


def test_what_a_unit_costs_to_keep_does_not_grow(tmp_path):
    """Units of half a megabyte, all written again for each, once took most of an evaluation's time."""
    results, inodes = Results(tmp_path), set()
    for unit in range(20):
        results.save(KEY, str(unit), {"x": "y" * 1000})
        (file,) = tmp_path.glob("*.jsonl")
        inodes.add(file.stat().st_ino)
        assert file.stat().st_size < 1100 * (unit + 1) + 300
    assert len(inodes) == 1  # appended, not written anew


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        Results(tmp_path / "file").save(KEY, "a", {})


def test_a_fingerprint_is_of_weights_configuration_and_tokenizer(tiny_teacher, tiny_tokenizer, bos_tokenizer):
    model = tiny_teacher("llama")
    known = model_fingerprint(model, tiny_tokenizer)
    assert model_fingerprint(tiny_teacher("llama"), tiny_tokenizer) == known
    renamed = copy.deepcopy(model)
    renamed.config._name_or_path = renamed.name_or_path = "elsewhere"
    assert model_fingerprint(renamed, tiny_tokenizer) == known
    others = [
        (tiny_teacher("llama", rms_norm_eps=1e-3), tiny_tokenizer),
        (tiny_teacher("llama", seed=1), tiny_tokenizer),
        (model, bos_tokenizer),
        (copy.deepcopy(model).to(torch.bfloat16), tiny_tokenizer),
    ]
    changed = copy.deepcopy(model)
    changed.lm_head.weight.data[3, 5] += 1e-3
    found = {known, *(model_fingerprint(*other) for other in others), model_fingerprint(changed, tiny_tokenizer)}
    assert len(found) == len(others) + 2
