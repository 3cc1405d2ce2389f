"""Names of measures, suites and tasks."""

from types import SimpleNamespace

import pytest

from attn2mamba.errors import UserError
from attn2mamba.evaluate import harness_tasks, suites
from attn2mamba.evaluate.harness import HarnessTask
from attn2mamba.evaluate.options import SuiteOptions
from attn2mamba.evaluate.suites import PAPER, QUICK, make_measures, registry


def entry(kind, cfg=None, tags=()):
    return SimpleNamespace(kind=SimpleNamespace(name=kind), cfg=cfg, tags=set(tags))


ENTRIES = {
    "ai2_arc": entry("TAG", tags=["arc_easy", "arc_challenge"]),
    "mmlu": entry("GROUP", {"task": ["arc_easy"], "aggregate_metric_list": [{"metric": "acc"}]}),
    "bench": entry("GROUP", {"task": ["ai2_arc", "mmlu"]}),
    **{name: entry("TASK") for name in (*PAPER, "wikitext", "gsm8k")},
}
INDEX = SimpleNamespace(task_index=ENTRIES, all_tasks=sorted(ENTRIES))
"""Of a harness that knows a few tasks."""


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(harness_tasks, "manager", lambda: INDEX)
    monkeypatch.setattr(harness_tasks, "is_installed", lambda: True)
    monkeypatch.setattr(suites, "registry", lambda *kinds: ours(*kinds))


def ours(*kinds):
    """Without the measures that read data when they are made."""
    found = registry(*kinds)
    return {name: (lambda options, name=name: Named(name, options)) for name in found}


class Named:
    def __init__(self, name, options):
        self.name, self.options = name, options


def names(*tasks):
    return [measure.name for measure in make_measures(tasks, SuiteOptions())]


def test_every_name_of_every_suite_is_known():
    for suite in suites.SUITES:
        assert names(suite), suite
    assert set(QUICK) <= set(registry())
    assert names("paper") == list(PAPER) and len(PAPER) == 10
    assert set(names("full")) >= {*PAPER, "wikitext2", "wikitext", "needle", "gsm8k", "repetition"}


def test_tags_and_groups():
    assert names("ai2_arc") == ["arc_challenge", "arc_easy"]
    assert names("mmlu") == ["mmlu"]
    assert names("bench") == ["arc_challenge", "arc_easy", "mmlu"]
    assert names("arc_easy", "ai2_arc") == ["arc_easy", "arc_challenge"]


def test_ours_come_first_and_the_harness_on_demand():
    (own,) = make_measures(["gsm8k"], SuiteOptions())
    (theirs,) = make_measures(["lm:gsm8k"], SuiteOptions())
    assert isinstance(own, Named) and isinstance(theirs, HarnessTask)
    assert (theirs.name, theirs.task) == ("lm:gsm8k", "gsm8k")


def test_a_suite_sets_what_the_user_does_not():
    by_name = {m.name: m.options for m in make_measures(["quick"], SuiteOptions())}
    assert by_name["lambada"].limit == 100 and by_name["needle"].context == (1024,)
    options = SuiteOptions(limit=3, context=(64,))
    by_name = {m.name: m.options for m in make_measures(["quick"], options, ["limit"])}
    assert by_name["lambada"].limit == 3 and by_name["needle"].context == (1024,)
    assert make_measures(["lambada"], options)[0].options == options


@pytest.mark.parametrize(
    ("task", "complaint"),
    [
        ("nedle", "did you mean 'needle'"),
        ("arc_esy", "did you mean 'arc_easy'"),
        ("papr", "'paper'"),
        ("§", "see docs"),
    ],
)
def test_unknown_names(task, complaint):
    with pytest.raises(UserError, match=f"no task is called '{task}'.*{complaint}"):
        names(task)


def test_without_the_harness(monkeypatch):
    monkeypatch.setattr(harness_tasks, "is_installed", lambda: False)
    assert names("needle") == ["needle"]
    with pytest.raises(UserError, match="did you mean 'needle'"):
        names("nedle")
