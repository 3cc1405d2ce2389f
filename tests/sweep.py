"""Every causal language model that transformers registers: converts and passes, or is refused, and with which words.

`make families` writes the table, docs/families.md.
"""

import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tiny_families import VOCABULARY, tiny_config, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from attn2mamba.convert import convert, hand_over
from attn2mamba.errors import UserError
from attn2mamba.probe import attention_geometry, probe_tokens, record, refuse_packing, softmax
from attn2mamba.quiet import quiet
from attn2mamba.recipe import Recipe, Transfer
from attn2mamba.stages import TransferStage
from attn2mamba.student.modeling_attn2mamba import Attn2MambaForCausalLM

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LARGE = 3_000_000
"""Parameters from which a configuration without a tiny form is probed from its shapes alone."""


@dataclass
class Outcome:
    """result: "converts", "refused", or "not built": by transformers, from its own configuration. words: what the
    attention has, or why not."""

    family: str
    result: str
    words: str


def sweep(family: str) -> Outcome:
    """Build the family's tiny model, convert it and check it. Raises AssertionError when a check fails."""
    try:
        config = tiny_config(family)
        with torch.device("meta"):
            teacher = AutoModelForCausalLM.from_config(config)
        large = sum(p.numel() for p in teacher.parameters()) > LARGE
        teacher = teacher if large else tiny_model(config)
    except Exception as error:  # each in its own way
        return Outcome(family, "not built", type(error).__name__)
    try:
        if large:
            attention_geometry(teacher)
            raise AssertionError(f"{family} would convert; give it a tiny configuration")
        check(teacher)
    except UserError as error:
        return Outcome(family, "refused", str(error).split(" cannot be converted: it ")[1])
    return Outcome(family, "converts", describe(teacher))


def check(teacher: PreTrainedModel) -> None:
    """What a user relies on; `convert` itself compares reading at once, in pieces and padded."""
    student, _ = convert(teacher)
    refuse_packing(teacher)
    tokens = torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(0))
    assert_close(transfer_logits(student, tokens), own_logits(teacher, tokens))
    before = own_logits(student, tokens)
    hand_over(student, {"name": "hedgemamba"})
    assert_close(own_logits(student, tokens), before)
    randomise(student)
    student.generation_config.eos_token_id = None
    expected = own_logits(student, tokens)
    assert torch.equal(generated(student, tokens[:1, :6]), greedy(student, tokens[:1, :6]))
    with tempfile.TemporaryDirectory() as path:
        student.save_pretrained(path)
        assert torch.equal(own_logits(AutoModelForCausalLM.from_pretrained(path).eval(), tokens), expected)


def transfer_logits(student: Attn2MambaForCausalLM, tokens: Tensor) -> Tensor:
    """Logits of the model while stage 1 runs."""
    spec = Transfer(tokens=1, lr=1e-2)
    stage = TransferStage(student, Recipe(sequence_length=20, batch_size=2, stages=[spec]), spec)
    stage.start()
    stage.learning = False
    logits = own_logits(student, tokens)
    stage.stop()
    return logits


@torch.no_grad()
def own_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits


def generated(model: PreTrainedModel, prompt: Tensor) -> Tensor:
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def greedy(model: PreTrainedModel, prompt: Tensor) -> Tensor:
    """The same from one plain forward a token."""
    for _ in range(4):
        prompt = torch.cat([prompt, own_logits(model, prompt)[:, -1:].argmax(-1)], dim=1)
    return prompt


@torch.no_grad()
def randomise(student: PreTrainedModel) -> None:
    torch.manual_seed(1)
    for name, parameter in student.named_parameters():
        if ".mixer." in name:
            parameter.add_(torch.randn_like(parameter).abs(), alpha=0.2)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest logit."""
    torch.testing.assert_close(actual, expected, atol=1e-5 * float(expected.abs().max().clamp_min(1)), rtol=1e-5)


def describe(teacher: PreTrainedModel) -> str:
    """What the tiny model's attention has, as its attention function is called."""
    calls = record(teacher, probe_tokens(teacher), softmax).calls
    heads, kv_heads = calls[0].query.shape[1], calls[0].key.shape[1]
    words = ["grouped heads" if 1 < kv_heads < heads else "one key head" if kv_heads < heads else "all heads"]
    options = [call.options for call in calls]
    words += ["sliding window"] * any(o.get("sliding_window") for o in options)
    words += ["soft-cap"] * any(o.get("softcap") is not None for o in options)
    words += ["sinks"] * any(o.get("s_aux") is not None for o in options)
    words += ["layers of different shapes"] * (len({c.key.shape + c.value.shape for c in calls}) > 1)
    words += ["experts"] * any("Expert" in type(m).__name__ for m in teacher.modules())
    return ", ".join(words)


def main(path: str) -> None:
    with quiet():
        outcomes = [sweep(family) for family in FAMILIES]
    Path(path).write_text(document(outcomes))


def document(outcomes: list[Outcome]) -> str:
    count = Counter(outcome.result for outcome in outcomes)
    lines = [
        "# Families",
        "",
        "Written by `make families`: a tiny random model of every causal language model that transformers "
        f"{transformers.__version__} registers. *converts*: its student passes the checks of `tests/sweep.py` (stage 1 "
        "sees the teacher's own stream, packed documents stay apart, the handover keeps the function, text read at "
        "once, in pieces and padded gives the same, greedy generation equals plain forwards, save and reload is "
        "exact). *refused*: `attn2mamba` says so in these words, before anything is trained. *not built*: "
        "transformers does not build the model from its own configuration.",
        "",
        f"{count['converts']} convert, {count['refused']} are refused, {count['not built']} are not built.",
        "",
        "| model_type | | attention, or the reason |",
        "|---|---|---|",
        *(f"| {o.family} | {o.result} | {o.words} |" for o in outcomes),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1])
