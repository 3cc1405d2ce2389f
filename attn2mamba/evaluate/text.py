"""Evaluations as tables: measures down, models across, differences to the teacher beside them."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .measure import EQUAL_MEANS, TEACHER, Json, with_error


def print_evaluation(report: Json, console: Console) -> None:
    roles, models = list(report["models"]), report["models"]
    precisions = ", ".join(dict.fromkeys(model["precision"] for model in models.values()))
    table = Table(title=f"Evaluation, {precisions}", title_justify="left")
    table.add_column("measure", no_wrap=True)
    table.add_column("n", justify="right")
    for role in roles:
        table.add_column(escape(role), justify="right")
        if role != TEACHER and TEACHER in roles:
            table.add_column("to teacher", justify="right")
    for name, measure in report["measures"].items():
        for metric in shown_metrics(measure):
            table.add_row(escape(f"{name} {metric}"), *_cells(measure, metric, roles))
    console.print(table)
    console.print(caption(report), markup=False, highlight=False, soft_wrap=True)


def caption(report: Json) -> str:
    lines = [f"{role}: {model['name']}" for role, model in report["models"].items()]
    if TEACHER not in report["models"]:
        lines.append("compared with nothing: --teacher NAME measures that model on the same items")
    for role, model in report["models"].items():
        if model["other_tokenizer"]:
            lines.append(f"{role} has another tokenizer: not compared where items are made of tokens")
    if TEACHER in report["models"]:
        lines.append(f"equal: {EQUAL_MEANS}")
        lines.append("differs: p < 0.05 (of a perplexity, that of its nats); open: these items cannot tell")
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
        cells.append("" if figure is None else shown(figure["value"], figure["stderr"]))
        if role != TEACHER and TEACHER in roles:
            found = measure["differences"].get(role, {}).get(metric)
            cells.append("" if found is None else _difference(found))
    return cells


def _difference(found: Json) -> str:
    if found["p"] is None or found["difference"] is None:
        return "not finite"
    p = "p < 0.001" if found["p"] < 0.001 else f"p = {found['p']:.3f}"
    return f"{shown(found['difference'], found['stderr'], '+')}, {p}: {found['verdict']}"


def shown(value: float | None, error: float | None, sign: str = "") -> str:
    if value is None:
        return "not finite"
    return with_error(value, error, sign) if error is not None else f"{value:{sign},.{4 if abs(value) < 10 else 2}f}"


def print_perplexities(figures: Json, teacher: str | None, console: Console) -> None:
    """Of one text; figures as `score_text` gives them."""
    title = f"{escape(figures['data'])}, {figures['context']} tokens of context, {figures['precision']}"
    table = Table(title=title, title_justify="left")
    for column in ("model", "tokens", "perplexity", "by word", "bits per byte", "ratio to teacher"):
        table.add_column(column)
    for name, found in figures["models"].items():
        by_word, bits = found["word_perplexity"], found["bits_per_byte"]
        reference = figures["models"][teacher]["perplexity"] if teacher and name != teacher else None
        ratio = found["perplexity"] / reference if reference and found["perplexity"] else None
        table.add_row(
            escape(name),
            f"{found['tokens']:,}",
            "not finite" if found["perplexity"] is None else f"{found['perplexity']:.2f}",
            "" if by_word is None else f"{by_word:.2f}",
            "" if bits is None else f"{bits:.3f}",
            "" if ratio is None else f"{ratio:.3f}",
        )
    console.print(table)
