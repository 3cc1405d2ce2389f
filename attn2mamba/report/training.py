"""Losses over tokens, time and FLOPs, and what a run cost to train."""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import yaml
from transformers import AutoModelForCausalLM

from ..errors import UserError
from ..hardware import parse_hardware
from ..quiet import quiet
from ..recipe import Recipe
from ..sizes import layer_shapes
from ..student.configuration_attn2mamba import Attn2MambaConfig
from ..training_cost import training_costs
from .data import RunData
from .numbers import Json, Number, missing

POINTS = 300
"""Most points of a curve; more steps than that are averaged in groups."""

AXES = ("tokens", "seconds", "flops")


@dataclass
class Place:
    """Where in a run a loss was measured, counted from the run's start. flops: None where they cannot be reckoned."""

    tokens: int
    seconds: float
    flops: float | None


def training(run: RunData) -> Json:
    """Curves of each stage and the run's cost: see `curves` and `cost`."""
    rates = flops_per_token(run)
    stages = curves(run, rates)
    return {"stages": stages, "cost": cost(run, stages)}


def curves(run: RunData, rates: list[float] | None) -> list[Json]:
    """One entry a stage: `training` and `held_out` points {tokens, seconds, flops, loss}, counted over all stages so
    far. A training point is the mean of `steps_per_point` steps; a held-out one is of `n` tokens."""
    result = []
    start = Place(0, 0.0, None if rates is None else 0.0)
    for index, stage in enumerate(run.recipe.stages):
        entries = [e for e in run.entries if e["stage"] == index]
        rate = None if rates is None else rates[index]
        places = {0: start} | places_of(entries, start, rate)
        steps = [(places[e["step"]], e["loss"]) for e in entries if e["step"] in places and "loss" in e]
        held_out = [
            (places[e["step"]], e["held_out_loss"]) for e in entries if e["step"] in places and "held_out_loss" in e
        ]
        group = max(1, -(-len(steps) // POINTS))
        n, of = run.held_out_tokens(stage.kind)
        result.append(
            {
                "stage": index,
                "kind": stage.kind,
                "loss": stage.loss if stage.kind == "transfer" else stage.loss.model_dump(),
                "training": grouped([point(*x) for x in steps if x[1] is not None], group),
                "held_out": [point(*x) for x in held_out if x[1] is not None],
                "skipped_steps": max((e.get("skipped", 0) for e in entries), default=0),
                "steps_per_point": group,
                "n": n,
                "of": of,
                "precision": run.recipe.precision,
                "command": run.distill_command,
            }
        )
        start = places[max(places)]
    return result


def places_of(entries: list[Json], start: Place, rate: float | None) -> dict[int, Place]:
    """Place of each logged step. The clock of a resumed run starts anew, so a time below the last one is added on."""
    places: dict[int, Place] = {}
    offset = last = 0.0
    for entry in entries:
        if "tokens" not in entry:
            continue
        seconds = float(entry.get("seconds") or 0.0)
        if seconds < last:
            offset += last
        last = seconds
        tokens = int(entry["tokens"])
        flops = None if rate is None or start.flops is None else start.flops + rate * tokens
        places[int(entry["step"])] = Place(start.tokens + tokens, start.seconds + offset + seconds, flops)
    return places


def point(place: Place, loss: float) -> Json:
    return {"tokens": place.tokens, "seconds": round(place.seconds, 3), "flops": place.flops, "loss": loss}


def grouped(points: list[Json], size: int) -> list[Json]:
    """Each `size` points as one: the last one's place, the mean of their losses."""
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [{**group[-1], "loss": sum(p["loss"] for p in group) / len(group)} for group in groups]


def cost(run: RunData, stages: list[Json]) -> Json:
    """Tokens, time and FLOPs of the whole run so far, and the held-out loss that it reached in its last stage."""
    points = [p for stage in stages for p in stage["training"]]
    if not points:
        command = run.distill_command
        return {name: missing(unit, command) for name, unit in (("tokens", "tokens"), ("seconds", "seconds"))}
    last, common = points[-1], (run.recipe.precision, run.distill_command)
    steps = sum(1 for e in run.entries if "loss" in e)
    found = {
        "tokens": Number(last["tokens"], "tokens", steps, "steps", *common),
        "seconds": Number(last["seconds"], "seconds", steps, "steps", *common, note="held-out evaluations included"),
        "flops": Number(last["flops"], "flops", steps, "steps", *common, note="reckoned from shapes (docs/cost.md)"),
    }
    if last["flops"] is None:
        found["flops"] = missing("flops", run.distill_command, "needs the configuration of a saved model")
    reached = finetune_losses(stages)
    if reached:
        found["held_out_loss"] = held_out(run, reached[-1])
    return found


def finetune_losses(stages: list[Json]) -> list[Json]:
    """Held-out points of the finetune stages: next-token cross-entropies, which runs can be compared by."""
    return [p for stage in stages if stage["kind"] == "finetune" for p in stage["held_out"]]


def held_out(run: RunData, reached: Json) -> Number:
    note = f"after {reached['tokens']:,} training tokens"
    n, of = run.held_out_tokens("finetune")
    return Number(reached["loss"], "nats", n, of, run.recipe.precision, run.distill_command, note=note)


def same_budget(runs: Sequence[RunData], trainings: Sequence[Json]) -> Json | None:
    """Held-out loss of each run at the largest data budget that all have reached, by its last evaluation within it;
    None where one has no such evaluation."""
    reached = [finetune_losses(t["stages"]) for t in trainings]
    if len(runs) < 2 or not all(reached):
        return None
    budget = min(points[-1]["tokens"] for points in reached)
    within = [[p for p in points if p["tokens"] <= budget] for points in reached]
    if not all(within):
        return None
    losses = {run.name: held_out(run, points[-1]) for run, points in zip(runs, within, strict=True)}
    texts = {tuple(run.options.get("validation") or run.options.get("data", [])) for run in runs}
    lengths = {run.recipe.sequence_length for run in runs}
    return {"tokens": budget, "losses": losses, "same_text": len(texts) == len(lengths) == 1}


def flops_per_token(run: RunData) -> list[float] | None:
    """Of each stage, reckoned from the saved model's configuration; None without one."""
    if run.config is None:
        return None
    try:
        return list(_reckon(json.dumps(run.config.base_config), json.dumps(run.config.layers), run.recipe.to_yaml()))
    except (UserError, ValueError, RuntimeError) as error:
        run.problems.append(f"FLOPs cannot be reckoned: {' '.join(str(error).split())[:120]}")
        return None


@functools.lru_cache(maxsize=16)
def _reckon(base_config: str, layers: str, recipe_yaml: str) -> tuple[float, ...]:
    recipe = Recipe.model_validate(yaml.safe_load(recipe_yaml))
    config = Attn2MambaConfig(base_config=json.loads(base_config), layers=json.loads(layers))
    with quiet(), torch.device("meta"):  # bf16: the only type in which experts' products run there
        model = AutoModelForCausalLM.from_config(config.base(), dtype=torch.bfloat16)
    with quiet():
        stages = training_costs(model, layer_shapes(config), recipe, parse_hardware("a100-80gb"), 1.0, 1)
    assert all(math.isfinite(stage.flops) for stage in stages)
    return tuple(stage.flops_per_token for stage in stages)
