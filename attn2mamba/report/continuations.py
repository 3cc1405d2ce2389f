"""What the models write after the same prompt, from RUN/scorecard.json, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .data import RunData
from .numbers import Json
from .panels import Subjects

TITLE = "What they write"


def continuations(run: RunData) -> Json | None:
    """{"prompt", "decoding", "texts": {role: what it wrote after the prompt}, and where they come from}; None without a
    scorecard."""
    prompt, texts = run.scorecard.get("prompt"), run.scorecard.get("continuation")
    if not isinstance(prompt, str) or not isinstance(texts, dict) or not texts:
        return None
    source = {"n": 1, "of": "prompt", "precision": "fp32", "command": run.distill_command}
    return {"prompt": prompt, "decoding": "greedy", "texts": {role: str(x) for role, x in texts.items()}, **source}


@dataclass
class Texts:
    """What models, by their labels, wrote after one prompt."""

    title: str
    prompt: str
    texts: list[tuple[str, str]]
    text: str
    sources: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def written(runs: Sequence[Json], subjects: Subjects) -> list[Texts]:
    """One part for each prompt; a teacher that runs share stands there once."""
    parts: dict[str, Texts] = {}
    text = "One prompt, greedy decoding, cut after a fixed number of tokens: a look at the models, not a measurement."
    for run in runs:
        found = run["continuations"]
        if found is None:
            continue
        part = parts.setdefault(found["prompt"], Texts(TITLE, found["prompt"], [], text, [found["precision"]]))
        known = {label for label, _ in part.texts}
        labels = ((subjects.label(run, role), words) for role, words in found["texts"].items())
        part.texts += [pair for pair in labels if pair[0] not in known]
        part.commands.append(found["command"])
    return list(parts.values())
