"""The tables of docs/results.md from what runs hold, between the page's two markers.

python benchmarks/results.py docs/results.md runs/demo runs/hybrid runs/direct runs/scratch --bench precision.json

Of the first run evaluation.json and bench.json are shown whole; the others stand beside it with what all have.
"""

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attn2mamba.benchmarking.text import disturbances
from attn2mamba.evaluate.measure import with_error
from attn2mamba.sizes import human_bytes

BEGIN, END = "<!-- written by benchmarks/results.py -->", "<!-- end -->"
Json = dict[str, Any]


def quality(evaluation: Json) -> list[str]:
    """A row for each metric that `eval` shows: figures with standard errors, and what the paired test says."""
    order = ("teacher", "base", "hedgehog", "student")
    roles = sorted(evaluation["models"], key=lambda role: order.index(role) if role in order else len(order))
    lines = ["| measure | n | " + " | ".join(roles) + " | student to teacher |", "|---" * (len(roles) + 3) + "|"]
    commands = []
    for name, measure in evaluation["measures"].items():
        commands.append(measure["command"])
        for metric in measure["headline"] or measure["figures"][roles[0]]:
            figures = [measure["figures"][role].get(metric) for role in roles]
            if any(figure is None for figure in figures):
                continue
            difference = measure["differences"].get("student", {}).get(metric)
            said = f"{difference['verdict']} ({human_p(difference['p'])})" if difference else ""
            shown = " | ".join(plus_minus(figure) for figure in figures)
            lines.append(f"| {name}, {metric} | {figures[0]['n']} | {shown} | {said} |")
    precision = ", ".join(dict.fromkeys(model["precision"] for model in evaluation["models"].values()))
    return [*block(dict.fromkeys(commands)), f"Precision {precision}; figures with their standard errors:", "", *lines]


def beside(runs: Sequence[Path]) -> list[str]:
    """The students of several runs: held-out perplexity, and each metric that all of them have."""
    evaluations = [json.loads((run / "evaluation.json").read_text()) for run in runs]
    held = [json.loads((run / "figures.json").read_text()) for run in runs]
    first, *others = (evaluation["measures"] for evaluation in evaluations)
    names = [run.name for run in runs]
    lines = ["| measure | n | teacher | " + " | ".join(names) + " |", "|---" * (len(runs) + 3) + "|"]
    values = [held[0]["teacher"]["perplexity"], *(figures["student"]["perplexity"] for figures in held)]
    shown = " | ".join(f"{value:,.2f}" for value in values)
    lines.append(f"| held-out text, perplexity | {held[0]['teacher']['tokens']:,} tokens | {shown} |")
    for name, measure in first.items():
        for metric in measure["headline"] or measure["figures"]["student"]:
            figures = [measure["figures"]["teacher"][metric], measure["figures"]["student"][metric]]
            figures += [
                other.get(name, {"figures": {"student": {}}})["figures"]["student"].get(metric) for other in others
            ]
            if len({figure["n"] if figure else 0 for figure in figures}) > 1:  # not measured, or on other items
                continue
            shown = " | ".join(plus_minus(figure) for figure in figures)
            lines.append(f"| {name}, {metric} | {figures[0]['n']} | {shown} |")
    commands = [e["measures"][name]["command"] for e in evaluations for name in e["measures"] if name in others[0]]
    return [*block(dict.fromkeys(commands)), *lines]


