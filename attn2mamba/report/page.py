"""The document as one HTML file that needs nothing from outside."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from . import speed_tables, tables
from .numbers import Json, human, human_p
from .panels import Drawer, Group, layer_groups, loss_groups
from .plots import swatch
from .recall_panels import generation_groups, position_groups, recall_groups
from .speed_panels import speed_groups
from .svg import SERIES

TILES = (
    ("Perplexity over the teacher's", "perplexity_ratio"),
    ("Task accuracy kept", "accuracy_kept"),
    ("Recall kept", "recall_kept"),
    ("Decodes faster than the teacher from", "speed_cross_over"),
    ("Memory at 32k, one sequence", "memory_at_32k"),
    ("Decode speed-up at 32k", "speed_up_at_32k"),
)
"""Title and figure; `_below` adds a line to some."""

ROWS = (
    *TILES[:5],
    ("Teacher's memory over that", "memory_factor_at_32k"),
    ("Less memory than the teacher from", "memory_cross_over"),
    TILES[5],
)
"""The same where runs stand side by side."""


@dataclass
class Section:
    """A heading and what stands under it: tables and groups of plots, in order; `missing`, with the commands, says what
    would be there."""

    title: str
    parts: list[tables.Table | Group]
    missing: str = ""
    commands: tuple[str, ...] = ()


def render(document: Json) -> str:
    """HTML of the whole report."""
    runs = document["runs"]
    draw = Drawer(runs)
    environment = Environment(
        loader=PackageLoader("attn2mamba", "report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["kind"] = lambda part: type(part).__name__
    return environment.get_template("template.html.j2").render(
        document=document,
        runs=runs,
        style=Markup(resources.files(__package__).joinpath("style.css").read_text()),
        tiles=[] if len(runs) > 1 else list(_tiles(runs[0])),
        scorecard=tables.scorecard(runs, ROWS) if len(runs) > 1 else None,
        sections=list(_sections(document, draw)),
        swatch=_swatches(),
        commands=list(dict.fromkeys(_commands(document))),
    )


def _swatches() -> Callable[[int], Markup]:
    """Style -> a piece of its line, whose ids are its own each time."""
    drawn = {style: swatch("swatch", style) for style in range(SERIES + 1)}
    number = itertools.count(1)

    def place(style: int) -> Markup:
        return Markup(drawn[style and (style - 1) % SERIES + 1].replace("swatch-", f"swatch{next(number)}-"))

    return place


def _tiles(run: Json) -> Iterator[dict]:
    for title, key in TILES:
        yield {"title": title, "number": run["scorecard"][key], "below": _below(run, key)}


def _below(run: Json, key: str) -> str:
    card, difference = run["scorecard"], run["accuracy_difference"]
    if key == "accuracy_kept" and difference:
        return f"{difference['text']}, {human_p(difference['p'])}"
    if key == "memory_at_32k" and card[key]["measured"]:
        factor, crossing = card["memory_factor_at_32k"]["value"], card["memory_cross_over"]
        times = f"{human(max(factor, 1 / factor), 'x')} {'less' if factor >= 1 else 'more'} than the teacher"
        return f"{times}; less from {crossing['text'] if crossing['measured'] else crossing['note']}"
    if key == "speed_cross_over" and card[key]["value"] == 0:
        return "at every context measured"
    return ""


def _sections(document: Json, draw: Drawer) -> Iterator[Section]:
    runs, subjects = document["runs"], draw.subjects
    evaluate = tuple(run["commands"]["eval"] for run in runs)
    yield Section("Training", [tables.costs(document), *loss_groups(draw)])
    kinds = {kind: tables.measures(runs, subjects, kind) for kind in tables.KINDS}
    quality = [kinds["likelihood"], kinds["generation"], tables.beside(runs), *generation_groups(draw)]
    yield Section("Quality", _there(quality), "Task accuracy and generation were not measured.", evaluate)
    recall = [kinds["recall"], *recall_groups(draw), kinds["positions"], *position_groups(draw)]
    yield Section("Recall and length", _there(recall), "Recall by length and depth was not measured.", evaluate)
    bench = tuple(run["commands"]["bench"] for run in runs)
    speed: list[tables.Table | Group | None] = [*speed_groups(draw)]
    for run in (run for run in runs if run["speed"]):
        speed.append(speed_tables.precisions(run))
        for precision in run["speed"]["precisions"]:
            speed += [speed_tables.gains(run, precision), speed_tables.speeds(run, precision)]
    yield Section("Speed and memory", _there(speed), "Speed and memory were not measured.", bench)
    yield Section("Inside the student", list(layer_groups(draw)))


def _there(parts: Iterable[tables.Table | Group | None]) -> list[tables.Table | Group]:
    return [part for part in parts if part is not None]


def _commands(document: Json) -> Iterator[str]:
    for run in document["runs"]:
        yield run["commands"]["distill"]
        yield from (row["command"] for r in run["measures"] for row in r["values"].values())
        if run["speed"]:
            yield str(run["speed"]["command"])
    yield document["command"]
