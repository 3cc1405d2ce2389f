"""Shared fixtures: offline, a token store of the session's own, a tokenizer and teachers too small to notice."""

import copy
import os
import random
import signal
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import attn2mamba_cli
from attn2mamba.student.mixers import Mixer

torch.set_num_threads(1)  # tensors this small only wait for one another; pytest-xdist uses the cores


@pytest.fixture(scope="session", autouse=True)
def _token_store(tmp_path_factory):
    os.environ["ATTN2MAMBA_CACHE"] = str(tmp_path_factory.mktemp("tokens"))


@pytest.fixture
def cli(monkeypatch, capfd):
    """Run the command line in this process; (exit code, stdout, stderr)."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["attn2mamba", *map(str, words)])
        handler = signal.getsignal(signal.SIGTERM)
        capfd.readouterr()
        try:
            with pytest.raises(SystemExit) as exit:
                attn2mamba_cli.main()
        finally:
            signal.signal(signal.SIGTERM, handler)
        return exit.value.code, *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 300 tokens: any text round-trips; `<eos>` is id 0 and also pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog sat on the log"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


@pytest.fixture(scope="session")
def bos_tokenizer(tiny_tokenizer) -> PreTrainedTokenizerFast:
    """The same, but a text begins with <bos> as with Gemma and Llama."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    bos = tokenizer.bos_token_id
    template = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


TINY = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
FAMILIES = {
    "llama": lambda: LlamaConfig(**TINY, **IDS, num_key_value_heads=2, intermediate_size=48, tie_word_embeddings=True),
    "gpt_neox": lambda: GPTNeoXConfig(**TINY, **IDS, intermediate_size=48, rotary_pct=0.25),
    "gemma3_text": lambda: Gemma3TextConfig(
        **{**TINY, **IDS, "num_hidden_layers": 3},
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=2048, initializer_range=0.3, **IDS
    ),
    "mamba": lambda: MambaConfig(vocab_size=50, hidden_size=16, state_size=4, num_hidden_layers=1),
}


@pytest.fixture(scope="session")
def tiny_teacher():
    """Family name -> a random teacher of it, two or three layers, whose logits are of order 1 and differ by token."""

    def build(family: str, seed: int = 0, **changes) -> PreTrainedModel:
        torch.manual_seed(seed)
        config = FAMILIES[family]()
        for name, value in changes.items():
            setattr(config, name, value)
        return AutoModelForCausalLM.from_config(config).eval()

    return build


@pytest.fixture(scope="session")
def randomise():
    """Module -> the same, in place, with no mixer parameter at the value that makes its part the identity."""

    def change(module: torch.nn.Module, seed: int = 1) -> torch.nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in sorted(module.named_parameters()):
                noise = torch.randn(parameter.shape, generator=generator)
                if name.endswith("decay.rate"):
                    parameter.copy_(noise.abs() * 0.3)
                elif name.startswith("mixer.") or ".mixer." in name or isinstance(module, Mixer):
                    parameter.add_(noise, alpha=0.3)
        return module

    return change


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> str:
    """A text file of a hundred short documents' worth of words, in one jsonl file."""
    draw = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "log", "ran", "to", "see", "sun"]
    lines = [f'{{"text": "{" ".join(draw.choices(words, k=60))}"}}\n' for _ in range(100)]
    path = tmp_path_factory.mktemp("data") / "corpus.jsonl"
    path.write_text("".join(lines))
    return str(path)


@pytest.fixture(scope="session")
def teacher_directory(tmp_path_factory, tiny_tokenizer) -> str:
    """A tiny Llama with tied embeddings, its tokenizer with a chat template, and generation settings, as saved."""
    torch.manual_seed(7)
    config = FAMILIES["llama"]()
    config.vocab_size, config.eos_token_id = len(tiny_tokenizer), tiny_tokenizer.eos_token_id
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.update(repetition_penalty=1.5, eos_token_id=config.eos_token_id)
    path = tmp_path_factory.mktemp("teachers") / "tiny-llama"
    model.save_pretrained(path)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(path)
    return str(path)
