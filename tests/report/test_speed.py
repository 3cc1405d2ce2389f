"""Speed in the report: every figure says the n that it comes from."""

import pytest

from attn2mamba.report import write_report
from attn2mamba.report.data import gather_run
from attn2mamba.report.document import plain, run_document
from attn2mamba.report.speed_tables import disturbed, gains, precisions, speeds

from .made_up import bench_side, make_bench, make_run


def scored(path, bench) -> dict:
    return plain(run_document(gather_run(make_run(path, None, bench), "run")))


def with_32k(ratio: float) -> dict:
    """A benchmark whose speed-up at 32k was measured, in 3 repeats of the teacher and 4 of the student."""
    bench = make_bench(batches=(1,))
    part = bench["precisions"]["fp32"]
    row = {"batch": 1, "context": 32768, "teacher": bench_side(0.05 * ratio, 32768, 1, 10**9)}
    row["student"] = bench_side(0.05, 32768, 1, 10**7)
    row["teacher"]["repeats"], row["student"]["repeats"] = 3, 4
    part["cells"].append(row)
    part["scaling"][0]["speed_up_at_32k"] = {"ratio": ratio, "stderr": ratio / 100, "measured": True}
    return bench


def test_n_of_figures_from_lines_is_their_contexts(tmp_path):
    bench = make_bench()
    scaling = bench["precisions"]["fp32"]["scaling"][0]
    scaling["teacher"], scaling["student"] = (
        {**scaling[role], "points": n} for role, n in (("teacher", 3), ("student", 4))
    )
    scaling["prefill_cross_over"] = {"tokens": 2000.0, "student_faster": True}
    batch = scored(tmp_path / "run", bench)["speed"]["precisions"]["fp32"]["by_batch"][0]
    assert [(batch[k]["n"], batch[k]["of"]) for k in ("decode_cross_over", "speed_up_at_32k")] == [(3, "contexts")] * 2
    assert (batch["prefill_cross_over"]["n"], batch["prefill_cross_over"]["of"]) == (4, "contexts")


def test_n_of_a_measured_speed_up_is_its_repeats(tmp_path):
    number = scored(tmp_path / "run", with_32k(2.0))["scorecard"]["speed_up_at_32k"]
    assert (number["n"], number["of"], number["note"]) == (3, "repeats", "measured")


def test_a_speed_up_below_one_is_slower(tmp_path):
    for ratio, words in ((0.5, "2.000 ± 0.020 x slower"), (2.0, "2.000 ± 0.020 x")):
        table = precisions(scored(tmp_path / str(ratio), with_32k(ratio)))
        assert table.rows[0][-1].text == words
        assert table.rows[0][-2].note == "32,768 tokens, n = 4 repeats"


def test_other_work_is_told_once_at_the_head(tmp_path):
    bench = make_bench()
    assert disturbed([scored(tmp_path / "quiet", bench)]) == ""
    bench["precisions"]["fp32"]["cells"][0]["student"]["others_busy"] = 0.3
    bench["options"]["repeats"] = 6
    run = scored(tmp_path / "busy", bench)
    told = disturbed([run])
    assert told.startswith("Where n is below 6, ") and "up to 30 % of the CPUs in 1 of 15 rows" in told
    assert "Other work" not in speeds(run, "fp32").text
    assert disturbed([run, {**run, "name": "other", "speed": None}]).startswith("run: ")
    page = write_report([tmp_path / "busy"]).read_text()
    chapter = page[page.index("<h2>Speed and memory</h2>") :]
    assert page.count("Other work") == 1 and chapter.index("Other work") < chapter.index("<h3>")


def test_context_and_tokens_timed_are_told_apart(tmp_path):
    run = scored(tmp_path / "run", make_bench())
    table = speeds(run, "fp32")
    first, last = table.rows[0][0], table.rows[0][-1]
    assert (first.text, first.note, last.text, last.note) == ("context 16", "batch 1", "5 repeats", "320 tokens timed")
    assert "not one over the time per token" in table.text
    assert gains(run, "fp32").rows[0][0].text == "context 16"


@pytest.mark.parametrize("contexts", [(16,), (16, 512), (16, 512, 1024)])
def test_few_contexts_are_drawn(contexts, tmp_path):
    page = write_report([make_run(tmp_path / "run", None, make_bench(contexts, (1, 2)))]).read_text()
    assert "time to first token" in page and page.count("<svg") > 8
