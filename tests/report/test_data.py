"""Reading a run's directory, whole or not."""

import copy
import functools
import json
import random

import pytest

from attn2mamba.report.data import gather, gather_run, read_header
from attn2mamba.report.document import make_document
from attn2mamba.report.layers import layers
from attn2mamba.report.page import render
from attn2mamba.report.training import same_budget, training

from .made_up import RECIPE, make_bench, make_evaluation, make_run


def test_a_complete_run(tmp_path):
    run = gather_run(make_run(tmp_path / "run", make_evaluation(), make_bench()), "run")
    assert run.finished and not run.problems
    assert run.options == {"teacher": ["tiny-teacher"], "data": ["python-docs"]}
    assert run.distill_command.endswith("--teacher tiny-teacher --data python-docs --output NEW")
    assert set(run.measures) >= {"wikitext2", "needle"} and run.precision_of("student") == "fp32"
    assert run.config.mixer["name"] == "hedgemamba"


def test_broken_lines_and_files_are_told_of(tmp_path):
    path = make_run(tmp_path / "run", make_evaluation(), make_bench())
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": 1, "step": 4, "held_out_loss": NaN}\n[1]\n{"stage": 1, "st')
    (path / "evaluation.json").write_text('{"measures": ')
    (path / "bench.json").write_text("[]")
    (path / "final" / "config.json").write_text('{"model_type": "attn2mamba", "mixer": {"name": "other"}}')
    (path / "final" / "model.safetensors").write_bytes(b"no tensors")
    run = gather_run(path, "run")
    assert layers(run)["decay"] is None
    problems = " ".join(run.problems)
    assert "metrics.jsonl: 2 lines are broken" in problems
    for name in ("evaluation.json", "bench.json", "config.json", "model.safetensors"):
        assert name in problems
    assert run.entries[-1]["held_out_loss"] is None
    assert training(run)["stages"][1]["held_out"][-1]["loss"] == pytest.approx(0.75)


def test_files_of_another_version_are_left_out(tmp_path):
    run = gather_run(make_run(tmp_path / "run", {"format": 1, "measures": 3}, {"format": 0}), "run")
    assert not run.evaluation and not run.bench and len(run.problems) == 2


def test_names_tell_runs_apart(tmp_path):
    paths = [make_run(tmp_path / parent / "run") for parent in ("a", "b")]
    assert [run.name for run in gather(paths)] == [str(path) for path in paths]


def test_curves_are_counted_from_the_runs_start(tmp_path):
    stages = training(gather_run(make_run(tmp_path / "run"), "run"))["stages"]
    assert [p["tokens"] for p in stages[0]["training"]] == [32, 64, 96, 128]
    assert [p["tokens"] for p in stages[1]["held_out"]] == [128, 192, 256]
    assert stages[1]["training"][-1]["seconds"] == 16.0
    flops = [p["flops"] for stage in stages for p in stage["training"]]
    assert flops == sorted(flops) and flops[0] > 0


def test_the_clock_of_a_resumed_run_goes_on(tmp_path):
    path = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["stage"] == 0 and line.get("tokens", 0) > 64:  # stopped after step 2, at 4 s
            line["seconds"] -= 4.0
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stages = training(gather_run(path, "run"))["stages"]
    assert [p["seconds"] for p in stages[0]["training"]] == [2.0, 4.0, 6.0, 8.0]


def test_without_a_saved_model_there_are_no_flops(tmp_path):
    found = training(gather_run(make_run(tmp_path / "run", finished=False), "run"))
    assert found["stages"][0]["training"][0]["flops"] is None
    assert not found["cost"]["flops"].measured and found["cost"]["tokens"].value == 192


def test_runs_are_compared_at_the_data_that_all_have_seen(tmp_path):
    runs = gather([make_run(tmp_path / "long"), make_run(tmp_path / "short", finished=False)])
    same = same_budget(runs, [training(run) for run in runs])
    assert same["tokens"] == 192 and same["same_text"]
    assert {name: loss.value for name, loss in same["losses"].items()} == {"long": 1.5, "short": 1.5}
    other = make_run(tmp_path / "other")
    (other / "recipe.yaml").write_text(RECIPE.replace("python-docs", "elsewhere"))
    runs = gather([tmp_path / "long", other])
    assert not same_budget(runs, [training(run) for run in runs])["same_text"]
    assert same_budget(runs[:1], [training(runs[0])]) is None


def test_layers(tmp_path):
    found = layers(gather_run(make_run(tmp_path / "run"), "run"))
    assert found["transfer_loss"]["loss"] == [0.2, 0.1] and found["transfer_loss"]["layers"] == [0, 1]
    [one, never] = found["decay"]["half_life"][0]
    assert one == pytest.approx(69.3147, rel=1e-4) and never is None  # dt = 1, lambda = 0.01 and 0
    assert found["decay"]["never"] == 2 and found["decay"]["n"] == 4
    assert found["gate"]["at_rest"] == pytest.approx([1.0, 1.0], rel=1e-5)
    assert found["gate"]["reach"] == pytest.approx([0.01 * 32**0.5] * 2, rel=1e-5)
    assert layers(gather_run(make_run(tmp_path / "part", finished=False), "part"))["decay"] is None


@pytest.mark.parametrize("comment", ["# it's mine", "# attn2mamba distill --teacher 'a"])
def test_a_comment_is_no_command(comment):
    assert read_header(comment + "\nseed: 0\n") == {}


@pytest.mark.parametrize("name", ["evaluation.json", "bench.json", "figures.json"])
def test_nesting_without_end_is_no_json(tmp_path, name):
    path = make_run(tmp_path / "run", make_evaluation(), make_bench())
    (path / name).write_text("[" * 100_000)
    assert any(name in problem for problem in gather_run(path, "run").problems)


def places(value, path=()):
    """Paths to everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def damaged(content, draw):
    """A copy with one value lost or replaced, and where."""
    content = copy.deepcopy(content)
    path = draw.choice(list(places(content)))
    holder = functools.reduce(lambda x, key: x[key], path[:-1], content)
    value = draw.choice(["lost", None, "x", [], {}])
    if value == "lost" and isinstance(holder, dict):
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return content, path, value


@pytest.mark.parametrize("seed", range(60))
def test_no_damage_ends_in_a_traceback(tmp_path, seed):
    """What is damaged is left out and told of, or was not needed."""
    draw = random.Random(seed)
    evaluation, bench = make_evaluation(), make_bench()
    if seed % 2:
        evaluation, *where = damaged(evaluation, draw)
    else:
        bench, *where = damaged(bench, draw)
    path = make_run(tmp_path / "run", evaluation, bench)
    try:
        document = make_document([path])
        if seed % 10 < 2:
            render(document)
    except Exception as error:
        raise AssertionError(f"{where}: {gather_run(path, 'run').problems}") from error
