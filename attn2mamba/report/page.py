"""The document as one HTML file that needs nothing from outside."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from . import speed_tables, tables
from .continuations import Texts, written
from .glossary import AFTER_STAGE_1, glossary
from .numbers import MEASURED, Json, human, human_p
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
    ("Decode speed-up at the longest context measured", "speed_up_measured"),
)
"""The same where runs stand side by side."""


Part = tables.Table | Group | Texts


@dataclass
class Section:
    """A heading, what holds for all of it (`text`), and what stands under it: tables, groups of plots and texts, in
    order; `missing`, with the commands, says what would be there."""

    title: str
    parts: list[Part]
    missing: str = ""
    commands: tuple[str, ...] = ()
    text: str = ""


def render(document: Json) -> str:
    """HTML of the whole report."""
    runs = document["runs"]
    draw = Drawer(runs)
    environment = Environment(
        loader=PackageLoader("attn2mamba", "report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["kind"] = lambda part: type(part).__name__
    environment.filters["breakable"] = breakable
    sections = list(_sections(document, draw))
    return environment.get_template("template.html.j2").render(
        document=document,
        runs=runs,
        style=Markup(resources.files(__package__).joinpath("style.css").read_text()),
        tiles=[] if len(runs) > 1 else list(_tiles(runs[0])),
        scorecard=tables.scorecard(runs, ROWS) if len(runs) > 1 else None,
        sections=sections,
        after_stage_1=AFTER_STAGE_1,
        glossary=glossary(document, _words(sections)),
        swatch=_swatches(),
        commands=commands_of(document),
    )


def breakable(text: str) -> Markup:
    """With places to break a line after the joints of a metric's name, and nowhere within its words."""
    return Markup(re.sub("([_@]+)", r"\1<wbr>", str(escape(text))))


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
    if key == "perplexity_ratio" and card["held_out_ratio"]["measured"]:
        held_out = card["held_out_ratio"]
        return "" if held_out["note"] == card[key]["note"] else f"{held_out['text']} on {held_out['note']}"
    if key == "accuracy_kept" and difference:
        return f"{difference['text']}, {human_p(difference['p'])}"
    if key == "memory_at_32k" and card[key]["measured"]:
        factor, crossing = card["memory_factor_at_32k"]["value"], card["memory_cross_over"]
        times = f"{human(max(factor, 1 / factor), 'x')} {'less' if factor >= 1 else 'more'} than the teacher"
        return f"{times}; less from {crossing['text'] if crossing['measured'] else crossing['note']}"
    if key == "speed_up_at_32k" and card[key]["note"] != MEASURED and card["speed_up_measured"]["measured"]:
        number = card["speed_up_measured"]
        return f"{number['text']} after {number['note']}, n = {number['n']:,} {number['of']}"
    if key == "speed_cross_over" and card[key]["value"] == 0:
        return "at every context measured"
    return ""


def _sections(document: Json, draw: Drawer) -> Iterator[Section]:
    runs, subjects = document["runs"], draw.subjects
    evaluate = tuple(run["commands"]["eval"] for run in runs)
    yield Section("Training", [tables.costs(document), *loss_groups(draw)])
    kinds = {kind: tables.measures(runs, subjects, kind) for kind in tables.KINDS}
    quality: list[Part | None] = [
        kinds["likelihood"],
        kinds["generation"],
        tables.beside(runs),
        *generation_groups(draw),
    ]
    quality += written(runs, subjects)
    known = {role for run in runs for row in run["measures"] for role in row["values"]}
    models = f"hedgehog is {AFTER_STAGE_1}, student the finished one." if "hedgehog" in known else ""
    missing = "Task accuracy and generation were not measured."
    yield Section("Quality", _there(quality), missing, evaluate, models)
    recall = [kinds["recall"], *recall_groups(draw), kinds["positions"], *position_groups(draw)]
    yield Section("Recall and length", _there(recall), "Recall by length and depth was not measured.", evaluate)
    bench = tuple(run["commands"]["bench"] for run in runs)
    speed: list[Part | None] = [*speed_groups(draw)]
    for run in (run for run in runs if run["speed"]):
        speed.append(speed_tables.precisions(run))
        for precision in run["speed"]["precisions"]:
            speed += [speed_tables.gains(run, precision), speed_tables.speeds(run, precision)]
    disturbed = speed_tables.disturbed(runs)
    yield Section("Speed and memory", _there(speed), "Speed and memory were not measured.", bench, disturbed)
    yield Section("Inside the student", list(layer_groups(draw)))


def _there(parts: Iterable[Part | None]) -> list[Part]:
    return [part for part in parts if part is not None]


def _words(sections: Iterable[Section]) -> str:
    """All that stands in tables and around plots."""
    words: list[str] = []
    for section in sections:
        words += [section.title, section.text]
        for part in section.parts:
            words += [part.title, part.text, *part.sources]
            if isinstance(part, tables.Table):
                words += part.columns
                words += [word for row in part.rows for cell in row for word in (cell.text, cell.note)]
            if isinstance(part, Group):
                words += [panel.title for panel in part.panels] + [label for label, _ in part.legend]
    return "\n".join(words)


def commands_of(document: Json) -> list[str]:
    """The commands of all figures that are known, and last the report's own; several in one figure each by itself."""
    found: dict[str, None] = {}
    for run in document["runs"]:
        found |= {run["commands"]["distill"]: None} | dict.fromkeys(_known_commands(run))
    found.pop(document["command"], None)
    alone = [command for command in found if not set(command.split("; ")) <= found.keys() - {command}]
    return [*alone, document["command"]]


def _known_commands(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value.get("measured", True):
        if value.get("command"):
            yield value["command"]
        for item in value.values():
            yield from _known_commands(item)
    elif isinstance(value, list):
        for item in value:
            yield from _known_commands(item)
