"""What a run would do and take, before it starts: stages, parameters, tokens, steps, bytes, time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from .convert import convert, hand_over
from .data import BlockStream, open_data
from .distill import initial_model, load_models, make_stage
from .freezing import check_freezes
from .inspection_text import human_seconds
from .progress import Progress
from .recipe import Recipe
from .sizes import human_bytes, state_bytes
from .stages import Stage, parameter_counts, train_only
from .teachers import Teacher
from .train import micro_batch_size, split, steps_of
from .vocabulary import Vocabulary, tokenizer_of

TIMED_SECONDS = 8.0


@dataclass
class StagePlan:
    """One stage: parameters that train, those of them in projectors (dropped afterwards), parameters that are frozen,
    tokens, optimiser steps, bytes of state per sequence, and seconds at the rate of a few timed micro-batches."""

    name: str
    mixer: str
    trainable: int
    projectors: int
    frozen: int
    tokens: int
    steps: int
    state_bytes: int
    seconds: float


def plan(recipe: Recipe, teacher: Teacher, base: Teacher, stream: BlockStream) -> list[StagePlan]:
    """Runs a few micro-batches of each stage on a throw-away student; writes nothing. `base` is converted; it may be
    the teacher."""
    student, _ = convert(initial_model(base, recipe), recipe.stages[0].mixer.model_dump(), recipe.keep)
    check_freezes(recipe, student.config)
    plans = []
    for index, spec in enumerate(recipe.stages):
        if index and spec.mixer.name != student.config.mixer["name"]:
            hand_over(student, spec.mixer.model_dump())
        stage = make_stage(student, recipe, index, teacher.model, Vocabulary.of(teacher, base))
        train_only(student, stage)
        trainable, projectors, frozen = parameter_counts(student, stage)
        steps = steps_of(recipe, index)
        tokens = steps * recipe.batch_size * recipe.sequence_length
        plans.append(
            StagePlan(
                name=stage.name,
                mixer=spec.mixer.name,
                trainable=trainable,
                projectors=projectors,
                frozen=frozen,
                tokens=tokens,
                steps=steps,
                state_bytes=state_bytes(student.config),
                seconds=tokens * seconds_per_token(stage, recipe, stream),
            )
        )
    return plans


def seconds_per_token(stage: Stage, recipe: Recipe, stream: BlockStream) -> float:
    """Of forward and backward, the best of the micro-batches that fit TIMED_SECONDS (two at least)."""
    size = recipe.micro_batch_size or micro_batch_size(recipe)
    best, spent, done = float("inf"), 0.0, 0
    stage.start()
    try:
        while done < 2 or spent < TIMED_SECONDS:
            batch: dict[str, Any] = next(split(stream.batch(done * size, size), size))
            began = time.perf_counter()
            stage.backward(batch, stage.count(batch))
            seconds = time.perf_counter() - began
            best, spent, done = min(best, seconds / batch["input_ids"].numel()), spent + seconds, done + 1
    finally:
        stage.stop()
        for parameter in stage.trainable().values():
            parameter.grad = None
    return best


def print_plan(
    recipe: Recipe,
    teacher_name: str,
    base_name: str | None,
    data: Sequence[str],
    validation: Sequence[str] | None,
    allow_pickle: bool = False,
) -> None:
    """The whole dry run: load, tokenise (into the store that the run itself will use), time, and print a table."""
    progress = Progress()
    progress.note("loading the models")
    teacher, base = load_models(recipe, teacher_name, base_name, allow_pickle)
    progress.note("tokenising the data")
    stream, _ = open_data(data, tokenizer_of(base), recipe.sequence_length, seed=recipe.seed, validation=validation)
    progress.note(f"timing {len(recipe.stages)} stages")
    stages = plan(recipe, teacher, base, stream)
    table = Table(title="Plan", title_justify="left")
    for column in ("stage", *(s.name for s in stages)):
        table.add_column(column, justify="left" if column == "stage" else "right")
    rows: list[tuple[str, Callable[[StagePlan], str]]] = [
        ("mixer", lambda s: s.mixer),
        ("parameters that train", lambda s: f"{s.trainable:,}"),
        ("of them in projectors, dropped", lambda s: f"{s.projectors:,}"),
        ("frozen parameters", lambda s: f"{s.frozen:,}"),
        ("tokens", lambda s: f"{s.tokens:,}"),
        ("optimiser steps", lambda s: f"{s.steps:,}"),
        ("state per sequence", lambda s: human_bytes(s.state_bytes)),
        ("about, on this machine", lambda s: human_seconds(s.seconds)),
    ]
    for name, text in rows:
        if "projectors" not in name or any(s.projectors for s in stages):
            table.add_row(name, *map(text, stages))
    Console().print(table)
