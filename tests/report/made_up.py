"""A run's directory with made-up numbers in the shapes that distill, eval and bench write, small enough to read."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from attn2mamba.student.configuration_attn2mamba import Attn2MambaConfig

Json = dict[str, Any]

RECIPE = """\
# attn2mamba distill --recipe recipe.yaml --teacher tiny-teacher --data python-docs
sequence_length: 16
batch_size: 2
evaluate: {every: 64, tokens: 64}
stages:
- kind: transfer
  tokens: 128
  lr: 0.01
- kind: finetune
  mixer: {name: hedgemamba}
  loss: {cross_entropy: 0.5, kl: 0.5}
  tokens: 128
  lr: 0.001
"""
EVAL = "attn2mamba eval RUN --teacher tiny-teacher"
BENCH = "attn2mamba bench RUN --teacher tiny-teacher"
LAYER = [4, 2, 8, 8, 32]


def make_run(path: Path, evaluation: Json | None = None, bench: Json | None = None, finished: bool = True) -> Path:
    """Both stages of 4 steps each; without `finished`, stage 2 has come to its second."""
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text(RECIPE)
    stops = (4, 4 if finished else 2)
    lines = [entry for stage, stop in enumerate(stops) for entry in metrics(stage, stop)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = {"teacher": 10.0, "hedgehog": 15.0, **({"student": 12.0} if finished else {})}
    write(path / "figures.json", {role: {"perplexity": x, "tokens": 60} for role, x in figures.items()})
    if finished:
        save_model(path / "final")
    for name, content in (("evaluation.json", evaluation), ("bench.json", bench)):
        if content is not None:
            write(path / name, content)
    return path


def write(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content))


def metrics(stage: int, steps: int) -> list[Json]:
    kind, layers = (("transfer", {"layers": [0.2, 0.1]}), ("finetune", {}))[stage]
    found: list[Json] = [{"stage": stage, "kind": kind, "step": 0, "held_out_loss": 4.0, **layers}]
    for step in range(1, steps + 1):
        place = {"stage": stage, "kind": kind, "step": step}
        found.append({**place, "tokens": 32 * step, "seconds": 2.0 * step, "loss": 4.0 / step, "skipped": 0})
        if step % 2 == 0:
            found.append({**place, "held_out_loss": 3.0 / step, **layers})
    return found


def save_model(path: Path) -> None:
    """Configuration of a tiny Llama with two layers, and the weights of its decays and gates."""
    base = {"model_type": "llama", "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
            "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}  # fmt: skip
    Attn2MambaConfig(base_config=base, mixer={"name": "hedgemamba"}, layers=[LAYER, LAYER]).save_pretrained(path)
    weights = {}
    for i in range(2):
        name = f"backbone.model.layers.{i}.self_attn.mixer."
        weights[f"{name}decay.rate"] = torch.tensor([0.01, 0.0])
        weights[f"{name}decay.step.bias"] = torch.full((2,), 0.5413248546)
        weights[f"{name}gate.weight"] = torch.full((32, 32), 0.01)
        weights[f"{name}gate.bias"] = torch.full((32,), 1.2784645)
    save_file(weights, path / "model.safetensors")


def figure(value: float, n: int = 100, stderr: float | None = 0.01) -> Json:
    return {"value": value, "n": n, "stderr": stderr}


def difference(value: float, stderr: float = 0.01, p: float = 0.5, n: int = 100) -> Json:
    return {"difference": value, "stderr": stderr, "p": p, "n": n}


def measure(teacher: Json, student: Json, differences: Json, cells: dict[str, list[Json]] | None = None) -> Json:
    return {
        "version": 1,
        "kind": "likelihood",
        "options": {},
        "figures": {"teacher": teacher, "student": student},
        "differences": {"student": differences},
        "cells": cells or {"teacher": [], "student": []},
    }


def by_place(cells: dict[str, list[Json]], form: str, place: str, n: int) -> list[Json]:
    """Figures of teacher and student by length or distance: the mean accuracy of their cells."""
    found: list[Json] = []
    for role in ("teacher", "student"):
        scores: dict[int, list[float]] = {}
        for cell in cells[role]:
            scores.setdefault(cell[place], []).append(cell["accuracy"])
        found.append({f"{form}@{x}": figure(sum(s) / len(s), n, 0.03) for x, s in scores.items()})
    return found


def make_evaluation(lost: float = 0.0, recall: float = 0.5, lengths: tuple[int, ...] = (1024, 4096)) -> Json:
    """lost: accuracy that the student loses on the tasks; recall: share of the teacher's needles that it finds."""
    shares = {"teacher": 1.0, "student": recall}
    needles = {
        role: [
            {"task": "needle", "form": "likelihood", "tokens": n, "depth": d, "chance": 0.0625, "n": 20,
             "beyond_training": n > 2048, "items": 20, "stderr": 0.05,
             "accuracy": 0.0625 + share * (0.9 if n < max(lengths) else 0.0)}
            for n in lengths for d in (0.0, 0.5, 1.0)
        ]
        for role, share in shares.items()
    }  # fmt: skip
    copying = {
        role: [
            {"task": "copying", "size": 32, "distance": d, "accuracy": share, "n": 128, "chance": 1 / 32,
             "beyond_training": False, "items": 4, "stderr": 0.02}
            for d in (64, 128, 256)
        ]
        for role, share in (("teacher", 1.0), ("student", recall))
    }  # fmt: skip
    positions = {
        role: [{"position_from": 0, "position_to": 64, "perplexity": 30.0 * x, "n": 512, "beyond_training": False},
               {"position_from": 64, "position_to": 4096, "perplexity": 20.0 * x, "n": 9000, "beyond_training": True},
               {"context": 4096, "perplexity": 21.0 * x, "n": 9512, "beyond_training": True}]
        for role, x in (("teacher", 1.0), ("student", 1.1))
    }  # fmt: skip
    loops = {
        role: [{"mode": mode, "tokens": n, "loop": x * n / 512, "n": 16}
               for mode in ("greedy", "sampled") for n in (128, 512)]
        for role, x in (("teacher", 0.3), ("student", 0.6))
    }  # fmt: skip
    turns = {
        role: [{"kind": "form", "turn": t, "valid": x / t, "right": x / t, "n": 12, "beyond_training": False}
               for t in (1, 2, 3)]
        for role, x in (("teacher", 1.0), ("student", 0.8))
    }  # fmt: skip
    measures = {
        "wikitext2": measure(
            {"perplexity": figure(20.0, 50, 0.4)}, {"perplexity": figure(20.6, 50, 0.4)},
            {"perplexity": difference(0.6, 0.1, 0.0001, 50)},
        ),
        "piqa": measure(
            {"acc": figure(0.68), "acc_norm": figure(0.7)}, {"acc": figure(0.67), "acc_norm": figure(0.7 - lost)},
            {"acc": difference(-0.01, 0.02), "acc_norm": difference(-lost, 0.005)},
        ),
        "lambada": measure(
            {"accuracy": figure(0.4)}, {"accuracy": figure(0.4 - lost)}, {"accuracy": difference(-lost, 0.005)}
        ),
        "lambada_generate": measure(
            {"exact_match": figure(0.4)}, {"exact_match": figure(0.3)}, {"exact_match": difference(-0.1, 0.02, 0.0004)}
        ),
        "repetition": measure(
            {"greedy_loop": figure(0.3, 16, 0.1), "greedy_tokens": figure(400.0, 16, 30.0)},
            {"greedy_loop": figure(0.6, 16, 0.1), "greedy_tokens": figure(500.0, 16, 20.0)},
            {"greedy_loop": difference(0.3, 0.1, 0.01, 16), "greedy_tokens": difference(100.0, 30.0, 0.001, 16)}, loops,
        ),
        "json": measure(
            {"valid": figure(0.6, 12)}, {"valid": figure(0.5, 12)}, {"valid": difference(-0.1, 0.1, 0.3, 12)}, turns
        ),
        "needle": measure(*by_place(needles, "likelihood", "tokens", 60), {}, needles),
        "copying": measure(*by_place(copying, "accuracy", "distance", 4), {}, copying),
        "positions": measure({"perplexity@4096": figure(21.0, 8)}, {"perplexity@4096": figure(23.1, 8)}, {}, positions),
    }  # fmt: skip
    kinds = {"needle": "recall", "copying": "recall", "positions": "positions"}
    for name in measures:
        generated = name in ("lambada_generate", "repetition", "json")
        measures[name]["kind"] = kinds.get(name, "generation" if generated else "likelihood")
    models = {
        role: {"name": name, "fingerprint": role * 8, "precision": "fp32", "parameters": 134_515_008}
        for role, name in (("teacher", "tiny-teacher"), ("student", "RUN"))
    }
    return {"format": 2, "attn2mamba": "0.1.0", "command": EVAL, "models": models, "measures": measures}


