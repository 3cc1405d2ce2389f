"""What evaluation.json and figures.json say: rows for tables, and the headline figures of quality and recall."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..evaluate.calibration import calibrate
from ..evaluate.measure import TEACHER
from .data import RunData
from .numbers import Json, Number, missing, normal_p, root_sum_square

STUDENT = "student"
ACCURACIES = ("acc_norm", "acc", "accuracy", "exact_match")
"""Metrics that stand for a task in the mean over tasks; the first that it has."""

TEXTS = ("wikitext2", "wikitext", "data")
"""Measures whose perplexity stands for a model's, in this order; then any other but lambada's, which is that of the
last words alone."""

NO_SHARES = ("kl", "nats", "bits", "nll", "seconds", "tokens")
LOWER_IS_BETTER = ("perplexity", "loop", "repeated", "bits", "nll", "kl")


def unit_of(metric: str, values: list[float]) -> str:
    if "perplexity" in metric:
        return "perplexity"
    words = re.split("[^a-z]", metric)
    shares = all(0 <= value <= 1 for value in values) and not any(word in NO_SHARES for word in words)
    return "share" if shares else "number"


def measure_rows(run: RunData) -> list[Json]:
    """One row for each measure and metric: `values` and `differences` (to the teacher) by role."""
    rows = []
    for name, measure in run.measures.items():
        figures = measure["figures"]
        metrics = list(dict.fromkeys(metric for by_metric in figures.values() for metric in by_metric))
        for metric in metrics:
            known = {role: f[metric] for role, f in figures.items() if _has_value(f.get(metric))}
            unit = unit_of(metric, [figure["value"] for figure in known.values()])
            differences = measure.get("differences", {})
            rows.append(
                {
                    "measure": name,
                    "kind": measure["kind"],
                    "metric": metric,
                    "version": measure.get("version"),
                    "headline": metric in (measure.get("headline") or metrics),
                    "values": {role: _number(run, name, role, figure, unit) for role, figure in known.items()},
                    "differences": {
                        role: _difference(run, name, role, by_metric[metric], unit)
                        for role, by_metric in differences.items()
                        if metric in by_metric
                    },
                }
            )
    return [row for row in rows if row["values"]]


def _has_value(figure: Any) -> bool:
    return isinstance(figure, dict) and figure.get("value") is not None


def _number(run: RunData, measure: str, role: str, figure: Json, unit: str) -> Number:
    common = (figure["n"], "items", run.precision_of(role), run.command_of(measure))
    return Number(figure["value"], unit, *common, stderr=figure.get("stderr"))


def _difference(run: RunData, measure: str, role: str, difference: Json, unit: str) -> Json:
    unit = "points" if unit == "share" else "number"
    value = {"value": difference.get("difference"), "n": difference["n"], "stderr": difference.get("stderr")}
    found = {"p": difference.get("p"), "verdict": difference.get("verdict")}
    return {**_number(run, measure, role, value, unit).to_dict(), **found}


def perplexity_ratio(run: RunData, rows: list[Json]) -> Number:
    """Student's over teacher's: the first measure that has both (see TEXTS), else on the text held out in the run."""
    both = [r for r in rows if r["kind"] == "likelihood" and {TEACHER, STUDENT} <= set(r["values"])]
    texts = [r for r in both if r["metric"] == "perplexity" and r["measure"] != "lambada"]
    broken = [r for r in rows if r["metric"] == "perplexity" and r["measure"] in TEXTS and TEACHER in r["values"]]
    if any(STUDENT not in r["values"] for r in broken if STUDENT in run.measures[r["measure"]]["figures"]):
        return missing("x", run.eval_command("quality"), "the student's perplexity is not finite")
    for row in sorted(texts, key=lambda r: TEXTS.index(r["measure"]) if r["measure"] in TEXTS else len(TEXTS)):
        ours, theirs = row["values"][STUDENT], row["values"][TEACHER]
        return Number(
            ours.value / theirs.value, "x", ours.n, "items", ours.precision, ours.command, note=row["measure"]
        )
    figures = {role: run.figures.get(role, {}) for role in (TEACHER, STUDENT)}
    if not all(figure.get("perplexity") for figure in figures.values()):
        return missing("x", run.eval_command("quality"))
    ratio = figures[STUDENT]["perplexity"] / figures[TEACHER]["perplexity"]
    note = "the validation text" if run.options.get("validation") else "the held-out part of the training data"
    n = figures[STUDENT].get("tokens", 0)
    return Number(ratio, "x", n, "tokens", "fp32", run.distill_command, note=note)


def task_accuracy(run: RunData, rows: list[Json]) -> tuple[Number, Json | None]:
    """Mean accuracy kept over all tasks scored by likelihood, and the paired difference of the means with its p. Each
    task counts alike; the tasks' paired differences are independent of one another."""
    tasks = list(_tasks(rows))
    if not tasks:
        return missing("share", run.eval_command("paper")), None
    ours, theirs = ([row["values"][role] for row in tasks] for role in (STUDENT, TEACHER))
    differences = [row["differences"][STUDENT] for row in tasks]
    count, whole = len(tasks), sum(x.value for x in theirs) / len(tasks)
    mean = sum(d["value"] for d in differences) / count
    errors = [d["stderr"] for d in differences]
    error = None if None in errors else root_sum_square(errors) / count
    if whole <= 0:
        return missing("share", run.eval_command("paper"), "the teacher gets nothing right"), None
    items, of = sum(x.n for x in ours), f"items of {count} task{'s' if count > 1 else ''}"
    common = (items, of, ours[0].precision, ours[0].command)
    kept = Number(
        sum(x.value for x in ours) / count / whole, "share", *common, stderr=None if error is None else error / whole
    )
    names = ", ".join(row["measure"] for row in tasks)
    difference = Number(mean, "points", *common, stderr=error, note=names).to_dict()
    return kept, {**difference, "p": None if error is None else normal_p(mean, error)}


