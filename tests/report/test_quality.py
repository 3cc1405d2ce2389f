"""Headline figures of quality and recall."""

import pytest

from attn2mamba.report import quality
from attn2mamba.report.data import gather_run
from attn2mamba.report.document import run_document
from attn2mamba.report.quality import (
    kept_recall,
    measure_rows,
    perplexity_ratio,
    task_accuracy,
    unit_of,
    worse_generation,
)

from .made_up import make_bench, make_evaluation, make_run


def run_with(path, evaluation):
    run = gather_run(make_run(path, evaluation), "run")
    return run, measure_rows(run)


def test_perplexity_comes_from_text_first(tmp_path):
    evaluation = make_evaluation()
    lambada = evaluation["measures"].pop("lambada")
    for role, value in (("teacher", 5.0), ("student", 50.0)):
        lambada["figures"][role]["perplexity"] = {"value": value, "n": 100, "stderr": 1.0}
    evaluation["measures"] = {"lambada": lambada, **evaluation["measures"]}
    found = perplexity_ratio(*run_with(tmp_path / "run", evaluation))
    assert (found.value, found.note, found.n) == (pytest.approx(1.03), "wikitext2", 50)
    found = perplexity_ratio(*run_with(tmp_path / "none", None))
    assert (
        found.value == pytest.approx(1.2) and found.note == "the held-out part of the training data" and found.n == 60
    )


def test_accuracy_is_a_mean_of_tasks_with_its_paired_difference(tmp_path):
    run, rows = run_with(tmp_path / "run", make_evaluation(lost=0.1))
    kept, difference = task_accuracy(run, rows)
    assert kept.value == pytest.approx(0.45 / 0.55) and kept.n == 200  # acc_norm of piqa and lambada's accuracy
    assert difference["value"] == pytest.approx(-0.1)
    assert difference["stderr"] == pytest.approx(0.005 * 2**0.5 / 2) and difference["p"] < 1e-6
    assert difference["note"] == "piqa, lambada"
    kept, difference = task_accuracy(*run_with(tmp_path / "none", None))
    assert not kept.measured and difference is None and kept.command.endswith("none --tasks paper")


def test_one_task_has_one_p(tmp_path):
    """That of its own test, which the table shows."""
    evaluation = make_evaluation(lost=0.1)
    del evaluation["measures"]["piqa"]
    evaluation["measures"]["lambada"]["differences"]["student"]["accuracy"]["p"] = 0.227
    kept, difference = task_accuracy(*run_with(tmp_path / "run", evaluation))
    assert difference["p"] == 0.227 and kept.of == "items of lambada"


def test_a_perplexity_says_how_much_text_it_is_of(tmp_path):
    evaluation = make_evaluation()
    row = {"documents": 2, "windows": 8, "context": 1024, "tokens": 6950, "bytes": 1, "beyond_training": False}
    evaluation["measures"]["wikitext2"]["cells"] = {"teacher": [row], "student": [row]}
    found = perplexity_ratio(*run_with(tmp_path / "run", evaluation))
    assert (found.n, found.of) == (8, "windows of 1,024 tokens from 2 texts")
    assert found.stderr == pytest.approx(0.1 / 20.0)


def test_recall_is_judged_where_the_teacher_succeeds(tmp_path):
    run, _ = run_with(tmp_path / "run", make_evaluation(recall=0.25, lengths=(1024, 4096)))
    kept = kept_recall(run)
    needles = 0.9, 0.9 * 0.25  # over guessing, at 1k alone: at 4k the teacher guesses; each measure counts alike
    copied = 1 - 1 / 32, 0.25 - 1 / 32
    assert kept.value == pytest.approx((needles[1] + copied[1]) / (needles[0] + copied[0]))
    assert kept.n == 60 + 3 * 4 and kept.of == "contexts or strings of needle, copying"
    assert kept.note == "at 4 of 5 lengths and distances, where the teacher succeeds"
    whole = needles[0] + copied[0]
    weights = (1.0, 1 / 3, 1 / 3, 1 / 3)
    errors = [w * x for w in weights for x in (0.03, 0.03 * kept.value)]
    assert kept.stderr == pytest.approx(sum(e * e for e in errors) ** 0.5 / whole)


def test_recall_that_the_teacher_lacks_is_not_judged(tmp_path):
    evaluation = make_evaluation(lengths=(4096,))
    del evaluation["measures"]["copying"]
    kept = kept_recall(run_with(tmp_path / "run", evaluation)[0])
    assert not kept.measured and kept.note == "the teacher itself fails everywhere"


def test_generation_that_is_worse(tmp_path):
    _, rows = run_with(tmp_path / "run", make_evaluation())
    worse = [f"{row['measure']} {row['metric']}" for row in worse_generation(rows)]
    assert worse == ["lambada_generate exact_match", "repetition greedy_loop"]


@pytest.mark.parametrize(
    ("metric", "values", "unit"),
    [
        ("perplexity@1024", [12.0], "perplexity"),
        ("acc_norm", [0.5, 1.0], "share"),
        ("kl", [0.2], "number"),
        ("nll@64", [0.9], "number"),
        ("bits_per_byte", [0.8], "number"),
        ("greedy_tokens", [1.0], "number"),
        ("common_prefix", [31.0], "number"),
    ],
)
def test_units(metric, values, unit):
    assert unit_of(metric, values) == unit


def test_speed_headlines(tmp_path):
    bench = make_bench()
    found = run_document(gather_run(make_run(tmp_path / "run", None, bench), "run"))
    card = found["scorecard"]
    assert card["speed_cross_over"].value == 3000 and card["speed_cross_over"].note == "measured"
    assert card["speed_up_at_32k"].value == 7.0 and "reckoned" in card["speed_up_at_32k"].note
    assert card["memory_factor_at_32k"].value == pytest.approx(
        card["teacher_memory_at_32k"].value / card["memory_at_32k"].value
    )
    fp32 = found["speed"]["precisions"]["fp32"]
    assert len(fp32["rows"]) == 15 and fp32["skipped"][0]["role"] == "teacher"
    bench["precisions"]["fp32"]["scaling"][0]["decode_cross_over"] = {"tokens": None, "stderr": None, "measured": False}
    bench["precisions"]["fp32"]["scaling"][0]["speed_up_at_32k"] = None
    card = run_document(gather_run(make_run(tmp_path / "never", None, bench), "never"))["scorecard"]
    assert not card["speed_cross_over"].measured and "no length is given" in card["speed_cross_over"].note
    assert not card["speed_up_at_32k"].measured


@pytest.mark.parametrize(
    ("names", "counted"), [(["lambada"], ["lambada"]), (["lambada", "lambada_openai"], ["lambada_openai"])]
)
def test_the_same_passages_count_once(names, counted):
    metrics = {"lambada": "accuracy", "lambada_openai": "acc,none"}
    both = {"teacher": 0.4, "student": 0.3}
    rows = [
        {"measure": n, "metric": metrics[n], "kind": "likelihood", "values": both, "differences": {"student": {}}}
        for n in names
    ]
    assert [row["measure"] for row in quality._tasks(rows)] == counted