def bench_side(latency: float, context: int, batch: int, cache: int) -> Json:
    return {
        "repeats": 5,
        "interleaved": True,
        "time_to_first_token": {"median": context * 1e-3, "quartiles": [context * 9e-4, context * 1.1e-3], "n": 5},
        "prefill_tokens_per_second": 1000.0 * batch,
        "token_latency": {
            "median": latency,
            "quartiles": [latency * 0.95, latency * 1.1],
            "n": 320,
            "p95": latency * 1.3,
        },
        "latency_by_repeat": [latency] * 5,
        "decode_tokens_per_second": {"median": batch / latency, "quartiles": [0.9, 1.1], "n": 5},
        "peak_bytes": cache * 2,
        "cache": {"tokens": context + 64, "bytes": cache, "computed": cache, "ratio": 1.0},
        "beyond_training_length": context > 8192,
    }


def make_bench(contexts: tuple[int, ...] = (16, 1024, 4096, 16384), batches: tuple[int, ...] = (1, 8)) -> Json:
    cells: list[Json] = []
    for batch in batches:
        for n in contexts:
            student = bench_side(0.05, n, batch, 6_000_000 * batch)
            teacher = bench_side(0.02 + n * 1e-5, n, batch, 23_000 * n * batch)
            cells.append({"batch": batch, "context": n, "teacher": teacher, "student": student})
    cells[-1]["teacher"] = {"skipped": "it needs about 9.0 GiB, and 4.0 GiB are free"}
    crossing = {"tokens": 3000.0, "stderr": 120.0, "measured": True}
    line = {"intercept": 0.02, "slope_per_1k": 0.01, "points": 20}
    gain = [{"context": n, "seconds": n * 1e-5 - 0.03, "fixed": -0.03, "from_state": n * 1e-5} for n in contexts]
    scaling = [
        {"batch": b, "teacher": line, "student": line, "decode_cross_over": crossing, "gain": gain,
         "prefill_cross_over": {"tokens": None, "student_faster": False},
         "speed_up_at_32k": {"ratio": 7.0, "measured": False}}
        for b in batches
    ]  # fmt: skip
    models = {role: {"weights_bytes": 5_000_000} for role in ("teacher", "student")}
    quality = {
        "data": "python-docs",
        "context": 1024,
        "models": {r: {"perplexity": 17.0, "tokens": 2048} for r in models},
    }
    memory = {"bytes_at_32k": {"teacher": 7.5e8, "student": 6e6}, "cross_over": 261, "measured_cross_over": 261}
    part = {"models": models, "note": None, "cells": cells, "scaling": scaling, "memory": memory, "quality": quality}
    machine = {"device": "cpu", "name": "A processor", "threads": 2}
    return {"format": 1, "command": BENCH, "machine": machine, "options": {}, "peak_is": "rise of resident memory",
            "precisions": {"fp32": part}}  # fmt: skip
