"""What bench measures and says, with the models in this process; one test runs them in processes of their own."""

import json
import math
import random
import runpy
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console

from attn2mamba.bench import bench
from attn2mamba.benchmarking import cells, load, memory, side, speed, summary
from attn2mamba.benchmarking.cells import NEAR_ZERO, Options
from attn2mamba.benchmarking.memory import cache_bytes, tensor_bytes, weights_bytes, weights_read_bytes
from attn2mamba.benchmarking.speed import Session
from attn2mamba.benchmarking.statistics import (
    Line,
    crossing,
    fit_line,
    interpolated_crossing,
    percentile,
    spread,
)
from attn2mamba.benchmarking.text import print_bench
from attn2mamba.benchmarking.worker import Unfinished, Worker
from attn2mamba.convert import convert
from attn2mamba.errors import UserError
from attn2mamba.evaluate.generation import read_context
from attn2mamba.evaluate.results import Results
from attn2mamba.progress import Steps
from attn2mamba.sizes import cross_over, kv_bytes, state_bytes
from attn2mamba.teachers import load_teacher

MIXER = {"name": "hedgemamba", "window": 6}
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results.py"


class Local:
    """A session without a process; `opened` and `calls` tell what was asked for."""

    opened: list = []  # noqa: RUF012
    calls: list = []  # noqa: RUF012
    failing: dict = {}  # noqa: RUF012 (role-less) context -> exception of a repeat

    def __init__(self, *arguments):
        self.session, self.name = Session(*arguments), arguments[0]
        Local.opened.append(arguments)

    def call(self, method, *values, seconds=None):
        Local.calls.append((self.name, method, values))
        if method in ("warm_up", "repeat") and (self.name, values[0]) in Local.failing:
            raise Local.failing[self.name, values[0]]
        return getattr(self.session, method)(*values)

    def close(self):
        self.session = None


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(speed, "PROBE_FLOATS", 1024)
    monkeypatch.setattr(memory.gc, "collect", lambda: 0)  # a second on a heap full of test modules
    Local.opened, Local.calls, Local.failing = [], [], {}


@pytest.fixture(scope="module")
def student_directory(tmp_path_factory, teacher_directory, randomise) -> str:
    teacher = load_teacher(teacher_directory)
    path = tmp_path_factory.mktemp("students") / "final"
    randomise(convert(teacher.model, MIXER)[0]).save_pretrained(path)
    teacher.tokenizer.save_pretrained(path)
    return str(path)


OPTIONS = {"contexts": (24, 64), "new_tokens": 3, "repeats": 2, "quality_tokens": 0, "device": "cpu"}


@pytest.fixture
def run_bench(tmp_path, teacher_directory, student_directory):
    def run(model=student_directory, teacher=teacher_directory, **changes):
        results = Results(tmp_path / "results")
        options = Options(**{**OPTIONS, **changes})
        return bench(model, teacher, options, results, Steps(), "attn2mamba bench", open_worker=Local)

    return run


def repeats() -> list[tuple[str, int]]:
    return [(name, values[0]) for name, method, values in Local.calls if method == "repeat"]


def test_all_cells_with_exact_bytes(run_bench, student_directory, capsys):
    report = run_bench(batches=(1, 3), precisions=("fp32", "bf16"))
    config = load_teacher(student_directory).config
    for precision, element in (("fp32", 4), ("bf16", 2)):
        found = report["precisions"][precision]
        assert [(c["batch"], c["context"]) for c in found["cells"]] == [
            (b, c) for b in (1, 3) for c in (NEAR_ZERO, 24, 64)
        ]
        for cell in found["cells"]:
            length, batch = cell["context"] + 3, cell["batch"]
            assert cell["teacher"]["cache"]["bytes"] == batch * kv_bytes(config, length, element)
            assert cell["student"]["cache"]["bytes"] == batch * state_bytes(config, element)
            for role in ("teacher", "student"):
                figures = cell[role]
                assert figures["cache"]["ratio"] == 1 and figures["cache"]["tokens"] == length
                assert figures["repeats"] == 2 and figures["token_latency"]["n"] == 6 and figures["interleaved"]
                assert figures["token_latency"]["median"] <= figures["token_latency"]["p95"]
                assert figures["peak_bytes"] is None or figures["peak_bytes"] >= 0
        assert found["memory"]["cross_over"] == found["memory"]["measured_cross_over"] == cross_over(config, element)
        assert found["memory"]["ratios"] == [1.0]
        assert found["models"]["teacher"]["weights_bytes"] < found["models"]["student"]["weights_bytes"]
    json.dumps(report)
    print_bench(report, Console(width=150))
    out = capsys.readouterr().out
    assert "bf16, batch 3" in out and "student needs less memory from" in out


