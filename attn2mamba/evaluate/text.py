"""Evaluations as tables: measures down, models across, differences to the teacher beside them."""

from rich.console import Console
from rich.table import Table

from .measure import TEACHER, Json


def print_evaluation(report: Json, console: Console) -> None:
    roles, models = list(report["models"]), report["models"]
    precisions = ", ".join(dict.fromkeys(model["precision"] for model in models.values()))
    table = Table(
        title=f"Evaluation, {precisions}", title_justify="left", caption=caption(report), caption_justify="left"
    )
    table.add_column("measure", overflow="fold")
    table.add_column("n", justify="right")
    for role in roles:
        table.add_column(role, justify="right")
        if role != TEACHER and TEACHER in roles:
            table.add_column("to teacher", justify="right")
    for name, measure in report["measures"].items():
        for metric in shown_metrics(measure):
            table.add_row(f"{name} {metric}", *_cells(measure, metric, roles))
    console.print(table)


def caption(report: Json) -> str:
    lines = [f"{role}: {model['name']}" for role, model in report["models"].items()]
    for role, model in report["models"].items():
        if model["other_tokenizer"]:
            lines.append(f"{role} has another tokenizer: not compared where items are made of tokens")
    if TEACHER in report["models"]:
        lines.append("equal: the 95 % interval of the paired difference is within 0.01 (above 1, nats aside: 1 %)")
        lines.append("differs: p < 0.05; open: these items cannot tell")
    return "\n".join([*lines, report["command"]])


def shown_metrics(measure: Json) -> list[str]:
    """The headline metrics that the first model has, else all of them."""
    first = next(iter(measure["figures"].values()))
    return [metric for metric in measure["headline"] if metric in first] or list(first)


def _cells(measure: Json, metric: str, roles: list[str]) -> list[str]:
    figures = [measure["figures"][role].get(metric) for role in roles]
    counts = [f"{figure['n']:,}" for figure in figures if figure]
    cells = ["/".join(dict.fromkeys(counts))]
    for role, figure in zip(roles, figures, strict=True):
        cells.append("" if figure is None else with_error(figure["value"], figure["stderr"]))
        if role != TEACHER and TEACHER in roles:
            found = measure["differences"].get(role, {}).get(metric)
            cells.append("" if found is None else _difference(found))
    return cells


def _difference(found: Json) -> str:
    p = "p < 0.001" if found["p"] < 0.001 else f"p = {found['p']:.3f}"
    return f"{with_error(found['difference'], found['stderr'], '+')}, {p}: {found['verdict']}"


def with_error(value: float | None, error: float | None, sign: str = "") -> str:
    if value is None:
        return "not finite"
    digits = 4 if abs(value) < 10 else 2
    return f"{value:{sign},.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def print_perplexities(figures: Json, teacher: str | None, console: Console) -> None:
    """Of one text; figures as `score_text` gives them."""
    title = f"{figures['data']}, {figures['context']} tokens of context, {figures['precision']}"
    table = Table(title=title, title_justify="left")
    for column in ("model", "tokens", "perplexity", "by word", "bits per byte", "ratio to teacher"):
        table.add_column(column)
    for name, found in figures["models"].items():
        by_word, bits = found["word_perplexity"], found["bits_per_byte"]
        ratio = found["perplexity"] / figures["models"][teacher]["perplexity"] if teacher and name != teacher else None
        table.add_row(
            name,
            f"{found['tokens']:,}",
            f"{found['perplexity']:.2f}",
            "" if by_word is None else f"{by_word:.2f}",
            "" if bits is None else f"{bits:.3f}",
            "" if ratio is None else f"{ratio:.3f}",
        )
    console.print(table)
