"""bench.json as tables and sentences."""

from typing import Any

from rich.console import Console
from rich.table import Table

from ..sizes import human_bytes, human_cross_over
from .summary import LONG

Json = dict[str, Any]

BUSY = 0.1
"""Share of the CPUs taken by other work from which on it is said."""

MEASURED, COMPUTED = "measured", "computed, not measured"


def print_bench(report: Json, console: Console) -> None:
    """A table for each precision and batch, then what they say."""
    options = report["options"]
    console.print(
        f"{report['machine']['name']}, {report['machine']['threads']} threads; medians over n repeats of "
        f"{options['new_tokens']} new tokens, quartiles in brackets.\nPeak: {report['peak_is']}.",
        highlight=False,
    )
    for precision, found in report["precisions"].items():
        if found["note"]:
            console.print(f"Note: {found['note']}.", highlight=False)
        for scaling in found["scaling"]:
            console.print(_table(precision, scaling["batch"], found))
            for line in _sentences(scaling, found):
                console.print(line, highlight=False, markup=False)
        for row in found["cells"]:
            for role in found["models"]:
                if "skipped" in row[role]:
                    cell = f"batch {row['batch']}, {row['context']:,} tokens"
                    console.print(f"Skipped: {role}, {cell}: {row[role]['skipped']}.", highlight=False, markup=False)
        for line in disturbances(found, options["repeats"]):
            console.print(line, highlight=False, markup=False)
    if any(found["quality"] for found in report["precisions"].values()):
        console.print(_precision_table(report))


def _table(precision: str, batch: int, found: Json) -> Table:
    """Contexts from top to bottom, the models of one context under each other."""
    table = Table(title=f"{precision}, batch {batch}", title_justify="left")
    for name in ("context", "model", "first token, s", "ms per token", "p95", "tokens/s", "cache", "peak", "n"):
        table.add_column(name, justify="left" if name == "model" else "right", overflow="fold")
    for row in (r for r in found["cells"] if r["batch"] == batch):
        context = f"{row['context']:,}"
        for role in found["models"]:
            table.add_row(context, role, *_figures(row[role]), end_section=context == "")
            context = ""
    return table


def _figures(cell: Json) -> list[str]:
    if "skipped" in cell:
        return ["skipped"]
    latency = cell["token_latency"]
    return [
        _spread(cell["time_to_first_token"], 1, 2),
        _spread(latency, 1e3, 1),
        f"{latency['p95'] * 1e3:.1f}",
        f"{cell['decode_tokens_per_second']['median']:.1f}",
        human_bytes(cell["cache"]["bytes"]),
        "" if cell["peak_bytes"] is None else human_bytes(cell["peak_bytes"]),
        str(cell["repeats"]),
    ]


FEW = 4
"""Contexts; lines through fewer have slopes of so uncertain an error that they hardly ever meet clearly."""


def disturbances(found: Json, repeats: int) -> list[str]:
    """What makes cells of one precision less sure: repeats that were not made, and other work on the machine."""
    measured = [row[role] for row in found["cells"] for role in found["models"] if "repeats" in row[role]]
    lines = []
    if any(cell["repeats"] < repeats for cell in measured):
        lines.append(f"Where n is below {repeats}, --max-seconds were too few for all repeats.")
    busy = [cell["others_busy"] for cell in measured if (cell["others_busy"] or 0.0) >= BUSY]
    if busy:
        lines.append(
            f"Other work took up to {max(busy) * 100:.0f} % of the CPUs in {len(busy)} of {len(measured)} rows. Such "
            "times may be too long, and not equally so; measure again on a quiet machine with --fresh."
        )
    return lines


def _spread(values: Json, scale: float, digits: int) -> str:
    text = f"{values['median'] * scale:.{digits}f}"
    low, high = values["quartiles"]
    return text if low is None else f"{text} ({low * scale:.{digits}f}-{high * scale:.{digits}f})"


