"""A small mixture of experts, trained here and then converted: does it recover, and what did each stage leave alone?

    python benchmarks/mixture.py runs/mixture

takes a quarter of an hour on two cores. RUN/teacher is the trained mixture, RUN/student the run that converts it.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

import attn2mamba
from attn2mamba.data import load_texts, open_data
from attn2mamba.inspection import inspect_teacher
from attn2mamba.inspection_text import print_inspection
from attn2mamba.recipe import load_recipe

VOCABULARY, LENGTH, BATCH = 2048, 256, 16


def train_tokenizer(data: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE of the data itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(load_texts(data), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def train_teacher(path: Path, data: str, tokens: int) -> None:
    """Eight experts of which two are active, four layers, on next-token cross-entropy and the router's own loss."""
    tokenizer = train_tokenizer(data)
    stream = open_data([data], tokenizer, LENGTH)[0]
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        output_router_logits=True,
        sliding_window=None,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
    steps = tokens // (LENGTH * BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    began = time.monotonic()
    for step in range(steps):
        batch = stream.batch(step * BATCH, BATCH)["input_ids"]
        output = model(batch, labels=batch, use_cache=False)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"teacher step {step}/{steps}: loss {output.loss:.3f}, {time.monotonic() - began:.0f} s", flush=True)
    model.config.output_router_logits = False
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def changed(before: Path, after: Path) -> list[str]:
    """The teacher's tensors that differ, bit for bit, in a model made from it."""
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    return [name for name, tensor in old.items() if not torch.equal(new[f"backbone.{name}"], tensor)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", default="python-docs")
    parser.add_argument("--teacher-tokens", type=int, default=2_000_000)
    parser.add_argument("--stage-tokens", type=int, nargs=2, default=(300_000, 500_000))
    parser.add_argument("--window", type=int, default=0)
    options = parser.parse_args()
    teacher = options.run / "teacher"
    if not teacher.is_dir():
        train_teacher(teacher, options.data, options.teacher_tokens)
    print_inspection(inspect_teacher(attn2mamba.load(str(teacher), config_only=True, dtype=torch.bfloat16)), Console())
    recipe = load_recipe(
        "demo",
        [
            f"sequence_length={LENGTH}",
            f"batch_size={BATCH}",
            f"stages.0.mixer.window={options.window}",
            f"stages.0.tokens={options.stage_tokens[0]}",
            f"stages.1.tokens={options.stage_tokens[1]}",
            "stages.1.lr=1e-3",
            "evaluate.tokens=20k",
            "evaluate.every=100k",
            "checkpoints.every=200k",
        ],
    )
    run = options.run / f"student-window-{options.window}"
    attn2mamba.distill(recipe, str(teacher), [options.data], run, resume=run.is_dir())
    for role, figure in json.loads((run / "figures.json").read_text()).items():
        print(f"{role}: held-out perplexity {figure['perplexity']:.2f} ({figure['tokens']:,} tokens)")
    after_one, after_two = (changed(teacher, run / name) for name in ("hedgehog", "final"))
    experts = [name for name in after_two if "expert" in name or "router" in name or ".gate." in name]
    print(
        f"teacher's tensors changed by stage 1: {len(after_one)}; by stage 2: {len(after_two)}, of which in experts and"
    )
    print(f"routers: {len(experts)}")
    sys.exit(bool(after_one))


if __name__ == "__main__":
    main()
