"""The glossary holds what a report says, and all of its metrics."""

from attn2mamba.report import write_report
from attn2mamba.report.glossary import ENTRIES, HIGHER, LOWER, glossary

from .made_up import make_evaluation, make_run


def terms(kind: str, measure: str, metric: str, said: str = "") -> set[str]:
    row = {"measure": measure, "metric": metric, "kind": kind, "headline": True}
    run = {"measures": [row], "verdict": said, "scorecard": {}}
    return {entry.term for entry in glossary({"rules": [], "runs": [run]}, "")}


def test_only_what_occurs():
    assert terms("recall", "needle", "greedy@1024") == {"greedy (recall)", "needle"}
    assert terms("generation", "repetition", "greedy_repeated_4grams") == {"greedy_, sampled_", "repeated_4grams"}
    assert terms("likelihood", "piqa", "acc_norm,none") == {"acc, acc_norm"}
    assert terms("generation", "json", "right", "better than guessing") == {"right", "guessing, chance"}
    assert terms("generation", "other", "other", "by chance") == set()


def test_directions():
    better = {entry.term: entry.better for entry in ENTRIES}
    assert len(better) == len(ENTRIES)
    assert {better[x] for x in ("perplexity", "loop", "repeated_4grams", "kl")} == {LOWER}
    assert {better[x] for x in ("accuracy", "distinct_n", "token_agreement", "valid", "log_likelihood")} == {HIGHER}
    assert better["needle"] == better["tokens (metric)"] == ""


def test_page_ends_with_it(tmp_path):
    page = write_report([make_run(tmp_path / "run", make_evaluation())]).read_text()
    end = page[page.index("What the words mean") :]
    for term in ("loop", "copying", "valid"):
        assert f"<dt>{term}</dt>" in end
    assert "<dt>kl</dt>" not in end and "Lower is better." in end