def _sentences(scaling: Json, found: Json) -> list[str]:
    roles, lines = list(found["models"]), []
    for role in roles:
        line = scaling[role]
        if line is not None:
            error = line["slope_per_1k_stderr"]
            spread = "" if error is None else f" ± {error * 1e3:.3f}"
            lines.append(
                f"{role}: {line['intercept'] * 1e3:.1f} ms per token at no context (weights at this memory's speed: "
                f"{line['weights_seconds'] * 1e3:.1f}), growing by {line['slope_per_1k'] * 1e3:.3f}{spread} ms per "
                "1,024 tokens."
            )
    if scaling["drifted"]:
        lines.append("Latency falls with the context: this machine's speed drifted; measure again with --fresh.")
    if len(roles) < 2:
        alone = ["Compared with nothing: --teacher NAME measures its teacher beside it."]
        return lines + (alone if roles == ["student"] else [])
    lines.append(f"Decoding: {_decode_meets(scaling)}. Reading: {_prefill_meets(scaling['prefill_cross_over'])}.")
    faster = scaling["speed_up_at_32k"]
    if faster is not None:
        how = MEASURED if faster["measured"] else COMPUTED
        error = "" if faster["stderr"] is None else f" ± {faster['stderr']:.2f}"
        lines.append(f"Decode speed at {LONG:,} tokens: {faster['ratio']:.2f}{error} times the teacher's ({how}).")
    memory = found["memory"]
    held = memory["bytes_at_32k"]
    lines.append(
        f"Memory of one sequence at {LONG:,} tokens: teacher {human_bytes(held['teacher'])}, student "
        f"{human_bytes(held['student'])} (computed; the bytes held are {_ratios(memory['ratios'])} times the computed)."
    )
    known = (("computed", memory["cross_over"]), ("from the bytes held", memory["measured_cross_over"]))
    places = [f"{human_cross_over(tokens)} on ({how})" for how, tokens in known if tokens is not None]
    if places:
        lines.append(f"The student needs less memory from {', '.join(places)}.")
    return lines


def _decode_meets(scaling: Json) -> str:
    met = scaling["decode_cross_over"]
    if met["tokens"] is None:
        few = min((scaling[role] or {"points": 0})["points"] for role in ("teacher", "student")) < FEW
        return "too few contexts to tell where the lines meet" if few else "the lines do not clearly meet"
    if met["tokens"] == 0:
        return "the student's line is below the teacher's at every context"
    error = "" if met["stderr"] is None else f" ± {met['stderr']:,.0f}"
    beyond = "" if met["measured"] else ", beyond what was measured"
    return f"the student is faster from {met['tokens']:,.0f}{error} tokens on (where the fitted lines meet{beyond})"


def _prefill_meets(met: Json) -> str:
    if met["tokens"] is not None:
        return f"the student is faster from about {met['tokens']:,.0f} tokens on"
    if met["student_faster"] is None:
        return "not measured for both"
    return f"the {'student' if met['student_faster'] else 'teacher'} is faster at the longest context measured"


def _ratios(ratios: list[float]) -> str:
    return " to ".join(f"{r:.4g}" for r in sorted({ratios[0], ratios[-1]})) if ratios else "not known,"


def _precision_table(report: Json) -> Table:
    """Quality, weights and speed in each precision; loss is over the same model in the first of them."""
    first = next(iter(report["precisions"]))
    quality = report["precisions"][first]["quality"]
    title = f"Perplexity on {quality['data']}, windows of {quality['context']:,} tokens"
    table = Table(title=title, title_justify="left")
    for column in ("precision", "model", "tokens", "perplexity", f"over {first}", "weights", "ms per token", "at"):
        table.add_column(column, justify="left" if column in ("precision", "model") else "right", overflow="fold")
    for precision, found in report["precisions"].items():
        for role, score in found["quality"]["models"].items():
            measured = [row for row in found["cells"] if "token_latency" in row[role]]
            speed = ["", ""]
            if measured:
                last = measured[-1]
                speed = [f"{last[role]['token_latency']['median'] * 1e3:.1f}", _place(last)]
            weights = human_bytes(found["models"][role]["weights_bytes"])
            table.add_row(precision, role, *_loss(score, quality["models"][role]), weights, *speed)
    return table


def _place(row: Json) -> str:
    return f"{row['context']:,} x {row['batch']}"


def _loss(score: Json, reference: Json) -> list[str]:
    if "skipped" in score:
        return ["", score["skipped"], ""]
    ratio = ""
    if "skipped" not in reference and reference["perplexity"] and score["perplexity"]:
        ratio = f"{score['perplexity'] / reference['perplexity']:.4f}"
    perplexity = "overflows" if score["perplexity"] is None else f"{score['perplexity']:.3f}"
    return [f"{score['tokens']:,}", perplexity, ratio]
