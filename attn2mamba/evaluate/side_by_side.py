"""Likelihood beside generation: a model can match the one and still write worse."""

from .measure import Json

Column = tuple[str, str]
"""Measure and metric."""

PAIRS: tuple[tuple[str, tuple[Column, ...], Column], ...] = (
    (
        "last word of a passage",
        (("lambada", "accuracy"), ("lambada_openai", "acc")),
        ("lambada_generate", "exact_match"),
    ),
    ("running text", (("data", "perplexity"), ("wikitext2", "perplexity")), ("repetition", "greedy_loop")),
    ("the teacher's own text", (("agreement", "token_agreement"),), ("agreement", "common_prefix")),
)
"""Task; where its likelihood stands, the first that was measured; where its generation stands."""


def side_by_side(evaluation: Json) -> list[Json]:
    """Rows for a table, from what evaluation.json holds: of each task measured both ways {"task", "likelihood",
    "generation"}, either of these {"measure", "metric", "figures": {role: figure}, "differences": {role: difference}}.
    """
    rows = []
    for task, likelihoods, generation in PAIRS:
        found = next((side for column in likelihoods if (side := _side(evaluation, column))), None)
        generated = _side(evaluation, generation)
        if found and generated:
            rows.append({"task": task, "likelihood": found, "generation": generated})
    return rows


def _side(evaluation: Json, column: Column) -> Json | None:
    measure, metric = column
    summary = evaluation["measures"].get(measure)
    if summary is None:
        return None
    kept = {
        part: {role: values[metric] for role, values in summary[part].items() if metric in values}
        for part in ("figures", "differences")
    }
    return {"measure": measure, "metric": metric, **kept} if kept["figures"] else None
