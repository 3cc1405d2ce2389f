"""The report's tables, made from the document: cells are texts, and every row says n."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..evaluate.measure import EQUAL_MEANS, TEACHER
from .numbers import Json, human, human_p
from .panels import Subjects

NONE = "–"


@dataclass
class Cell:
    """What stands in a cell, and smaller words below it."""

    text: str
    note: str = ""


@dataclass
class Table:
    """The first column is of words, the others of numbers. wrap: long notes below numbers take several lines."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    text: str = ""
    sources: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    wrap: bool = False


KINDS = {
    "likelihood": ("Likelihood", "Text and tasks scored by the likelihood that a model gives them."),
    "generation": ("Generation", "What the models write themselves."),
    "recall": ("Recall", "By length or distance, over all depths."),
    "positions": ("Long texts", "Perplexity and nats a token over the first tokens of long texts."),
}


def scorecard(runs: Sequence[Json], rows: Sequence[tuple[str, str]]) -> Table:
    """Runs beside each other; rows are (title, key)."""
    body = []
    for title, key in rows:
        numbers = [run["scorecard"][key] for run in runs]
        body.append([Cell(title), *(Cell(n["text"], n["source"]) for n in numbers)])
    commands = [run["scorecard"][key]["command"] for run in runs for _, key in rows]
    return Table("", ["", *(run["name"] for run in runs)], body, commands=list(dict.fromkeys(commands)), wrap=True)


def measures(runs: Sequence[Json], subjects: Subjects, kind: str) -> Table | None:
    """Every figure of a kind: a column for each model, with the difference to the teacher below; None without any."""
    columns = _columns(runs, subjects, kind)
    names = dict.fromkeys((r["measure"], r["metric"]) for run in runs for r in run["measures"] if _shown(r, kind))
    if not names:
        return None
    body, numbers = [], []
    for measure, metric in names:
        found = {label: _find(run, role, measure, metric) for label, (run, role) in columns.items()}
        body.append([Cell(measure, metric), *(_figure(*pair) for pair in found.values()), _count(found)])
        numbers += [value for value, _ in found.values() if value]
    title, text = KINDS[kind]
    text += " ± is one standard error."
    if any(r["differences"] for run in runs for r in run["measures"] if _shown(r, kind)):
        text += (
            " Below: the difference to the teacher over the same items, and the probability of one as large by chance "
            f"(p; of a perplexity, that of its nats). Differs: p < 0.05; equal: {EQUAL_MEANS}; open: these items "
            "cannot tell."
        )
    sources = sorted({n["precision"] for n in numbers})
    commands = list(dict.fromkeys(n["command"] for n in numbers))
    return Table(title, ["measure", *columns, "n"], body, text, sources, commands)


def _shown(row: Json, kind: str) -> bool:
    return row["kind"] == kind and row["headline"]


def _columns(runs: Sequence[Json], subjects: Subjects, kind: str) -> dict[str, tuple[Json, str]]:
    """By label, the first run that has that model, the teacher's before others."""
    found: dict[str, tuple[Json, str]] = {}
    for run in runs:
        roles = dict.fromkeys(role for r in run["measures"] if r["kind"] == kind for role in r["values"])
        for role in sorted(roles, key=lambda role: role != TEACHER):
            found.setdefault(subjects.label(run, role), (run, role))
    return dict(sorted(found.items(), key=lambda item: item[1][1] != TEACHER))


def _find(run: Json, role: str, measure: str, metric: str) -> tuple[Json | None, Json | None]:
    for row in run["measures"]:
        if (row["measure"], row["metric"]) == (measure, metric):
            return row["values"].get(role), row["differences"].get(role)
    return None, None


def _figure(value: Json | None, difference: Json | None) -> Cell:
    if value is None:
        return Cell(NONE)
    if difference is None or difference["value"] is None:
        return Cell(value["text"])
    text = difference["text"] if difference["unit"] == "points" else _signed(difference)
    return Cell(value["text"], ", ".join(x for x in (text, human_p(difference["p"]), difference["verdict"]) if x))


