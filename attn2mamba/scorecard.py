"""What a finished run is worth, beside its teacher: quality, a continuation, memory, speed."""

import json
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from .card import describe
from .evaluate.generation import continue_text, decode_rate
from .run import write_text
from .sizes import CONTEXTS, cross_over, human_bytes, human_cross_over, kv_bytes, state_bytes
from .student.configuration_attn2mamba import Attn2MambaConfig
from .teachers import load_teacher

PROMPT = "The capital of France is"
DECODE_CONTEXTS = (64, 4096)
NEW_TOKENS = 32


def make_scorecard(run: Path, teacher_name: str, prompt: str = PROMPT) -> dict[str, Any]:
    """Measure a finished run and write RUN/scorecard.json. Perplexities are those measured during the run."""
    teacher, student = load_teacher(teacher_name), load_teacher(str(run / "final"))
    models: dict[str, PreTrainedModel] = {"teacher": teacher.model, "student": student.model}
    limit = getattr(teacher.config, "max_position_embeddings", None) or max(DECODE_CONTEXTS)
    contexts = [n for n in DECODE_CONTEXTS if n + 64 <= limit]
    config = cast(Attn2MambaConfig, student.config)
    card = {
        "student": describe(config),
        "model": str(run / "final"),
        "perplexity": json.loads((run / "figures.json").read_text()),
        "prompt": prompt,
        "continuation": {
            role: continue_text(model, teacher.tokenizer, prompt, NEW_TOKENS) for role, model in models.items()
        },
        "memory_bytes": {
            str(n): {
                "teacher": kv_bytes(config, n),
                "student": state_bytes(config) + kv_bytes(config, n, kept_only=True),
            }
            for n in CONTEXTS
        },
        "memory_cross_over": cross_over(config),
        "decode_tokens_per_second": {
            str(n): {role: decode_rate(model, n) for role, model in models.items()} for n in contexts
        },
    }
    write_text(run / "scorecard.json", json.dumps(card, indent=1))
    return card


def print_scorecard(card: dict[str, Any], console: Console) -> None:
    table = Table(title=f"Scorecard: {card['student']}", title_justify="left")
    for column in ("", "teacher", "student"):
        table.add_column(column, justify="left" if not column else "right")
    perplexity = card["perplexity"]
    if "hedgehog" in perplexity:
        table.add_row("held-out perplexity after stage 1", "", f"{perplexity['hedgehog']['perplexity']:.2f}")
    ratio = perplexity["student"]["perplexity"] / perplexity["teacher"]["perplexity"]
    teacher, student = (f"{perplexity[role]['perplexity']:.2f}" for role in ("teacher", "student"))
    table.add_row("held-out perplexity", teacher, f"{student} ({ratio:.2f} x)")
    for context, sizes in card["memory_bytes"].items():
        table.add_row(
            f"KV cache / state at {int(context):,} tokens",
            human_bytes(sizes["teacher"]),
            human_bytes(sizes["student"]),
        )
    for context, rates in card["decode_tokens_per_second"].items():
        values = (f"{rates[role]:.1f}" for role in ("teacher", "student"))
        table.add_row(f"decode tokens/s after {int(context):,} tokens", *values)
    console.print(table)
    crossing = human_cross_over(card["memory_cross_over"])
    console.print(f"Context from which the student needs less memory than the teacher: {crossing}.")
    for role, text in card["continuation"].items():
        console.print(f"{role}: {card['prompt']}{text}", markup=False)
    console.print(
        f"\nThe model is in {card['model']}. Load it with\n"
        "  import attn2mamba; from transformers import AutoModelForCausalLM\n"
        f"  model = AutoModelForCausalLM.from_pretrained({card['model']!r})\n"
        f"or try  attn2mamba generate {card['model']} --prompt 'Once upon a time'",
        markup=False,
    )
