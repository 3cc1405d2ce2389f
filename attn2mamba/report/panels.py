"""Which plots the report shows, drawn from the document: each group has one legend, one source, and panels that hold
all runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from ..evaluate.measure import TEACHER
from .numbers import Json, human
from .plots import Axis, Line, heat, lines, log_shade, short
from .svg import TEACHER as TEACHER_STYLE

LENGTH = Axis("context, tokens", log=True, kind="tokens")


@dataclass
class Panel:
    title: str
    svg: Markup


@dataclass
class Group:
    """Panels under one heading. legend: (label, style). sources: what stands below, with the commands. missing: said
    where there are no panels."""

    title: str
    panels: list[Panel]
    text: str = ""
    legend: list[tuple[str, int]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    missing: str = ""


class Subjects:
    """The models of all runs, each with a label and a style of its own. Runs of one teacher share it."""

    def __init__(self, runs: Sequence[Json]) -> None:
        self.runs = runs
        self.single = len(runs) == 1
        self.styles: dict[str, int] = {}
        for run in runs:
            self.style(run, "student")

    def label(self, run: Json, role: str) -> str:
        if role == TEACHER:
            known = {r["models"][TEACHER]["fingerprint"] for r in self.runs if TEACHER in r["models"]}
            known = known or {r["teacher"] for r in self.runs}
            return TEACHER if len(known) == 1 else f"teacher of {run['name']}"
        if role == "student":
            return "student" if self.single else run["name"]
        return role if self.single else f"{role} of {run['name']}"

    def style(self, run: Json, role: str) -> int:
        label = self.label(run, role)
        if label == TEACHER:
            return TEACHER_STYLE
        return self.styles.setdefault(label, len(self.styles) + 1)


class Drawer:
    """Gives each plot a name of its own, by which the ids within it differ from all others'."""

    def __init__(self, runs: Sequence[Json]) -> None:
        self.runs, self.subjects, self.count = runs, Subjects(runs), 0

    def name(self) -> str:
        self.count += 1
        return f"plot{self.count}"

    def curves(self, title: str, series: Sequence[Line], x: Axis, y: Axis, marks: Sequence[float] = ()) -> list[Panel]:
        """One panel; none where there is nothing to draw."""
        series = [line for line in series if line.x]
        return [Panel(title, lines(self.name(), title, series, x, y, marks))] if series else []

    def legend(self, pairs: Sequence[tuple[Json, str]]) -> list[tuple[str, int]]:
        """Of these runs' roles, each label once."""
        found = {self.subjects.label(run, role): self.subjects.style(run, role) for run, role in pairs}
        return sorted(found.items(), key=lambda item: item[1])

    def students(self) -> list[tuple[str, int]]:
        return self.legend([(run, "student") for run in self.runs])

    def roles(self, measure: str) -> Iterator[tuple[Json, str, list[Json]]]:
        """(run, role, cells) of a measure; a teacher that runs share comes once."""
        seen: set[str] = set()
        for run in self.runs:
            for role, rows in run["cells"].get(measure, {}).get("by_role", {}).items():
                label = self.subjects.label(run, role)
                if rows and label not in seen:
                    seen.add(label)
                    yield run, role, rows

    def measures(self, kind: str) -> list[str]:
        """Names of the measures of a kind that have cells."""
        return list(dict.fromkeys(n for run in self.runs for n, c in run["cells"].items() if c["kind"] == kind))

    def cell_sources(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Precision in words and commands of these measures' cells."""
        found = [run["cells"][name] for run in self.runs for name in names if name in run["cells"]]
        precisions = sorted({p for cell in found for p in cell["precision"].values()})
        return precisions, list(dict.fromkeys(cell["command"] for cell in found))


def loss_groups(draw: Drawer) -> Iterator[Group]:
    """Training and held-out loss of each kind of stage, against tokens, time and FLOPs."""
    axes = {
        "tokens": Axis("tokens since the run began", kind="count"),
        "minutes": Axis("minutes since the run began"),
        "flops": Axis("FLOPs since the run began", kind="flops"),
    }
    words = {"transfer": "Stage 1: transfer loss", "finetune": "Stage 2: training loss and held-out cross-entropy"}
    for kind, heading in words.items():
        stages = [(run, s) for run in draw.runs for s in run["training"]["stages"] if s["kind"] == kind]
        stages = [(run, s) for run, s in stages if s["training"] or s["held_out"]]
        panels = []
        # What stage 2 trains on need not be what is held out, so the two have panels of their own there.
        for parts in [("training", "held_out")] if kind == "transfer" else [("training",), ("held_out",)]:
            loss = "cross-entropy" if parts == ("held_out",) else "loss"
            name = "" if len(parts) == 2 else f"{parts[0].replace('_', ' ')}, "
            for x, axis in axes.items():
                series = [_loss_line(draw, run, stage[part], x, part) for run, stage in stages for part in parts]
                title = f"{name}by {x if x != 'flops' else 'FLOPs'}"
                panels += draw.curves(title, series, axis, Axis(loss))
        source = sorted({_point_words(s) for _, s in stages})
        held = sorted({f"n = {s['n']:,} {s['of']}" for _, s in stages})
        commands = list(dict.fromkeys(s["command"] for _, s in stages))
        if panels:
            text = "Loss: " + "; ".join(sorted({_loss_words(s) for _, s in stages})) + "."
            yield Group(heading, panels, text, draw.students(), source + held, commands)


def _point_words(stage: Json) -> str:
    steps = stage["steps_per_point"]
    return f"each training point is {'one step' if steps == 1 else f'the mean of {steps} steps'}, {stage['precision']}"


def _loss_words(stage: Json) -> str:
    if stage["kind"] == "transfer":
        return f"{stage['loss']}, the mean over layers; thin lines are training steps, dots held-out text"
    weights = [f"{name} x {w:g}" for name, w in stage["loss"].items() if w and name != "temperature"]
    return f"{' + '.join(weights).replace('_', '-')} in training, cross-entropy of the next token held out"


def _loss_line(draw: Drawer, run: Json, points: list[Json], x: str, part: str) -> Line:
    known = [p for p in points if x != "flops" or p["flops"] is not None]
    places = [p["seconds"] / 60 if x == "minutes" else float(p[x]) for p in known]
    return Line(draw.subjects.style(run, "student"), places, [p["loss"] for p in known], faint=part == "training")


def layer_groups(draw: Drawer) -> Iterator[Group]:
    """Transfer loss, decay and gate by layer."""
    layer = Axis("layer", kind="whole")
    found = [(run, run["layers"]["transfer_loss"]) for run in draw.runs]
    panels = []
    for title, key in (("before the first step", "loss_at_start"), ("at the end of stage 1", "loss")):
        series = [_layer_line(draw, run, x["layers"], x[key]) for run, x in found if x]
        panels += draw.curves(title, series, layer, Axis("held-out loss"))
    text = "How far each mixer's output is from that of the softmax attention it replaces."
    group = Group("Transfer loss by layer", panels, text, draw.students(), *_weights_source([x for _, x in found if x]))
    group.missing = "These runs did not log the loss of each layer; runs made by this version do, in metrics.jsonl."
    yield group
    yield half_life_group(draw)
    gates = [(run, run["layers"]["gate"]) for run in draw.runs if run["layers"]["gate"]]
    rest = [Line(draw.subjects.style(run, "student"), x["layers"], x["at_rest"]) for run, x in gates]
    reach = [Line(draw.subjects.style(run, "student"), x["layers"], x["reach"]) for run, x in gates]
    panels = draw.curves("gate at rest, mean of silu(b)", rest, layer, Axis("factor"))
    panels += draw.curves("reach of the input, norm of W's rows", reach, layer, Axis("norm"))
    text = (
        "From the weights alone. The gate multiplies a head's output by silu(W x + b). At rest, where W x is 0, that "
        "is silu(b): 1 before training. The norm of W's rows, 0 before training, says how far an input of unit "
        "variance moves what is inside silu; a layer where it stays near 0 does not use its gate."
    )
    group = Group("Gate use by layer", panels, text, draw.students(), *_weights_source([x for _, x in gates]))
    group.missing = "No finished model with gates."
    yield group


def _layer_line(draw: Drawer, run: Json, layers: list[int], losses: list[float | None]) -> Line:
    """Without the layers whose loss was not finite."""
    known = [(i, x) for i, x in zip(layers, losses, strict=True) if x is not None]
    return Line(draw.subjects.style(run, "student"), [i for i, _ in known], [x for _, x in known])


def half_life_group(draw: Drawer) -> Group:
    found = [(run, run["layers"]["decay"]) for run in draw.runs if run["layers"]["decay"]]
    values = [x for _, d in found for row in d["half_life"] for x in row if x is not None]
    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    panels = []
    for run, d in found:
        most = max(len(row) for row in d["half_life"])
        by_head = [[row[h] if h < len(row) else 0.0 for row in d["half_life"]] for h in range(most)]
        shares = [[None if x == 0.0 else log_shade(x, low, high) for x in row] for row in by_head]
        hatched = frozenset((i, j) for i, row in enumerate(by_head) for j, x in enumerate(row) if x is None)
        label = draw.subjects.label(run, "student")
        names = [str(i) for i in d["layers"]], [str(h) for h in range(most)]
        picture = heat(draw.name(), f"half-lives of {label}", shares, *names, None, hatched, ("layer", "head"))
        panels.append(Panel(label, picture))
    never, heads = sum(d["never"] for _, d in found), sum(d["n"] for _, d in found)
    text = (
        "log 2 / (softplus(b) x lambda): tokens after which a state has lost half of what it held, where the input "
        f"does not move the step size. Shade is logarithmic, from {human(low, 'tokens')} (faint) to "
        f"{human(high, 'tokens')} (strong); hatched heads never forget (lambda = 0; {never} of {heads})."
    )
    group = Group("Decay half-lives by layer and head", panels, text, [], *_weights_source([d for _, d in found]))
    group.missing = "No finished model with decays."
    return group


def _weights_source(parts: Sequence[Json]) -> tuple[list[str], list[str]]:
    sources = sorted({f"n = {part['n']:,} {part['of']}, {part['precision']}" for part in parts})
    return sources, list(dict.fromkeys(part["command"] for part in parts))


def length_words(tokens: int) -> str:
    """4k for 4,096 tokens."""
    return short(float(tokens), "tokens")
