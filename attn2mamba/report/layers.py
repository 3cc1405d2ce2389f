"""Layer by layer: transfer loss from the log; decay and gate from the weights alone."""

import math
import re
import shlex
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from .data import RunData
from .numbers import Json

PART = re.compile(r"\.(\d+)\.(?:[^0-9]*\.)?mixer\.(decay\.rate|decay\.step\.bias|gate\.weight|gate\.bias)$")


def layers(run: RunData) -> Json:
    """transfer_loss, decay and gate; each None where the run has none."""
    parts = mixer_parts(run)
    return {"transfer_loss": transfer_loss(run), "decay": decay(run, parts), "gate": gate(run, parts)}


def transfer_loss(run: RunData) -> Json | None:
    """Held-out loss of each layer at the first and the last evaluation of stage 1."""
    logged = [e for e in run.entries if e.get("kind") == "transfer" and e.get("layers")]
    if not logged:
        return None
    first, last = logged[0], logged[-1]
    shapes = run.config.layers if run.config is not None else [True] * len(last["layers"])
    indices = [i for i, layer in enumerate(shapes) if layer is not None]
    if len(indices) != len(last["layers"]):
        run.problems.append(
            "metrics.jsonl and the saved model disagree on the number of layers; losses by layer are left out."
        )
        return None
    n, of = run.held_out_tokens("transfer")
    return {
        "layers": indices,
        "loss": last["layers"],
        "loss_at_start": first["layers"],
        "name": next(stage.loss for stage in run.recipe.stages if stage.kind == "transfer"),
        "n": n,
        "of": of,
        "precision": run.recipe.precision,
        "command": run.distill_command,
    }


def decay(run: RunData, parts: dict[int, dict[str, Tensor]]) -> Json | None:
    """half_life[layer][head] in tokens, log 2 / (dt * lambda) with dt = softplus(b_u): how many tokens halve what a
    state holds, where the input says nothing about the step size. None: lambda = 0, nothing is ever forgotten."""
    found = {i: part for i, part in parts.items() if {"decay.rate", "decay.step.bias"} <= set(part)}
    if not found:
        return None
    rates = {i: F.softplus(part["decay.step.bias"]) * part["decay.rate"].clamp_min(0) for i, part in found.items()}
    table = [[math.log(2) / rate if rate > 0 else None for rate in rates[i].tolist()] for i in sorted(rates)]
    count = sum(len(row) for row in table)
    never = sum(x is None for row in table for x in row)
    return {"layers": sorted(found), "half_life": table, "never": never, **_source(run, count, "heads")}


def gate(run: RunData, parts: dict[int, dict[str, Tensor]]) -> Json | None:
    """The gate is silu(W_z x + b_z). `at_rest`: mean of silu(b_z) over a layer's channels, what it multiplies by where
    the input says nothing (1 before training); `reach`: root mean square over the channels of the norm of W_z's rows,
    by which an input of unit variance moves what is inside silu (0 before training)."""
    found = {i: part for i, part in parts.items() if {"gate.weight", "gate.bias"} <= set(part)}
    if not found:
        return None
    order = sorted(found)
    rest = [F.silu(found[i]["gate.bias"]).mean().item() for i in order]
    spread = [F.silu(found[i]["gate.bias"]).std(correction=0).item() for i in order]
    reach = [found[i]["gate.weight"].square().sum(1).mean().sqrt().item() for i in order]
    count = sum(len(found[i]["gate.bias"]) for i in order)
    source = _source(run, count, "channels")
    return {"layers": order, "at_rest": rest, "at_rest_spread": spread, "reach": reach, **source}


def _source(run: RunData, count: int, of: str) -> Json:
    """Weights are fp32; what is drawn from them is exact."""
    command = shlex.join(["attn2mamba", "report", str(run.path)])
    return {"n": count, "of": of, "precision": "weights as saved", "command": command}


def mixer_parts(run: RunData) -> dict[int, dict[str, Tensor]]:
    """Of each converted layer of the finished model the decay's and the gate's weights, in fp32."""
    parts: dict[int, dict[str, Tensor]] = {}
    for path in sorted((run.path / "final").glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                _collect(file, parts)
        except (OSError, SafetensorError) as error:
            run.problems.append(f"final/{path.name} cannot be read ({' '.join(str(error).split())[:80]}).")
    return parts


def _collect(file: Any, parts: dict[int, dict[str, Tensor]]) -> None:
    for name in file.keys():  # noqa: SIM118  (a safetensors handle is no mapping)
        match = PART.search(name)
        if match:
            parts.setdefault(int(match[1]), {})[match[2]] = file.get_tensor(name).to(torch.float32)
