"""What evaluation.json and figures.json say: rows for tables, and the headline figures of quality and recall."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..evaluate.calibration import calibrate, hardly_guesses
from ..evaluate.measure import TEACHER
from .data import RunData
from .numbers import NOT_FINITE, Json, Number, missing, normal_p, root_sum_square

STUDENT = "student"
ACCURACIES = ("acc_norm", "acc", "accuracy", "exact_match")
"""Metrics that stand for a task in the mean over tasks; the first that it has."""

FEW_TASKS = 3
"""Tasks that are named one by one where a figure is of them."""

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
        return missing("x", run.eval_command("quality"), NOT_FINITE)
    for row in sorted(texts, key=lambda r: TEXTS.index(r["measure"]) if r["measure"] in TEXTS else len(TEXTS)):
        ours, theirs = row["values"][STUDENT], row["values"][TEACHER]
        error = row["differences"].get(STUDENT, {}).get("stderr")
        error = None if error is None else error / theirs.value
        n, of = scored_text(run, row["measure"], ours.n)
        common = (n, of, ours.precision, ours.command)
        return Number(ours.value / theirs.value, "x", *common, stderr=error, note=row["measure"])
    return held_out_ratio(run)


def scored_text(run: RunData, measure: str, items: int) -> tuple[int, str]:
    """How much text a perplexity is of: of our own measures windows and texts, of others `items`."""
    rows = run.measures[measure].get("cells", {}).get(STUDENT, [])
    if not rows or "windows" not in rows[0]:
        return items, "items"
    texts = rows[0]["documents"]
    return rows[0]["windows"], f"windows of {rows[0]['context']:,} tokens from {texts:,} text{'s' if texts > 1 else ''}"


def held_out_ratio(run: RunData) -> Number:
    """Student's perplexity over the teacher's on the text held out in the run."""
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
    named = [row["measure"] for row in tasks]
    items, of = sum(x.n for x in ours), f"items of {', '.join(named) if count <= FEW_TASKS else f'{count} tasks'}"
    common = (items, of, ours[0].precision, ours[0].command)
    kept = Number(
        sum(x.value for x in ours) / count / whole, "share", *common, stderr=None if error is None else error / whole
    )
    difference = Number(mean, "points", *common, stderr=error, note=", ".join(named)).to_dict()
    p = differences[0]["p"] if count == 1 else None if error is None else normal_p(mean, error)
    return kept, {**difference, "p": p}


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


class Place(NamedTuple):
    """A length or distance of a measure: the models' figures and the chance of a guess; weight: in the mean."""

    weight: float
    teacher: Json
    student: Json
    chance: float


def kept_recall(run: RunData) -> Number:
    """Share of the teacher's score over guessing that the student keeps, where the teacher itself does better than
    guessing; by likelihood, where a task is scored both ways, which asks for no obedience to a question. Every measure
    counts alike, and in it every length or distance. The error is of both models' scores over contexts or strings, as
    if they were independent."""
    places: dict[str, list[Place]] = {}
    whole = 0
    for name, measure in run.measures.items():
        if measure["kind"] == "recall" and {TEACHER, STUDENT} <= set(measure["figures"]):
            places[name] = _above_guessing(measure)
            whole += sum(not metric.startswith("greedy@") for metric in measure["figures"][STUDENT])
    judged = [place for found in places.values() for place in found]
    if not judged:
        return missing("share", run.eval_command("recall"), "the teacher itself fails everywhere" if whole else "")
    theirs = sum(p.weight * (p.teacher["value"] - p.chance) for p in judged)
    kept = sum(p.weight * (p.student["value"] - p.chance) for p in judged) / theirs
    errors = [(p.weight, p.teacher.get("stderr"), p.student.get("stderr")) for p in judged]
    error = None
    if not any(a is None or b is None for _, a, b in errors):
        error = root_sum_square([w * x for w, a, b in errors for x in (kept * (a or 0.0), b or 0.0)]) / theirs
    names = [name for name, found in places.items() if found]
    command = "; ".join(dict.fromkeys(run.command_of(name) for name in names))
    of = f"contexts or strings of {', '.join(names)}"
    note = f"at {len(judged)} of {whole} lengths and distances, where the teacher succeeds"
    n = sum(place.student["n"] for place in judged)
    return Number(max(0.0, kept), "share", n, of, run.precision_of(STUDENT), command, error, note)


def _above_guessing(measure: Json) -> list[Place]:
    """The lengths or distances at which the teacher does better than a guess. Metrics are FORM@TOKENS or
    accuracy@DISTANCE; the chance is that of the cells behind them, by answers."""
    found = []
    for metric, ours in measure["figures"][STUDENT].items():
        form, _, place = metric.partition("@")
        theirs = measure["figures"][TEACHER].get(metric)
        rows = [c for c in measure["cells"][TEACHER] if str(c.get("tokens", c.get("distance"))) == place]
        rows = [c for c in rows if c.get("form", form) == form]
        if form == "greedy" or not _has_value(ours) or not _has_value(theirs) or not rows or hardly_guesses(rows):
            continue
        chance = sum(row["n"] * row.get("chance", 0.0) for row in rows) / sum(row["n"] for row in rows)
        found.append((theirs, ours, chance))
    return [Place(1 / len(found), *figures) for figures in found]


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
