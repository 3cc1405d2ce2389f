"""Names of measures and of suites of them, for `--tasks`."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from . import harness_tasks
from .harness import factory
from .measure import Measure
from .options import SuiteOptions

Factory = Callable[[SuiteOptions], Measure]

MODULES = {
    "quality": ("corpora",),
    "recall": ("recall_measures", "length", "lambada"),
    "generation": ("generative",),
}
"""Where the measures of each kind are: each module has a dict MEASURES of names and factories."""

PAPER = (
    "arc_challenge",
    "arc_easy",
    "boolq",
    "hellaswag",
    "lambada_openai",
    "logiqa",
    "piqa",
    "race",
    "social_iqa",
    "winogrande",
)
"""The ten tasks of "Attention to Mamba" (arXiv 2604.14191)."""

QUICK: dict[str, dict[str, Any]] = {
    "wikitext2": {"limit": 8, "context": (1024,)},
    "lambada": {"limit": 100},
    "needle": {"limit": 2, "context": (1024,)},
    "copying": {"context": (1024,)},
    "repetition": {"limit": 4},
}
"""Minutes on two cores, for a model of 135 million parameters."""

SUITES = ("quick", "paper", "quality", "recall", "generation", "full")


def registry(*kinds: str) -> dict[str, Factory]:
    """The measures of our own, by name: of the kinds given, or all."""
    found: dict[str, Factory] = {}
    for kind in kinds or tuple(MODULES):
        for module in MODULES[kind]:
            found |= importlib.import_module(f"{__package__}.{module}").MEASURES
    return found


def make_measures(tasks: Sequence[str], options: SuiteOptions, given: Sequence[str] = ()) -> list[Measure]:
    """The measures that names of tasks, groups and suites stand for, each once. `given`: the options that the user has
    set, which a suite leaves alone. Raises UserError for a name that nothing has."""
    found: dict[str, Measure] = {}
    for task in tasks:
        for name, preset in _expand(task).items():
            changes = {key: value for key, value in preset.items() if key not in given}
            found[name] = make(name, replace(options, **changes))
    return list(found.values())


def make(name: str, options: SuiteOptions) -> Measure:
    """One measure: ours, else the harness's; `lm:NAME` is the harness's in any case."""
    return registry().get(name, factory(name))(options)


def _expand(task: str) -> dict[str, dict[str, Any]]:
    """Names of measures that a name stands for, with what the suite sets."""
    if task == "quick":
        return QUICK
    if task == "paper":
        return {name: {} for name in PAPER}
    if task == "quality":
        return {name: {} for name in ("wikitext2", "wikitext", *PAPER)}
    if task == "full":
        return _expand("quality") | _expand("recall") | _expand("generation")
    if task in MODULES:
        return {name: {} for name in registry(task)}
    ours = registry()
    if task in ours:
        return {task: {}}
    known, bare = [*SUITES, *ours], task.removeprefix("lm:")
    if bare == task and not harness_tasks.is_installed() and get_close_matches(task, known):
        raise harness_tasks.unknown(task, known)
    return {task.removesuffix(bare) + name: {} for name in harness_tasks.expand(bare, known if bare == task else ())}