def _tasks(rows: list[Json]) -> Iterator[Json]:
    """For each task the row of the metric that stands for it, where teacher and student both have it. The harness's
    lambada_openai has the passages of lambada: the two count once."""
    both = any(row["measure"] == "lambada_openai" for row in rows)
    seen: set[str] = {"lambada"} if both else set()
    for metric in ACCURACIES:
        for row in rows:
            whole = {TEACHER, STUDENT} <= set(row["values"]) and STUDENT in row["differences"]
            named = row["metric"].split(",")[0] == metric
            if whole and named and row["kind"] == "likelihood" and row["measure"] not in seen:
                seen.add(row["measure"])
                yield row


def recall_cells(run: RunData, role: str) -> list[Json]:
    """Cells of all recall measures with `measure`, the teacher's accuracy and whether the teacher fails there."""
    cells = []
    for name, measure in run.measures.items():
        if measure["kind"] == "recall":
            by_role = measure["cells"]
            theirs = by_role.get(TEACHER, [])
            cells += [{"measure": name, **cell} for cell in calibrate(by_role.get(role, []), theirs)]
    return [cell for cell in cells if cell.get("accuracy") is not None and cell.get("n")]


def kept_recall(run: RunData) -> Number:
    """Share of the teacher's right answers, over those of guessing, that the student gives too, where the teacher does
    better than guessing; by likelihood, where a task is scored both ways, which asks for no obedience to a question.
    The standard error is that of the student's answers alone."""
    cells = [cell for cell in recall_cells(run, STUDENT) if cell.get("form") != "greedy"]
    judged = [cell for cell in cells if cell.get("teacher_fails") is False]
    if not judged:
        note = "the teacher itself fails everywhere" if any("teacher_fails" in cell for cell in cells) else ""
        return missing("share", run.eval_command("recall"), note)
    total = Counter[str]()
    for cell in judged:
        total[cell["measure"]] += cell["n"]
    weights = [c["n"] / total[c["measure"]] for c in judged]  # every measure counts alike
    theirs = sum(w * (c["teacher"] - c.get("chance", 0.0)) for w, c in zip(weights, judged, strict=True))
    ours = sum(w * (c["accuracy"] - c.get("chance", 0.0)) for w, c in zip(weights, judged, strict=True))
    spread = [(c["accuracy"] * (1 - c["accuracy"]) / c["n"]) ** 0.5 for c in judged]
    error = root_sum_square([w * x for w, x in zip(weights, spread, strict=True)]) / theirs
    answers = sum(c["n"] for c in judged)
    precision = run.precision_of(STUDENT)
    command = "; ".join(dict.fromkeys(run.command_of(c["measure"]) for c in judged))
    note = f"in {len(judged)} of {len(cells)} cells, where the teacher succeeds"
    return Number(max(0.0, ours / theirs), "share", answers, "answers", precision, command, error, note)


def worse_generation(rows: list[Json]) -> list[Json]:
    """Rows of generation in which the student is worse than its teacher at p < 0.05."""
    found = []
    for row in rows:
        difference = row["differences"].get(STUDENT)
        if (
            row["kind"] != "generation"
            or row["measure"] == "agreement"
            or not difference
            or difference["value"] is None
        ):
            continue
        lower = any(word in row["metric"] for word in LOWER_IS_BETTER)
        p = difference["p"]
        if p is not None and p < 0.05 and (difference["value"] > 0) == lower and "tokens" not in row["metric"]:
            found.append(row)
    return found