def test_models_take_turns(run_bench, teacher_directory, student_directory):
    run_bench(contexts=(NEAR_ZERO,))
    assert repeats() == [(teacher_directory, NEAR_ZERO), (student_directory, NEAR_ZERO)] * 2


def test_finished_cells_are_kept(run_bench):
    first = run_bench()
    done = len(repeats())
    again = run_bench()
    assert len(repeats()) == done and again["precisions"]["fp32"]["cells"] == first["precisions"]["fp32"]["cells"]
    run_bench(contexts=(24, 64, 96))
    assert {context for _, context in repeats()[done:]} == {96}
    count = len(repeats())
    run_bench(new_tokens=4)  # other options, other results
    assert len(repeats()) == 2 * count - 2 * 2


def test_a_cell_without_memory_is_named(run_bench, monkeypatch, capsys):
    needed = side.Side.step_bytes
    monkeypatch.setattr(
        side.Side,
        "step_bytes",
        lambda self, n, *rest: 2**60 if n > 24 and self.role == "teacher" else needed(self, n, *rest),
    )
    report = run_bench(contexts=(24, 64, 96))
    rows = {cell["context"]: cell for cell in report["precisions"]["fp32"]["cells"]}
    assert "needs about" in rows[64]["teacher"]["skipped"] and "free" in rows[64]["teacher"]["skipped"]
    assert rows[96]["teacher"]["skipped"].startswith("a shorter context was skipped: it needs")
    assert not rows[64]["student"]["interleaved"] and rows[24]["teacher"]["interleaved"]
    print_bench(report, Console(width=150))
    assert "Skipped: teacher, batch 1, 64 tokens: it needs about" in capsys.readouterr().out
    before = len(repeats())
    monkeypatch.setattr(side.Side, "step_bytes", needed)
    report = run_bench(contexts=(24, 64, 96))  # there is room by now: only the teacher's cells are run
    assert len(repeats()) == before + 2 * 2
    assert all("skipped" not in cell["teacher"] for cell in report["precisions"]["fp32"]["cells"])


def test_a_cell_without_time_is_named_and_kept_until_there_is_more(run_bench, teacher_directory):
    late = Unfinished("it took longer than 5 s (--max-seconds)")
    Local.failing = {(teacher_directory, 64): late}
    report = run_bench(max_seconds=5)
    assert report["precisions"]["fp32"]["cells"][2]["teacher"]["skipped"] == str(late)
    Local.calls = []
    run_bench(max_seconds=5)
    assert not repeats()
    Local.failing = {}
    report = run_bench(max_seconds=60)
    assert repeats() == [(teacher_directory, 64)] * 2
    assert "skipped" not in report["precisions"]["fp32"]["cells"][2]["teacher"]


class Clock:
    """A worker whose steps take as long as it is told."""

    def __init__(self, seconds: float):
        self.seconds, self.count = seconds, 0

    def call(self, method, *values, seconds=None):
        if method == "free_bytes":
            return 2**60
        self.count += method == "repeat"
        return {"first": self.seconds, "steps": [0.0], "others": 0.0, "cache_bytes": 1, "peak_bytes": 1}


