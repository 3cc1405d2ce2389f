"""The model card that lies beside the weights: what this is, how it was made, what was measured, how to load it."""

from pathlib import Path
from typing import Any

from . import __version__
from .recipe import Recipe
from .student.configuration_attn2mamba import Attn2MambaConfig

TEMPLATE = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [attn2mamba, mamba, linear-attention]
---
# {title}

{kind}, made {source} `{base}` by attn2mamba {version}{distilled}. {memory}

```python
import attn2mamba  # or pass trust_remote_code=True: the modelling code lies in this directory
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH/TO/THIS/DIRECTORY")
tokenizer = AutoTokenizer.from_pretrained("PATH/TO/THIS/DIRECTORY")
```

## Measured

{measured}

## Recipe

```yaml
{recipe}```
"""


def write_card(
    path: Path,
    config: Attn2MambaConfig,
    recipe: Recipe,
    base: str,
    held_out: str,
    figures: dict[str, Any],
    teacher: str | None = None,
) -> None:
    """Write README.md into the model directory `path`. `base` was converted; `teacher` is another model that it was
    distilled from, if there is one. `figures` maps a model's role (teacher, base, hedgehog, student) to
    {"perplexity", "tokens"} on the text that `held_out` describes."""
    rows = ["| model | perplexity | tokens scored |", "|---|---|---|"]
    rows += [f"| {role} | {x['perplexity']:.2f} | {x['tokens']:,} |" for role, x in figures.items()]
    where = f"{held_out}, {recipe.sequence_length} tokens of context (packed documents see each other), fp32."
    text = TEMPLATE.format(
        title=f"{base} as {config.mixer['name']}",
        kind=describe(config),
        source="from" if recipe.initialize == "teacher" else "from random weights in the shape of",
        base=base,
        distilled=f" and distilled from `{teacher}`" if teacher else "",
        version=__version__,
        memory=describe_memory(config),
        measured="\n".join([where, "", *rows]),
        recipe=recipe.to_yaml(),
    )
    (path / "README.md").write_text(text)


def describe(config: Attn2MambaConfig) -> str:
    """In words, what stands where the teacher's softmax attention was; nothing that keeps a window is called pure."""
    name = {"hedgehog": "A Hedgehog linear-attention model", "hedgemamba": "A HedgeMamba model"}[config.mixer["name"]]
    if config.kept_layers:
        return f"{name} (hybrid: layers {', '.join(map(str, config.kept_layers))} keep softmax attention)"
    if config.mixer["window"]:
        return f"{name} with softmax over the last {config.mixer['window']} tokens"
    return f"{name} (pure: no softmax attention)"


def describe_memory(config: Attn2MambaConfig) -> str:
    if config.kept_layers:
        return "The kept layers' KV cache grows with the context; all other layers have a state of fixed size."
    return "Its memory does not grow with the context, and its time per token is constant."