def speed(bench: Json) -> list[str]:
    """A row for each precision, batch and context: medians with quartiles, teacher and student."""
    head = ["precision", "batch", "context", "first token, s", "token, ms", "decode tokens/s", "cache or state"]
    lines = ["| " + " | ".join(f"{x}: teacher / student" if i > 2 else x for i, x in enumerate(head)) + " |"]
    lines.append("|---" * len(head) + "|")
    sentences = []
    for precision, found in bench["precisions"].items():
        for cell in found["cells"]:
            pair = [cell.get(role) for role in ("teacher", "student")]
            if not all(x and "token_latency" in x for x in pair):
                continue
            columns = [
                " / ".join(spread(x["time_to_first_token"], 1.0) for x in pair),
                " / ".join(spread(x["token_latency"], 1000.0) for x in pair),
                " / ".join(spread(x["decode_tokens_per_second"], 1.0) for x in pair),
                " / ".join(human_bytes(x["cache"]["bytes"]) for x in pair),
            ]
            repeats = " / ".join(dict.fromkeys(str(x["repeats"]) for x in pair))
            lines.append(
                f"| {precision}, n = {repeats} | {cell['batch']} | {cell['context']:,} | " + " | ".join(columns) + " |"
            )
        sentences += said_of(precision, found)
        sentences += [f"* {precision}: {line}" for line in disturbances(found, bench["options"]["repeats"])]
    return [*block([bench["command"]]), *lines, "", *sentences]


def said_of(precision: str, found: Json) -> list[str]:
    """Cross-overs, memory and quality of one precision, as list items."""
    memory = found["memory"]
    lines = []
    if memory.get("bytes_at_32k") and memory.get("cross_over") and memory.get("measured_cross_over"):
        sizes = ", ".join(f"{role} {human_bytes(n)}" for role, n in memory["bytes_at_32k"].items())
        lines.append(
            f"* {precision}: memory of a sequence at 32k tokens (computed) {sizes}; smaller from "
            f"{memory['cross_over']:,} tokens (from bytes held: {memory['measured_cross_over']:,})."
        )
    for scaling in found["scaling"]:
        crossing = scaling.get("decode_cross_over")
        at = "a length that these contexts do not tell"
        if crossing and crossing["tokens"] is not None:
            error = "" if crossing["stderr"] is None else f" ± {crossing['stderr']:,.0f}"
            at = f"{crossing['tokens']:,.0f}{error} tokens"
        lines.append(
            f"* {precision}, batch {scaling['batch']}: decoding crosses at {at}"
            f"{'; the machine drifted' if scaling['drifted'] else ''}."
        )
    if found.get("quality"):
        values = found["quality"]["models"]
        shown = ", ".join(f"{role} {x['perplexity']:.2f}" for role, x in values.items() if x.get("perplexity"))
        lines.append(f"* {precision}: perplexity {shown} on {found['quality']['data']}.")
    return lines


def human_p(p: float | None) -> str:
    return "not finite" if p is None else "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def plus_minus(figure: Json) -> str:
    if figure["value"] is None:
        return "not finite"
    value, error = figure["value"], figure["stderr"]
    return f"{value:.{2 if abs(value) >= 10 else 3}f}" if error is None else with_error(value, error)


def spread(x: Json, scale: float) -> str:
    middle = f"{x['median'] * scale:.3g}"
    if None in x["quartiles"]:
        return middle
    low, high = (value * scale for value in x["quartiles"])
    return f"{middle} ({low:.3g}–{high:.3g})"


def block(commands: Iterable[str]) -> list[str]:
    """Commands as a reader would type them: DATA for the place of local data."""
    return ["```", *(re.sub(r"--data-root \S+", "--data-root DATA", line) for line in commands), "```", ""]


def main(page: Path, run: Path, others: Sequence[Path], benches: Sequence[Path]) -> None:
    parts: list[str] = []
    for path, table in [
        (run / "evaluation.json", quality),
        *((path, speed) for path in (run / "bench.json", *benches)),
    ]:
        parts += ["", *table(json.loads(path.read_text()))]
    if others:
        parts += ["", "### Hybrid and baselines at the same budget", "", *beside([run, *others])]
    text = page.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(before + "\n".join([BEGIN, *parts, "", END]) + after)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("others", type=Path, nargs="*", help="runs to stand beside it")
    parser.add_argument("--bench", type=Path, action="append", default=[], help="a file of `bench --output`")
    given = parser.parse_args()
    main(given.page, given.run, given.others, given.bench)
