"""What lies in a run's directory, read as far as it is there. Nothing outside it is read, and only the recipe must be
there."""

import itertools
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..evaluate import runner as evaluation
from ..recipe import Recipe, load_recipe
from ..student.configuration_attn2mamba import Attn2MambaConfig
from ..train import steps_of
from .numbers import Json
from .shapes import SHAPES, misfit

FORMATS = {"evaluation.json": evaluation.FORMAT, "bench.json": 1}
"""Of the files that this version reads; figures.json has none."""


@dataclass
class RunData:
    """A run. options: what `distill` was given (teacher, base, data, validation), by name, each a list. entries: the
    lines of metrics.jsonl. What is missing is empty or None; `problems` says, in sentences, what is wrong."""

    name: str
    path: Path
    recipe: Recipe
    options: dict[str, list[str]]
    entries: list[Json] = field(default_factory=list)
    figures: Json = field(default_factory=dict)
    evaluation: Json = field(default_factory=dict)
    bench: Json = field(default_factory=dict)
    scorecard: Json = field(default_factory=dict)
    config: Attn2MambaConfig | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return (self.path / "final").is_dir()

    @property
    def teacher(self) -> str:
        return next(iter(self.options.get("teacher", [])), "TEACHER")

    @property
    def distill_command(self) -> str:
        """Makes the run again elsewhere."""
        words = [word for name, values in self.options.items() for v in values for word in (f"--{name}", v)]
        return shlex.join(["attn2mamba", "distill", "--recipe", f"{self.path}/recipe.yaml", *words, "--output", "NEW"])

    def eval_command(self, tasks: str) -> str:
        """Measures a suite and adds it to evaluation.json; the run knows its teacher, data are where they were."""
        words = shlex.split(str(self.evaluation.get("command", "")))
        root = [b for a, b in itertools.pairwise(words) if a == "--data-root"]
        place = ["--data-root", root[0]] if root else []
        return shlex.join(["attn2mamba", "eval", str(self.path), "--tasks", tasks, *place])

    @property
    def bench_command(self) -> str:
        """Measures speed up to the context of the headlines."""
        return shlex.join(["attn2mamba", "bench", str(self.path), "--context", "1k,4k,32k"])

    def held_out_tokens(self, kind: str) -> tuple[int, str]:
        """Of what a held-out loss of that kind of stage is a mean, and its name. figures.json counts each block of the
        same text without its first token, which nothing predicts but from which attention starts."""
        known, length = (
            next((f["tokens"] for f in self.figures.values() if f.get("tokens")), 0),
            self.recipe.sequence_length,
        )
        if not known:
            return self.recipe.evaluate.tokens, "held-out tokens at most"
        if kind == "transfer":
            return known // (length - 1) * length, "held-out tokens"
        return known, "held-out tokens at most" if self.recipe.reset_documents else "held-out tokens"

    @property
    def measures(self) -> dict[str, Json]:
        """Of evaluation.json, by name."""
        return {name: m for name, m in self.evaluation.get("measures", {}).items() if m.get("figures")}

    def command_of(self, measure: str) -> str:
        """The call of `eval` that measured it."""
        return str(self.measures[measure].get("command") or self.evaluation.get("command", ""))

    def precision_of(self, role: str) -> str:
        """In which the model of that role was evaluated."""
        return str(self.evaluation.get("models", {}).get(role, {}).get("precision", "precision not recorded"))