@pytest.mark.parametrize(
    ("slow", "limit", "counts"), [(1, 100, (5, 5)), (10, 45, (3, 3)), (10, 15, (0, 5)), (10, 20, (1, 1))]
)
def test_repeats_stop_together_when_time_is_up(slow, limit, counts, teacher_directory, student_directory):
    workers = {"teacher": Clock(slow), "student": Clock(0.5)}
    sides = side.open_sides(student_directory, teacher_directory, False)
    runner = cells.CellRunner(sides, workers, "fp32", Options((8,), repeats=5, max_seconds=limit))
    result = runner.run(1, 8, {}, [])
    assert tuple(worker.count for worker in workers.values()) == counts
    assert [len(result[role].get("runs", [])) for role in workers] == list(counts)
    assert ("skipped" in result["teacher"]) == (counts[0] == 0)


def slow_runner(sides, workers, limit):
    return cells.CellRunner(sides, workers, "fp32", Options((8,), repeats=5, max_seconds=limit))


def test_a_cell_cut_short_is_measured_again_with_more_time_only(teacher_directory, student_directory):
    workers = {"teacher": Clock(10), "student": Clock(0.5)}
    sides = side.open_sides(student_directory, teacher_directory, False)
    short = slow_runner(sides, workers, 45).run(1, 8, {}, [])
    assert [(len(r["runs"]), r["max_seconds"]) for r in short.values()] == [(3, 45)] * 2
    assert not slow_runner(sides, workers, 45).unfinished(short)
    assert not slow_runner(sides, workers, 30).unfinished(short)
    more = slow_runner(sides, workers, 100)
    assert more.unfinished(short) == ["teacher", "student"]
    whole = more.run(1, 8, short, [])
    assert [len(r["runs"]) for r in whole.values()] == [5, 5] and not any("max_seconds" in r for r in whole.values())
    assert not slow_runner(sides, workers, 1000).unfinished(whole)


def test_repeats_are_not_lost_to_a_busier_machine(teacher_directory, student_directory):
    sides = side.open_sides(student_directory, teacher_directory, False)
    short = slow_runner(sides, {"teacher": Clock(10), "student": Clock(0.5)}, 45).run(1, 8, {}, [])
    for seconds in (40, 70):  # one repeat fits, or none
        busy = slow_runner(sides, {"teacher": Clock(seconds), "student": Clock(0.5)}, 100)
        kept = busy.run(1, 8, short, [])["teacher"]
        assert kept == {**short["teacher"], "max_seconds": 100}


def test_repeats_that_were_run_are_what_is_said(run_bench, capsys):
    report = run_bench(contexts=(24,))
    near, row = report["precisions"]["fp32"]["cells"]
    for figures in (near["teacher"], near["student"], row["teacher"], row["student"]):
        figures["others_busy"] = None
    row["teacher"]["repeats"], row["student"]["others_busy"] = 1, 0.4
    print_bench(report, Console(width=150))
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if "teacher" in line or "student" in line]
    counts = [line.rstrip(" │").rpartition("│")[2].strip() for line in lines if line.startswith("│")]
    assert counts == ["2", "2", "1", "2"] and "2 repeats" not in out
    assert "Where n is below 2" in out and "Other work took up to 40 % of the CPUs in 1 of 4 rows" in out
    table = "\n".join(runpy.run_path(str(RESULTS))["speed"](report))
    assert "| fp32, n = 2 | 1 | 16 |" in table and "| fp32, n = 1 / 2 | 1 | 24 |" in table
    assert "* fp32: Other work took up to 40 %" in table