def _signed(difference: Json) -> str:
    sign = "+" if difference["value"] > 0 else ""
    return sign + human(difference["value"], difference["unit"], difference["stderr"])


def _count(found: dict[str, tuple[Json | None, Json | None]]) -> Cell:
    counts = sorted({value["n"] for value, _ in found.values() if value})
    return Cell(" / ".join(f"{n:,}" for n in counts))


def beside(runs: Sequence[Json]) -> Table | None:
    """Likelihood and generation of the same task in one row."""
    body = []
    for run in runs:
        for row in run["side_by_side"]:
            task = row["task"] if len(runs) == 1 else f"{row['task']}, {run['name']}"
            body.append(
                [Cell(task), *(cell for side in ("likelihood", "generation") for cell in _side(run, row[side]))]
            )
    if not body:
        return None
    columns = ["task", "by likelihood: teacher", "student", "by generation: teacher", "student"]
    worse = [f"{x} ({run['name']})" for run in runs for x in run["worse_generation"]]
    text = "A student can match its teacher's likelihoods and still write worse. "
    text += f"Worse than the teacher at p < 0.05: {', '.join(worse)}." if worse else ""
    commands = list(dict.fromkeys(r["command"] for run in runs for m in run["measures"] for r in m["values"].values()))
    return Table("Likelihood beside generation", columns, body, text, _precisions(runs), commands)


def _side(run: Json, side: Json) -> Iterator[Cell]:
    for role in (TEACHER, "student"):
        value, difference = _find(run, role, side["measure"], side["metric"])
        if value is None:
            yield Cell(NONE, f"{side['measure']} {side['metric']}")
        else:
            shown = _figure(value, difference)
            words = f"{side['measure']} {side['metric'].replace('_', ' ')}, n = {value['n']:,}"
            yield Cell(shown.text, words if role == TEACHER else shown.note)


def _precisions(runs: Sequence[Json]) -> list[str]:
    return sorted({n["precision"] for run in runs for row in run["measures"] for n in row["values"].values()})


def costs(document: Json) -> Table:
    """What each run took to train and where it came, with all at one data budget where runs are compared."""
    same, body = document["same_budget"], []
    for run in document["runs"]:
        cost, held = run["training"]["cost"], run["held_out_perplexity"]
        row = [Cell(run["name"], "" if run["finished"] else "unfinished")]
        row += [Cell(cost[k]["text"]) if k in cost else Cell(NONE) for k in ("tokens", "seconds", "flops")]
        row += [
            Cell(held[r]["text"], f"n = {held[r]['n']:,}") if r in held else Cell(NONE)
            for r in ("teacher", "hedgehog", "student")
        ]
        row.append(Cell(cost["held_out_loss"]["text"]) if "held_out_loss" in cost else Cell(NONE))
        if same:
            row.append(Cell(same["losses"][run["name"]]["text"], same["losses"][run["name"]]["note"]))
        body.append(row)
    columns = [
        "run",
        "tokens",
        "time",
        "FLOPs",
        "perplexity: teacher",
        "after stage 1",
        "student",
        "last held-out loss",
    ]
    text = (
        "Perplexities on the text held out during the run, in fp32. Held-out loss is stage 2's cross-entropy in nats a "
        "token. FLOPs are reckoned from shapes (docs/cost.md), time is the run's own and includes held-out evaluations."
    )
    if same:
        columns.append(f"loss at {same['tokens']:,} tokens")
        if not same["same_text"]:
            text += " The runs were not evaluated on the same text and sequence length: their losses do not compare."
    if any(run["base"] for run in document["runs"]):
        text += " Where a run had a base, its larger teacher is reckoned as if it were the base."
    precisions = sorted({run["training"]["cost"]["tokens"]["precision"] for run in document["runs"]} - {""})
    n = [f"n = {run['training']['cost']['tokens']['n']:,} steps ({run['name']})" for run in document["runs"]]
    commands = [run["commands"]["distill"] for run in document["runs"]]
    return Table("Training cost", columns, body, text, [*n, *precisions], commands)