def gather(paths: Sequence[Path]) -> list[RunData]:
    """The runs, with names that tell them apart. Raises UserError for what is not a run, or is given twice."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("the same run is given twice; give each once")
    short = [path.resolve().name for path in paths]
    names = short if len(set(short)) == len(short) else [str(path) for path in paths]
    return [gather_run(path, name) for path, name in zip(paths, names, strict=True)]


def gather_run(path: Path, name: str) -> RunData:
    """Raises UserError for a directory that is not a run."""
    file = path / "recipe.yaml"
    if not file.is_file():
        raise UserError(f"{path} is not a run of attn2mamba (no recipe.yaml); give what `attn2mamba distill` wrote")
    try:
        recipe = load_recipe(str(file))
    except UserError as error:
        raise UserError(f"{file} is not a recipe that this version reads: {error}") from None
    run = RunData(name, path, recipe, read_header(file.read_text()))
    run.entries = read_metrics(run)
    run.figures = read_json(run, "figures.json")
    run.evaluation = read_json(run, "evaluation.json")
    run.bench = read_json(run, "bench.json")
    run.scorecard = read_json(run, "scorecard.json")
    run.config = read_config(run)
    if not run.finished:
        run.problems.append(unfinished(run))
    return run


def read_header(recipe: str) -> dict[str, list[str]]:
    """The options in the comment above a run's recipe; none where it was edited away."""
    try:
        words = shlex.split(recipe.partition("\n")[0], comments=False)
    except ValueError:  # an apostrophe in a comment of the user's own
        return {}
    options: dict[str, list[str]] = {}
    for name, value in itertools.pairwise(words):
        if name.startswith("--") and name != "--recipe":
            options.setdefault(name[2:], []).append(value)
    return options


def read_metrics(run: RunData) -> list[Json]:
    """Lines that are not whole are left out and told of."""
    path = run.path / "metrics.jsonl"
    entries, broken = [], 0
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            entry = load(line)
        except (ValueError, RecursionError):
            entry = None
        if misfit(entry, SHAPES[path.name], "line"):
            broken += 1
        else:
            entries.append(entry)
    if broken:
        run.problems.append(f"metrics.jsonl: {broken} line{'s are' if broken > 1 else ' is'} broken and left out.")
    return entries


def read_json(run: RunData, name: str) -> Json:
    """A JSON object; empty where there is none, with a word in `problems` where it cannot be read."""
    path = run.path / name
    if not path.is_file():
        return {}
    try:
        content: Any = load(path.read_text())
    except (OSError, ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and name in FORMATS and content.get("format") != FORMATS[name]:
        run.problems.append(f"{name} is of another version of attn2mamba and left out; write it anew.")
        return {}
    if not isinstance(content, dict):
        run.problems.append(f"{name} is not a JSON object and left out; write it anew.")
        return {}
    problem = misfit(content, SHAPES[name], name) if name in SHAPES else None
    if problem:
        run.problems.append(f"{name} is damaged and left out ({problem}); write it anew.")
        return {}
    return content


def load(text: str) -> Any:
    """JSON, with null for the numbers that are none (NaN, Infinity), which Python writes and JSON has no word for."""
    return json.loads(text, parse_constant=lambda _: None)


def read_config(run: RunData) -> Attn2MambaConfig | None:
    """Of the finished model, or of the one after stage 1, which differs in its mixers' parts alone."""
    for name in ("final", "hedgehog"):
        if (run.path / name / "config.json").is_file():
            try:
                return Attn2MambaConfig.from_pretrained(run.path / name)
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                reason = " ".join(str(error).split())[:120]
                run.problems.append(f"{name}/config.json cannot be read ({reason}); what needs it is left out.")
    return None


def unfinished(run: RunData) -> str:
    place = "before its first step"
    steps = [e for e in run.entries if "loss" in e]
    if steps:
        stage, step = int(steps[-1]["stage"]), int(steps[-1]["step"])
        whole = steps_of(run.recipe, stage) if stage < len(run.recipe.stages) else step
        place = f"at step {step:,} of {whole:,} of stage {stage} ({steps[-1].get('kind', '')})"
    words = [word for name, values in run.options.items() for v in values for word in (f"--{name}", v)]
    command = ["attn2mamba", "distill", "--recipe", f"{run.path}/recipe.yaml", *words, "--output", str(run.path)]
    return f"This run is not finished: it stands {place}. Continue it with: {shlex.join([*command, '--resume'])}"
