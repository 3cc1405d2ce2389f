"""What a run would do and take, before it starts: stages, parameters, tokens, steps, bytes, time."""

import time
from dataclasses import dataclass
from typing import Any

from .convert import convert, hand_over
from .data import BlockStream
from .distill import initial_model, make_stage
from .freezing import check_freezes
from .recipe import Recipe
from .sizes import state_bytes
from .stages import Stage, parameter_counts, train_only
from .teachers import Teacher
from .train import micro_batch_size, split, steps_of
from .vocabulary import Vocabulary

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
