"""Gemma 3 270M, real weights: sandwich norms, QK-norm, one key head of 256, local and global layers."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attn2mamba.distill import distill
from attn2mamba.errors import UserError
from attn2mamba.recipe import load_recipe
from attn2mamba.teachers import load_teacher

STEPS, SEQUENCES, LENGTH = 50, 2, 64
OVERRIDES = (
    f"sequence_length={LENGTH}",
    f"batch_size={SEQUENCES}",
    f"stages.0.tokens={STEPS * SEQUENCES * LENGTH}",
    f"stages.1.tokens={STEPS * SEQUENCES * LENGTH}",
    "stages.0.mixer.window=16",
    "stages.1.loss.cross_entropy=0.0",
    "evaluate.tokens=1k",
    "evaluate.every=1M",
    "checkpoints.every=1M",
)


@pytest.mark.slow
def test_gemma_converts_trains_generates_and_reloads(tmp_path):
    try:
        tokenizer = load_teacher("gemma3-270m", config_only=True).tokenizer
    except UserError as error:
        pytest.skip(str(error))
    recipe = load_recipe("demo", OVERRIDES)
    final = distill(recipe, "gemma3-270m", ["python-docs"], tmp_path / "run")
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for stage in (0, 1):
        losses = [e["loss"] for e in entries if e["stage"] == stage and "loss" in e]
        assert len(losses) == STEPS
        assert sum(losses[-10:]) < 0.95 * sum(losses[:10])
    figures = json.loads((tmp_path / "run" / "figures.json").read_text())
    assert figures["teacher"]["perplexity"] < 60  # without its BOS Gemma is in the hundreds
    assert figures["student"]["perplexity"] < 100 * figures["teacher"]["perplexity"]
    student = AutoModelForCausalLM.from_pretrained(final).eval()
    inputs = AutoTokenizer.from_pretrained(final)("The for statement", return_tensors="pt")
    assert inputs["input_ids"][0, 0] == tokenizer.bos_token_id
    tokens = student.generate(**inputs, max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        logits = student(tokens, use_cache=False).logits[0]
    width = inputs["input_ids"].shape[1]
    logits[:, student.generation_config.suppress_tokens or []] = -torch.inf
    assert torch.equal(tokens[0, width:], logits[width - 1 : -1].argmax(-1))