def test_what_changes_speed_is_in_the_key(run_bench, monkeypatch):
    run_bench(contexts=(24,))
    count = len(repeats())
    for change in (
        lambda m: m.setattr(side.transformers, "__version__", "0"),
        lambda m: m.setattr(side, "_version", lambda package: "0"),
        lambda m: m.setattr(torch, "get_num_threads", lambda: 99),
        lambda m: m.setattr("attn2mamba.bench.__version__", "0"),
        lambda m: m.setattr(Session, "describe", _eager(Session.describe)),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            Local.calls = []
            run_bench(contexts=(24,))
            assert len(repeats()) == count
    Local.calls = []
    run_bench(contexts=(24,))
    assert not repeats()


def _eager(describe):
    return lambda self: {**describe(self), "attention": "another"}


def test_perplexities_are_kept_by_model_and_data(run_bench, corpus, teacher_directory, tmp_path):
    def scored(model=None, **changes):
        Local.calls = []
        given = {"contexts": (NEAR_ZERO,), "quality_tokens": 100, "data": str(text), **changes}
        report = run_bench(**given) if model is None else run_bench(model, None, **given)
        figures = report["precisions"]["fp32"]["quality"]["models"]
        return [name for name, method, _ in Local.calls if method == "quality"], figures

    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat " * 40)
    names, first = scored()
    assert len(names) == 2 and scored() == ([], first)
    assert scored(teacher_directory) == ([], {"teacher": first["teacher"]})
    names, _ = scored(state="bf16")  # a teacher has no state
    assert len(names) == 1 and teacher_directory not in names
    assert len(scored(quality_tokens=90)[0]) == 2
    text.write_text("the dog sat on the log " * 40)
    names, other = scored()
    assert len(names) == 2 and other["teacher"]["perplexity"] != first["teacher"]["perplexity"]


def test_a_memory_cross_over_that_is_not_computed_is_not_never(run_bench, capsys):
    print_bench(run_bench(state="bf16"), Console(width=150))
    assert "needs less memory from never" not in capsys.readouterr().out


def test_other_work_on_the_machine_is_seen(monkeypatch):
    clock = {"all": 100.0, "wall": 10.0, "own": 5.0}
    monkeypatch.setattr(load, "_busy_seconds", lambda: clock["all"])
    monkeypatch.setattr(load.time, "perf_counter", lambda: clock["wall"])
    monkeypatch.setattr(load.time, "process_time", lambda: clock["own"])
    monkeypatch.setattr(load.os, "cpu_count", lambda: 2)
    seen = load.Load()
    clock |= {"all": 117.0, "wall": 20.0, "own": 14.0}  # 17 s of work in 10 s on 2 CPUs, 9 of them its own
    assert seen.others() == 0.4
    clock["wall"] = 10.1
    assert seen.others() is None


def test_one_model_alone(run_bench, teacher_directory, student_directory, capsys):
    for model, role in ((teacher_directory, "teacher"), (student_directory, "student")):
        report = run_bench(model, None)
        found = report["precisions"]["fp32"]
        assert list(found["models"]) == [role] and "cross_over" not in found["memory"]
        print_bench(report, Console(width=150))
        assert f"{role}: " in capsys.readouterr().out


def test_a_lowered_state_and_quality(run_bench, corpus):
    report = run_bench(contexts=(24,), precisions=("fp32", "int8"), state="bf16", data=corpus, quality_tokens=100)
    for precision in ("fp32", "int8"):
        found = report["precisions"][precision]
        assert {row["student"]["cache"]["ratio"] for row in found["cells"]} == {1.0}
        assert all(score["tokens"] == 100 for score in found["quality"]["models"].values())
    assert [arguments[3] for arguments in Local.opened] == ["fp32", "bf16"] * 2
    exact, rounded = (report["precisions"][p]["quality"]["models"]["teacher"]["perplexity"] for p in ("fp32", "int8"))
    assert rounded != exact and rounded == pytest.approx(exact, rel=0.1)
    print_bench(report, Console(width=150))


def test_beyond_the_training_length(run_bench, teacher_directory, tmp_path):
    model = load_teacher(teacher_directory)
    model.model.config.max_position_embeddings = 40
    model.model.save_pretrained(tmp_path / "short")
    model.tokenizer.save_pretrained(tmp_path / "short")
    rows = run_bench(str(tmp_path / "short"), None)["precisions"]["fp32"]["cells"]
    assert [row["teacher"]["beyond_training_length"] for row in rows] == [False, False, True]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_cache_bytes_are_those_of_storages(tiny_teacher, family):
    teacher = tiny_teacher(family)
    decode = read_context(teacher, 20, batch=2)
    decode()
    config = convert(teacher)[0].config
    expected = 2 * kv_bytes(config, 21)
    if family == "gemma3_text":  # a sliding window of 8 is a view of 7 of its 8 tokens
        expected += 2 * 2 * 2 * (16 + 16) * 4
    assert 0 <= cache_bytes(decode.cache) - expected <= 2 * 8  # its layers may count tokens in a tensor


def test_bytes_count_a_storage_once_and_whole():
    x = torch.zeros(10)
    assert tensor_bytes([x, x[:2], x.view(5, 2)]) == 40


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_a_token_reads(tiny_teacher, tied):
    model = tiny_teacher("llama", tie_word_embeddings=tied)
    table = 0 if tied else 50 * 32 * 4
    assert weights_read_bytes(model) == weights_bytes(model) - table


def test_a_peak_is_seen():
    peak = memory.Peak("cpu")
    x = torch.ones(2**24)
    del x
    found = peak.bytes()
    if found is not None:  # Linux only
        assert 0.9 * 2**26 < found < 1.5 * 2**26


def test_lines_with_noise_meet_where_they_should():
    draw = random.Random(0)
    xs = [n for n in (16, 1024, 4096, 16384) for _ in range(5)]
    teacher = fit_line([(x, 10 + 0.004 * x + draw.gauss(0, 0.5)) for x in xs])
    student = fit_line([(x, 30 + draw.gauss(0, 0.5)) for x in xs])
    tokens, error = crossing(teacher, student)
    assert 30 < error < 200 and abs(tokens - 5000) < 3 * error
    assert abs(student.slope) < 3 * student.slope_stderr
    assert abs(teacher.intercept - 10) < 3 * teacher.intercept_stderr


def test_the_error_of_a_crossing_is_that_of_repeated_draws():
    draw, xs, found = random.Random(1), (0, 100, 200, 300) * 3, []
    for _ in range(400):
        lines = [fit_line([(x, a + b * x + draw.gauss(0, 1)) for x in xs]) for a, b in ((0, 0.1), (12, 0.02))]
        found.append(crossing(*lines))
    tokens, errors = zip(*found, strict=True)
    centre = sum(tokens) / len(tokens)
    deviation = math.sqrt(sum((x - centre) ** 2 for x in tokens) / len(tokens))
    assert sum(errors) / len(errors) == pytest.approx(deviation, rel=0.15)


def test_lines_that_do_not_clearly_meet():
    noisy = Line(10, 0.001, 1.0, 0.001, 100, 9)
    assert crossing(noisy, Line(20, 0.0, 1.0, 0.001, 100, 9)) == (None, None)
    assert crossing(Line(10, 0.0, 0.1, 0.0, 1, 9), Line(5, 0.1, 0.1, 0.0, 1, 9)) == (None, None)
    assert crossing(Line(10, 0.1, None, None, 1, 2), Line(5, 0.0, None, None, 1, 2)) == (0, None)
    assert fit_line([(1, 2), (1, 3)]) is None
    assert fit_line([(0, 1), (2, 5)]) == Line(1, 2, None, None, 1, 2)


def test_curves_meet_between_points_only():
    teacher = [(100, 1.0), (200, 4.0), (400, 16.0)]
    assert interpolated_crossing(teacher, [(100, 2.0), (200, 4.0), (400, 8.0)]) == pytest.approx(200)
    assert interpolated_crossing(teacher, [(100, 3.0), (200, 6.0), (400, 12.0)]) == pytest.approx(200 * 2 ** (
        math.log(1.5) / (math.log(1.5) + math.log(4 / 3))))  # fmt: skip
    assert interpolated_crossing(teacher, [(100, 3.0), (200, 6.0), (400, 17.0)]) is None
    assert interpolated_crossing(teacher, [(100, 0.5), (200, 1.0), (400, 2.0)]) is None


def test_spread():
    assert spread([3.0]) == {"median": 3.0, "quartiles": [None, None], "n": 1}
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median": 3.0, "quartiles": [2.0, 4.0], "n": 5}
    assert [percentile(list(range(1, 101)), p) for p in (0.95, 0.5, 0.0, 1.0)] == [95, 50, 1, 100]


def cell(context: int, teacher: float, student: float) -> dict:
    def figures(seconds):
        values = {
            "token_latency": spread([seconds] * 3),
            "latency_by_repeat": [seconds * 0.999, seconds, seconds * 1.001],
            "interleaved": True,
        }
        return values | {"cache": {"tokens": context}, "time_to_first_token": spread([seconds * context])}

    return {"batch": 1, "context": context, "teacher": figures(teacher), "student": figures(student)}


def test_the_gain_is_split():
    rows = [cell(n, 0.010 + n * 1e-6, 0.014) for n in (1, 1000, 2000, 10000)]
    models = {role: {"weights_read_bytes": 5e8} for role in ("teacher", "student")}
    found = summary.scaling(1, rows, models, bandwidth=1e11)
    assert (
        found["decode_cross_over"]["tokens"] == pytest.approx(4000, rel=0.02) and found["decode_cross_over"]["measured"]
    )
    last = found["gain"][-1]
    assert last == pytest.approx({"context": 10000, "seconds": 0.006, "fixed": -0.004, "from_state": 0.010}, 1e-3)
    assert found["teacher"]["slope_per_1k"] == pytest.approx(1024e-6, rel=0.02)
    assert found["teacher"]["weights_seconds"] == 0.005
    assert found["teacher"]["overhead_seconds"] == pytest.approx(0.005, rel=0.02)
    assert found["speed_up_at_32k"]["ratio"] == pytest.approx((10 + 32.768) / 14, rel=0.02)
    assert not found["speed_up_at_32k"]["measured"] and not found["drifted"]
    found = summary.scaling(1, [*rows, cell(summary.LONG, 0.05, 0.01)], models, bandwidth=1e11)
    assert found["speed_up_at_32k"] == pytest.approx({"ratio": 5, "stderr": 0, "measured": True})


def test_the_spread_of_a_measured_speed_up_is_that_of_rounds():
    row = cell(summary.LONG, 0.05, 0.01)
    row["teacher"]["latency_by_repeat"] = [0.04, 0.12, 0.06]
    row["student"]["latency_by_repeat"] = [0.01, 0.02, 0.01]  # ratios 4, 6, 6: the second round was slow for both
    models = {role: {"weights_read_bytes": 5e8} for role in ("teacher", "student")}

    def error():
        return summary.scaling(1, [row], models, bandwidth=1e11)["speed_up_at_32k"]["stderr"]

    assert error() == pytest.approx(2 / 3)
    row["student"]["interleaved"] = False  # run at another time: rounds are no pairs
    assert error() is None
    row["student"]["interleaved"] = True
    for role in ("teacher", "student"):
        row[role]["latency_by_repeat"] = row[role]["latency_by_repeat"][:1]
    assert error() is None


def test_a_machine_that_drifted_says_nothing_of_lines(capsys):
    rows = [cell(n, 0.010 + n * 1e-6, 0.02 - n * 1e-6) for n in (16, 1000, 2000, 4000)]
    models = {role: {"weights_read_bytes": 5e8} for role in ("teacher", "student")}
    found = summary.scaling(1, rows, models, bandwidth=1e11)
    assert found["drifted"] and found["decode_cross_over"]["tokens"] is None and found["speed_up_at_32k"] is None
    assert found["student"]["slope_per_1k"] < 0


def test_no_speed_up_is_reckoned_from_noise():
    rows = [cell(n, 0.010 + noise, 0.014) for n, noise in ((16, 0.0), (64, 0.003), (256, -0.002))]
    models = {role: {"weights_read_bytes": 5e8} for role in ("teacher", "student")}
    assert summary.scaling(1, rows, models, bandwidth=1e11)["speed_up_at_32k"] is None


MISTAKES = [
    (["--dtype", "int3"], "precision 'int3' is unknown"),
    (["--batch", "0"], "--batch 0: '0' is not a count above 0"),
    (["--context", "1k,x"], "--context 1k,x: 'x' is not a count"),
    (["--device", "cuda"], "device 'cuda' is not available here"),
    (["--data", "nowhere.txt"], "nowhere.txt"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[m[0][1] for m in MISTAKES])
def test_mistakes_are_one_line(cli, teacher_directory, words, message, tmp_path):
    code, out, err = cli("bench", teacher_directory, *words, "--output", tmp_path / "b.json")
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err
    assert not (tmp_path / "b.json").exists()


def test_models_that_do_not_go_together(cli, teacher_directory, student_directory):
    assert "leave --teacher out" in cli("bench", teacher_directory, "--teacher", teacher_directory)[2]
    assert "is a converted model" in cli("bench", student_directory, "--teacher", student_directory)[2]


def test_a_context_beyond_learned_positions(cli, tiny_teacher, tiny_tokenizer, tmp_path):
    tiny_teacher("gpt2").save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    code, _, err = cli("bench", tmp_path, "--context", "2k", "--new-tokens", "1")
    assert code == 2 and "positions for 2048 tokens, not 2049" in err


def test_models_that_do_not_fit(cli, teacher_directory, monkeypatch):
    monkeypatch.setattr(side, "free_bytes", lambda device: 1000)
    code, _, err = cli("bench", teacher_directory)
    assert code == 2 and "1000 B of cpu memory are free; choose a smaller --dtype" in err


@pytest.mark.slow
def test_in_processes_of_their_own(cli, teacher_directory, student_directory, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "final").symlink_to(student_directory)
    (run / "recipe.yaml").write_text(f"# attn2mamba distill --recipe recipe.yaml --teacher {teacher_directory}\n")
    words = [run, "--context", "32", "--new-tokens", "2", "--repeats", "1", "--quality-tokens", "0", "--device", "cpu"]
    code, _, err = cli("bench", *words)
    assert code == 0 and "Traceback" not in err
    report = json.loads((run / "bench.json").read_text())
    assert [set(c) for c in report["precisions"]["fp32"]["cells"]] == [{"batch", "context", "teacher", "student"}] * 2
    assert report["command"].startswith("attn2mamba bench")


@pytest.mark.slow
def test_a_worker_that_is_late_or_lost(teacher_directory):
    worker = Worker(teacher_directory, "fp32", "cpu", "fp32", False)
    try:
        assert worker.call("describe")["parameters"] > 0
        with pytest.raises(Unfinished, match="longer than 0 s"):
            worker.call("repeat", 64, 1, 10_000, 50, seconds=0.01)
        assert worker.call("free_bytes") > 0  # started anew
        worker.process.kill()
        with pytest.raises(Unfinished, match="was killed"):
            worker.call("describe")
        with pytest.raises(UserError, match="no file"):
            Worker("nowhere-at-all", "fp32", "cpu", "fp32", False).call("describe")
    finally:
        worker.close()


def test_a_worker_ends_with_its_parent(teacher_directory, tmp_path):
    """A step of minutes, with its model in memory, once outlived a benchmark that was killed."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys\n"
        "from attn2mamba.benchmarking.worker import Worker\n"
        "if __name__ == '__main__':\n"
        "    worker = Worker(sys.argv[1], 'fp32', 'cpu', 'fp32', False)\n"
        "    worker.call('free_bytes')\n"
        "    print(worker.process.pid, flush=True)\n"
        "    worker.call('repeat', 64, 1, 10_000_000, 50)\n"
    )
    parent = subprocess.Popen([sys.executable, script, teacher_directory], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    child.wait(timeout=20)


def test_perplexity_of_models_of_few_positions(tmp_path, tiny_teacher, tiny_tokenizer, corpus, cli):
    """The windows of 1,024 tokens once ended in a traceback after all cells were measured."""
    model = tiny_teacher("gpt2", vocab_size=len(tiny_tokenizer), n_positions=128)
    model.save_pretrained(tmp_path / "short")
    tiny_tokenizer.save_pretrained(tmp_path / "short")
    words = ("--context", 16, "--new-tokens", 2, "--repeats", 1, "--quality-tokens", 200, "--data", corpus)
    code, _, err = cli("bench", tmp_path / "short", *words, "--output", tmp_path / "figures.json")
    assert code == 0, err
    quality = json.loads((tmp_path / "figures.json").read_text())["precisions"]["fp32"]["quality"]
    assert quality["context"] == 128 and quality["models"]["teacher"]["tokens"] == 200
