"""`attn2mamba eval --tasks`: a run and its teacher side by side, kept, resumed, refused."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attn2mamba import convert
from attn2mamba.data import load_texts
from attn2mamba.errors import UserError
from attn2mamba.evaluate.command import Loading, load_subject, merged, model_paths, score_text
from attn2mamba.evaluate.corpora import Corpus
from attn2mamba.evaluate.measure import with_error


@pytest.fixture(autouse=True)
def in_an_empty_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, teacher_directory, corpus) -> str:
    """The tiny teacher after some steps on the corpus: far better than guessing."""
    tokenizer = AutoTokenizer.from_pretrained(teacher_directory)
    model = AutoModelForCausalLM.from_pretrained(teacher_directory)
    ids = tokenizer(" ".join(load_texts(corpus))).input_ids
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        batch = torch.tensor(ids[step * 256 : step * 256 + 256]).view(8, 32)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    path = tmp_path_factory.mktemp("trained") / "small"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, trained, randomise) -> str:
    """What a run leaves: recipe.yaml, hedgehog/, final/."""
    run = tmp_path_factory.mktemp("runs") / "run"
    for name, mixer in (("hedgehog", "hedgehog"), ("final", "hedgemamba")):
        student = convert(AutoModelForCausalLM.from_pretrained(trained), {"name": mixer})[0]
        randomise(student).save_pretrained(run / name)
        AutoTokenizer.from_pretrained(trained).save_pretrained(run / name)
    (run / "recipe.yaml").write_text(f"# attn2mamba distill --recipe demo --teacher {trained} --data x\nseed: 0\n")
    return str(run)


@pytest.fixture
def run(finished, tmp_path) -> str:
    shutil.copytree(finished, tmp_path / "run")
    return str(tmp_path / "run")


def words(run, corpus, *more):
    return ["eval", run, "--tasks", "data", "--data", corpus, "--context", 32, "--limit", 3, *more]


def test_a_run_beside_its_teacher(cli, run, trained, corpus, tmp_path, monkeypatch):
    command = words(run, corpus, "--output", "new/figures.json", "--also", f"again={run}")
    code, out, err = cli(*command)
    assert code == 0, err
    report = json.loads((tmp_path / "new" / "figures.json").read_text())
    assert report == json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert list(report["models"]) == ["teacher", "hedgehog", "student", "again"]
    assert {model["precision"] for model in report["models"].values()} == {"fp32"}
    assert report["gate"]["data"]["perplexity"]["value"] < 75
    measure = report["measures"]["data"]
    assert measure["command"] == report["command"] and str(corpus) in report["command"]
    subject = load_subject("student", f"{run}/final", Loading())
    own = Corpus("data", lambda: load_texts(corpus), "", 32, 3)
    expected = own.figures({unit: own.run(subject, unit) for unit in own.units(subject)})["perplexity"]
    found = measure["figures"]["student"]["perplexity"]
    assert found == {"value": pytest.approx(expected.value), "n": 3, "stderr": pytest.approx(expected.stderr)}
    assert measure["figures"]["again"] == measure["figures"]["student"]
    difference = measure["differences"]["student"]["perplexity"]
    teacher = measure["figures"]["teacher"]["perplexity"]["value"]
    assert difference["difference"] == pytest.approx(found["value"] - teacher)
    row = next(line for line in out.splitlines() if "data perplexity" in line)
    assert with_error(found["value"], found["stderr"]) in row and difference["verdict"] in row
    assert "bits_per_byte" not in out and "data bits_per_byte" not in err

    def never(*arguments):
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "run", never)
        assert cli(*command)[0] == 0
    assert json.loads((tmp_path / "new" / "figures.json").read_text()) == report


@pytest.mark.parametrize("starts", [False, True])
def test_another_tokenizer_is_not_compared_item_by_item(
    cli, run, trained, corpus, tmp_path, tiny_tokenizer, bos_tokenizer, starts
):
    """Texts become other tokens, so that n-th items are not the same; once an assertion, or a wrong pairing."""
    tokenizer = bos_tokenizer if starts else tiny_tokenizer.train_new_from_iterator(["zebras in zeppelins"] * 9, 290)
    model = AutoModelForCausalLM.from_pretrained(trained)
    model.resize_token_embeddings(310)
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(load_texts(corpus)))
    tasks = "data,positions,copying,associative,json"
    options = ("--tasks", tasks, "--data", text, "--context", 160, "--limit", 1, "--also", f"other={tmp_path}/other")
    code, out, err = cli("eval", run, *options, "--output", "figures.json")
    assert code == 0, err
    assert "other has another tokenizer" in out
    report = json.loads((tmp_path / "figures.json").read_text())
    assert [role for role, model in report["models"].items() if model["other_tokenizer"]] == ["other"]
    for name, measure in report["measures"].items():
        assert measure["figures"]["other"], name
        assert ("other" in measure["differences"]) == (name == "json")
        assert measure["differences"]["student"], name


def test_without_a_teacher(cli, trained, finished, corpus):
    code, out, err = cli(*words(trained, corpus, "--output", "figures.json"))
    assert code == 0, err
    assert "to teacher" not in out and "model" in out
    code, out, err = cli(*words(f"{finished}/final", corpus))
    assert code == 0 and "student" in out and "to teacher" not in out


def test_a_teacher_that_only_guesses_gives_no_table(cli, run, teacher_directory, corpus, tmp_path):
    code, out, err = cli(*words(run, corpus, "--teacher", teacher_directory, "--output", "figures.json"))
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert "the teacher's data cannot be right" in last and "hardly better than guessing" in last
    assert not (tmp_path / "figures.json").exists() and not (tmp_path / "run" / "evaluation.json").exists()


def test_a_stop_says_how_to_go_on(cli, run, corpus, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Corpus, "run", stop)
    code, _, err = cli(*words(run, corpus, "--seed", 5, "--fresh"))
    assert code == 130 and "Traceback" not in err
    last = err.splitlines()[-1]
    assert f"attn2mamba eval {run} --tasks data" in last and "--seed 5" in last
    assert "--fresh" not in last  # it would measure again what is kept


def test_a_student_that_is_no_number_gives_no_table(cli, run, corpus, tmp_path):
    path = tmp_path / "run" / "final"
    model = AutoModelForCausalLM.from_pretrained(path)
    model.get_output_embeddings().weight.data[3] = torch.nan
    model.save_pretrained(path)
    for options in (("--tasks", "json"), ("--tasks", "data"), ()):
        code, out, err = cli("eval", run, "--data", corpus, "--context", 32, *options)
        assert (code, out) == (2, "") and "logits are no numbers in fp32" in err.splitlines()[-1]


def test_names_are_not_markup(cli, run, trained, corpus):
    code, out, err = cli(*words(run, corpus, "--also", f"[/b]={trained}", "--also", f"[red]x={trained}"))
    assert code == 0, err
    assert "[/b]" in out and "[red]x" in out


def test_without_tasks_a_run_stands_beside_its_teacher(cli, run, trained, corpus):
    code, out, err = cli("eval", run, "--data", corpus, "--context", 32, "--max-tokens", 64)
    assert code == 0, err
    assert trained[:40] in out and "ratio to teacher" in out


MISTAKES = {
    "unknown": (["--tasks", "nedle"], "no task is called 'nedle'; did you mean 'needle'"),
    "nothing": (["--tasks", ","], "--tasks names nothing"),
    "no root": (["--tasks", "lambada", "--data-root", "nowhere"], "is no directory"),
    "empty root": (["--tasks", "lambada", "--data-root", "."], "EleutherAI/lambada_openai"),
    "no text": (["--tasks", "data", "--data", "nowhere.txt"], "no such file"),
    "empty text": (["--tasks", "data", "--data", "empty.txt"], "holds no text"),
    "above root": (["--tasks", "lambada", "--data-root", "above"], "give --data-root above/hub"),
    "context": (["--tasks", "data", "--context", "0"], "'--context'"),
    "also": (["--tasks", "data", "--also", "x"], "write NAME=DIR"),
    "taken": (["--tasks", "data", "--also", "student=x"], "with a NAME of its own"),
    "output": (["--tasks", "data", "--output", "run/recipe.yaml/a"], "cannot write"),
    "folder": (["--tasks", "data", "--output", "run"], "cannot write"),
    "max tokens": (["--tasks", "data", "--max-tokens", "5"], "goes without --tasks"),
    "limit": (["--limit", "5"], "goes with --tasks"),
    "fresh": (["--fresh"], "goes with --tasks"),
    "no such model": (["--tasks", "data", "--also", "x=./gone"], "no such file"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(cli, run, tmp_path, monkeypatch, mistake, corpus):
    more, complaint = MISTAKES[mistake]
    if mistake == "no such model":
        more = [*more, "--data", corpus, "--limit", 1, "--context", 16]
    if mistake == "unknown":
        monkeypatch.setattr("attn2mamba.evaluate.harness_tasks.is_installed", lambda: False)
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "above" / "hub" / "EleutherAI" / "lambada_openai").mkdir(parents=True)
    code, out, err = cli("eval", run, *more)
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("attn2mamba: ") and complaint in last
    assert mistake == "no such model" or err.count("\n") == 1
    assert not (tmp_path / "run" / "evaluation.json").exists()


def test_what_a_run_holds(finished, trained, tmp_path):
    assert model_paths(finished, None, ()) == {
        "teacher": trained, "hedgehog": f"{finished}/hedgehog", "student": f"{finished}/final"
    }  # fmt: skip
    assert model_paths(finished, "other", [f"b={finished}"])["teacher"] == "other"
    assert model_paths(finished, "other", [f"b={finished}"])["b"] == f"{finished}/final"
    (tmp_path / "final").mkdir()
    (tmp_path / "recipe.yaml").write_text("# attn2mamba distill --teacher 'a b' --base small --data x\n")
    assert model_paths(str(tmp_path), None, ()) == {
        "teacher": "a b", "base": "small", "student": str(tmp_path / "final")
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text("seed: 0\n")
    assert "teacher" not in model_paths(str(tmp_path), None, ())
    with pytest.raises(UserError, match="of its own"):
        model_paths(finished, None, [f"hedgehog={finished}"])


def test_a_runs_file_keeps_measures_of_the_same_models(tmp_path):
    path = tmp_path / "evaluation.json"
    one = {"format": 1, "models": {"student": {"fingerprint": "a"}}, "command": "1", "measures": {"x": 1, "y": 1}}
    two = {**one, "command": "2", "measures": {"y": 2, "z": 2}}
    assert merged(path, one) == one
    path.write_text(json.dumps(one))
    assert merged(path, two) == {**two, "measures": {"x": 1, "y": 2, "z": 2}}
    other = {**two, "models": {"student": {"fingerprint": "b"}}}
    assert merged(path, other) == other
    path.write_text("{")
    assert merged(path, two) == two


def test_precision_of_the_weights(trained, corpus):
    assert load_subject("x", trained, Loading("bf16")).precision == "bf16"
    assert load_subject("x", trained, Loading("bf16")).fingerprint != load_subject("x", trained, Loading()).fingerprint
    found = score_text([trained], [corpus], 16, 64, Loading("bf16"))
    assert found["precision"] == "bf16" and found["models"][trained]["tokens"] == 64
