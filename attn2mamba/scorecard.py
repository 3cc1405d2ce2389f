"""What a finished run is worth, beside the models that it comes from: quality, a continuation, memory, speed."""

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
from .vocabulary import tokenizer_of

PROMPT = "The capital of France is"
DECODE_CONTEXTS = (64, 4096)
NEW_TOKENS = 32


def make_scorecard(
    run: Path, teacher_name: str, prompt: str = PROMPT, base_name: str | None = None, allow_pickle: bool = False
) -> dict[str, Any]:
    """Measure a finished run and write RUN/scorecard.json. Perplexities are those measured during the run. The KV cache
    that the student's state replaces is that of the base, where the run had one besides its teacher."""
    names = {"teacher": teacher_name, **({"base": base_name} if base_name else {}), "student": str(run / "final")}
    loaded = {role: load_teacher(name, allow_pickle=allow_pickle) for role, name in names.items()}
    student = loaded["student"]
    models: dict[str, PreTrainedModel] = {role: x.model for role, x in loaded.items()}
    limits = [getattr(x.config, "max_position_embeddings", None) or max(DECODE_CONTEXTS) for x in loaded.values()]
    contexts = [n for n in DECODE_CONTEXTS if n + 64 <= min(limits)]
    config = cast(Attn2MambaConfig, student.config)
    card = {
        "student": describe(config),
        "model": str(run / "final"),
        "perplexity": json.loads((run / "figures.json").read_text()),
        "prompt": prompt,
        "continuation": {
            role: continue_text(model, tokenizer_of(student), prompt, NEW_TOKENS) for role, model in models.items()
        },
        "memory_bytes": {
            str(n): {
                "base" if base_name else "teacher": kv_bytes(config, n),
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
    perplexity, roles = card["perplexity"], list(card["continuation"])
    for column in ("", *roles):
        table.add_column(column, justify="left" if not column else "right")

    def row(label: str, values: dict[str, str]) -> None:
        table.add_row(label, *(values.get(role, "") for role in roles))

    if "hedgehog" in perplexity:
        row("held-out perplexity after stage 1", {"student": f"{perplexity['hedgehog']['perplexity']:.2f}"})
    values = {role: f"{perplexity[role]['perplexity']:.2f}" for role in roles}
    ratio = perplexity["student"]["perplexity"] / perplexity["teacher"]["perplexity"]
    row("held-out perplexity", values | {"student": f"{values['student']} ({ratio:.2f} x teacher)"})
    for context, sizes in card["memory_bytes"].items():
        row(f"KV cache / state at {int(context):,} tokens", {role: human_bytes(n) for role, n in sizes.items()})
    for context, rates in card["decode_tokens_per_second"].items():
        row(f"decode tokens/s after {int(context):,} tokens", {role: f"{rate:.1f}" for role, rate in rates.items()})
    console.print(table)
    crossing, replaced = human_cross_over(card["memory_cross_over"]), "base" if "base" in roles else "teacher"
    console.print(f"Context from which the student needs less memory than the {replaced}: {crossing}.")
    for role, text in card["continuation"].items():
        console.print(f"{role}: {card['prompt']}{text}", markup=False)
    console.print(
        f"\nThe model is in {card['model']}. Load it with\n"
        "  import attn2mamba; from transformers import AutoModelForCausalLM\n"
        f"  model = AutoModelForCausalLM.from_pretrained({card['model']!r})\n"
        f"or try  attn2mamba generate {card['model']} --prompt 'Once upon a time'",
        markup=False,
    )
