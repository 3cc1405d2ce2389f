"""The command line: a whole conversion, and what every mistake says."""

import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import attn2mamba_cli
from attn2mamba import plan
from attn2mamba.data import load_texts
from attn2mamba.evaluate import command
from attn2mamba.evaluate.perplexity import text_perplexity
from attn2mamba.teachers import load_teacher

RECIPE = """
sequence_length: 16
batch_size: 2
checkpoints: {every: 64}
evaluate: {every: 64, tokens: 64}
stages:
  - {kind: transfer, tokens: 128, lr: 1e-2}
  - {kind: finetune, mixer: {name: hedgemamba, window: 0}, tokens: 128, lr: 1e-3}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "tiny.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, with a home and a token store of its own to see what is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*"))


def test_a_teacher_that_only_guesses_is_not_compared_with(cli, here, teacher_directory, corpus):
    words = [teacher_directory, "--teacher", teacher_directory, "--data", corpus, "--context", 32, "--max-tokens", 64]
    code, out, err = cli("eval", *words)
    assert (code, out) == (2, "") and "cannot be right" in err and "no model was compared with it" in err


def test_from_a_teacher_to_an_answer(cli, here, recipe, teacher_directory, corpus, monkeypatch):
    monkeypatch.setattr(command, "hardly_better", lambda *_: None)  # the teacher is random
    distill = ["distill", "--recipe", recipe, "--teacher", teacher_directory, "--data", corpus, "--output", "run"]
    code, out, err = cli(*distill)
    assert code == 0
    assert "Scorecard: A HedgeMamba model" in out and "attn2mamba generate run/final" in out
    assert "Traceback" not in err and "it/s" not in err and "stage 2 of 2 (finetune)" in err
    card = json.loads((here / "run" / "scorecard.json").read_text())
    assert set(card["perplexity"]) == {"teacher", "hedgehog", "student"}
    assert card["memory_bytes"]["1024"]["student"] == card["memory_bytes"]["65536"]["student"]

    code, out, err = cli("eval", "run", "--teacher", teacher_directory, "--data", corpus, "--context", 32,
                         "--max-tokens", 100, "--output", "new/figures.json")  # fmt: skip
    assert code == 0, err
    figures = json.loads((here / "new" / "figures.json").read_text())
    for name, path in {"run": "run/final", teacher_directory: teacher_directory}.items():
        model = load_teacher(path)
        expected = text_perplexity(model.model, model.tokenizer, load_texts(corpus), 32, 100)
        assert figures["models"][name] == expected.to_dict()
        assert f"{expected.per_token:.2f}" in out
    assert figures["models"]["run"]["tokens"] == 100

    for prompt in ("the cat", ""):
        code, out, err = cli("generate", "run", "--prompt", prompt, "--max-new-tokens", 5)
        assert (code, err) == (0, "") and out.startswith(prompt) and out.endswith("\n")
    sampled = [cli("generate", "run", "--prompt", "a", "--temperature", 1, "--seed", s)[1] for s in (0, 0, 1)]
    assert sampled[0] == sampled[1] != sampled[2]

    assert cli(*distill)[0] == 2
    code, out, err = cli(*distill, "--resume")
    assert code == 0 and "finished already" in err and "Scorecard" in out


@pytest.fixture
def larger(here, teacher_directory) -> str:
    """Another teacher with the same tokenizer: wider, deeper, with padding rows."""
    config = AutoConfig.from_pretrained(teacher_directory)
    config.update({"hidden_size": 48, "num_hidden_layers": 3, "vocab_size": config.vocab_size + 11, "head_dim": 12})
    AutoModelForCausalLM.from_config(config).save_pretrained("larger")
    AutoTokenizer.from_pretrained(teacher_directory).save_pretrained("larger")
    return "larger"


LOSS = "stages.1.loss={kl: 0.5, hidden: 0.5}"


def test_a_base_that_learns_from_another_teacher(cli, here, recipe, larger, teacher_directory, corpus, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(plan, "TIMED_SECONDS", 0)
    words = ["distill", "--recipe", recipe, "--teacher", larger, "--base", teacher_directory, "--data", corpus]
    code, out, err = cli(*words, "--dry-run", "--set", LOSS)
    assert code == 0, err
    assert f"{2 * (32 * 48 + 48):,}" in next(line for line in out.splitlines() if "in projectors" in line)
    code, out, err = cli(*words, "--output", "run", "--set", LOSS)
    assert code == 0, err
    header = next(line for line in out.splitlines() if "student" in line and "teacher" in line and "base" in line)
    assert header.index("teacher") < header.index("base") < header.index("student")
    assert "needs less memory than the base" in out
    card = json.loads((here / "run" / "scorecard.json").read_text())
    assert set(card["perplexity"]) == {"teacher", "base", "hedgehog", "student"}
    assert set(card["continuation"]) == {"teacher", "base", "student"}
    assert set(card["memory_bytes"]["1024"]) == {"base", "student"}
    student = load_teacher("run/final")
    assert student.config.hidden_size == 32 and not any("projector" in name for name in student.model.state_dict())
    for more in ([], ["--dry-run"]):
        code, _, err = cli(*words, "--output", "new", *more)
        assert code == 2 and "no stage weighs loss kl or hidden" in err.splitlines()[-1]
    code, _, err = cli(*words[:-4], "--base", "gone", "--data", corpus, "--output", "new", "--set", LOSS)
    assert code == 2 and "gone" in err.splitlines()[-1] and not (here / "new").exists()


def test_inspect(cli, teacher_directory):
    code, out, err = cli("inspect", teacher_directory)
    assert (code, err) == (0, "") and "2 attention layers would be converted" in out
    found = json.loads(cli("inspect", teacher_directory, "--json")[1])
    assert (found["family"], found["layers"]) == ("llama", 2)


def test_recipes(cli):
    code, out, _ = cli("recipes")
    names = [line.split()[0] for line in out.splitlines()]
    assert code == 0 and {"default", "paper", "demo"} <= set(names)
    assert all(cli("recipes", name)[1].startswith("# attn2mamba distill --recipe") for name in names)


@pytest.mark.parametrize("window", [0, 8])
def test_a_dry_run_prints_a_plan_and_writes_nothing(cli, here, recipe, teacher_directory, corpus, monkeypatch, window):
    monkeypatch.setattr(plan, "TIMED_SECONDS", 0)
    monkeypatch.setenv("ATTN2MAMBA_CACHE", str(here / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    words = ["--recipe", recipe, "--teacher", teacher_directory, "--data", corpus, "--output", "run", "--dry-run"]
    changes = ["--set", f"stages.0.mixer.window={window}", "--set", f"stages.1.mixer.window={window}"]
    code, out, err = cli("distill", *words, *changes)
    assert code == 0, err
    assert "transfer" in out and "finetune" in out and "128" in out and "seconds" in out
    assert all(name.startswith("cache") for name in files(here))  # the token store, which the run will use


MISTAKES = {
    "no teacher": (["--data", "corpus"], "Missing option '--teacher'"),
    "no data": (["--teacher", "teacher"], "Missing option '--data'"),
    "no output": (["--teacher", "teacher", "--data", "corpus"], "give a directory for the run"),
    "unknown option": (["--techer", "x"], "No such option"),
    "unknown teacher": (["--teacher", "nobody/nothing", "--data", "corpus"], "check the name and the network"),
    "no such teacher": (["--teacher", "./nowhere", "--data", "corpus"], "no such file or directory"),
    "no such data": (["--teacher", "teacher", "--data", "nowhere.txt"], "no such file or directory"),
    "empty data": (["--teacher", "teacher", "--data", "empty.txt"], "holds no text"),
    "short data": (["--teacher", "teacher", "--data", "short.txt"], "has 2 tokens; sequence_length 16 needs"),
    "bad weight": (["--teacher", "teacher", "--data", "corpus=-1"], "must be a number above 0"),
    "bad override": (["--teacher", "teacher", "--data", "corpus", "--set", "seed"], "must read key=value"),
    "unknown key": (["--teacher", "teacher", "--data", "corpus", "--set", "sed=1"], "did you mean 'seed'?"),
    "impossible": (["--teacher", "teacher", "--data", "corpus", "--set", "batch_size=0"], "greater than or equal"),
    "unknown recipe": (["--teacher", "teacher", "--data", "corpus", "--recipe", "papr"], "did you mean 'paper'?"),
    "freeze": (["--teacher", "teacher", "--data", "corpus", "--set", "stages.1.freeze=[x.y]"], "'x.y' matches no"),
    "in use": (["--teacher", "teacher", "--data", "corpus", "--output", "used"], "used is in use"),
    "not a run": (["--teacher", "teacher", "--data", "corpus", "--output", "used", "--resume"], "is not a run"),
    "a file": (["--teacher", "teacher", "--data", "corpus", "--output", "empty.txt"], "empty.txt is a file"),
    "below a file": (["--teacher", "teacher", "--data", "corpus", "--output", "empty.txt/a"], "cannot write"),
}


OF_THE_OUTPUT = ("no output", "in use", "not a run", "a file", "below a file")


@pytest.mark.parametrize(
    ("mistake", "dry"), [(m, dry) for m in MISTAKES for dry in (False, True) if not (dry and m in OF_THE_OUTPUT)]
)
def test_mistakes_are_one_line(cli, here, recipe, teacher_directory, corpus, mistake, dry):
    arguments, complaint = MISTAKES[mistake]
    (here / "empty.txt").write_text(" \n")
    (here / "short.txt").write_text("at")
    (here / "used").mkdir()
    (here / "used" / "thesis.tex").write_text("mine")
    before = files(here)
    names = {"teacher": teacher_directory, "corpus": corpus, "corpus=-1": f"{corpus}=-1"}
    words = ["distill", "--recipe", recipe, *(names.get(word, word) for word in arguments)]
    if "--output" not in words and mistake != "no output":
        words += ["--output", "run"]
    code, out, err = cli(*words, *(["--dry-run"] if dry else []))
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert lines[-1].startswith("attn2mamba: ") and complaint in lines[-1]
    assert all(line.startswith(("loading ", "tokenising ", "timing ")) for line in lines[:-1])
    assert files(here) == before


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["eval", "./nowhere"], "no such file or directory"),
        (["eval", "teacher", "--data", "nowhere.txt"], "no such file or directory"),
        (["eval", "teacher", "--data", "empty.txt"], "holds no text"),
        (["eval", "teacher", "--data", "short.txt", "--output", "empty.txt/a.json"], "cannot write"),
        (["eval", "teacher", "--context", "0"], "'--context'"),
        (["generate", "./nowhere", "--prompt", "a"], "no such file or directory"),
        (["generate", "teacher"], "Missing option '--prompt'"),
        (["inspect", "."], "has no config.json"),
        (["recipes", "papr"], "did you mean 'paper'?"),
        (["distil"], "Did you mean 'distill'?"),
    ],
)
def test_mistakes_of_the_other_commands(cli, here, teacher_directory, words, complaint):
    (here / "empty.txt").write_text("")
    (here / "short.txt").write_text("at")
    before = files(here)
    code, _, err = cli(*(teacher_directory if word == "teacher" else word for word in words))
    assert code == 2
    assert err.startswith("attn2mamba: ") and err.count("\n") == 1 and complaint in err
    assert files(here) == before


def test_weights_in_pickles_other_types_and_places(cli, here, recipe, teacher_directory, corpus):
    shutil.copytree(teacher_directory, here / "old")
    weights = load_file(here / "old" / "model.safetensors")
    torch.save(weights, here / "old" / "pytorch_model.bin")
    (here / "old" / "model.safetensors").unlink()
    score = ["eval", "old", "--data", corpus, "--context", 16, "--max-tokens", 64, "--output", "figures.json"]
    generate = ["generate", "old", "--prompt", "the cat", "--max-new-tokens", 2]
    for words in (score, generate):
        code, _, err = cli(*words)
        assert code == 2 and "--allow-pickle" in err and err.count("\n") == 1
        assert cli(*words, "--allow-pickle", "--dtype", "bf16", "--device-map", "auto")[0] == 0
    assert json.loads((here / "figures.json").read_text())["precision"] == "bf16"
    distill = ["distill", "--recipe", recipe, "--teacher", "old", "--data", corpus, "--output", "run"]
    assert "--allow-pickle" in cli(*distill)[2] and not (here / "run").exists()
    assert cli(*distill, "--allow-pickle")[0] == 0
    assert "'--dtype'" in cli(*generate, "--dtype", "int8")[2]


def test_a_text_without_spaces_is_scored(cli, here, teacher_directory):
    """One word of a thousand tokens: its perplexity by word is beyond any float."""
    (here / "one.txt").write_text("x" * 2000)
    code, _, err = cli("eval", teacher_directory, "--data", "one.txt", "--output", "figures.json")
    assert code == 0, err
    (figures,) = json.loads((here / "figures.json").read_text())["models"].values()
    assert figures["word_perplexity"] is None and math.isfinite(figures["perplexity"])


def test_a_bug_is_not_dressed_up(cli, monkeypatch):
    monkeypatch.setattr("attn2mamba.recipe.recipe_names", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        attn2mamba_cli.app(["recipes"], standalone_mode=False)


def help_seconds(*words: str) -> float:
    """Processor time of the command in a process of its own, which must not import what takes seconds."""
    code = (
        "import sys, attn2mamba_cli\n"
        "try: attn2mamba_cli.main()\n"
        "except SystemExit as exit: print(exit.code, [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "Usage" in done.stdout and done.stdout.endswith("0 []\n")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("words", [[], ["distill", "--help"]])
def test_help_imports_neither_torch_nor_transformers(words):
    help_seconds(*words)


def test_help_takes_less_than_half_a_second():
    assert any(help_seconds("--help") < 0.5 for attempt in range(4))  # others may be using the processor


CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["attn2mamba.distill"])


def interrupted(words: list[str], number: int, log: str) -> None:
    """The command line, which gets signal `number` once it has logged a step of its second stage."""
    from attn2mamba.run import Run

    def entry(self, values):
        original(self, values)
        if values["stage"] == 1 and "loss" in values:
            os.kill(os.getpid(), number)

    original = Run.log
    Run.log = entry
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)
    sys.argv = ["attn2mamba", *words]
    attn2mamba_cli.main()


def test_a_stop_names_the_base_too(cli, here, recipe, larger, teacher_directory, corpus, monkeypatch):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("attn2mamba.distill", stop)
    words = ["--teacher", larger, "--base", teacher_directory, "--data", corpus, "--set", "seed=1", "--output", "run"]
    code, _, err = cli("distill", "--recipe", recipe, *words)
    assert code == 130
    assert f"attn2mamba distill --recipe {recipe} {' '.join(words[:-4])} --set seed=1 --output run --resume" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_says_how_to_go_on(cli, here, recipe, teacher_directory, corpus, number):
    words = ["distill", "--recipe", str(recipe), "--teacher", teacher_directory, "--data", corpus]
    words += ["--set", "keep=[1]", "--output", "my run"]
    process = CONTEXT.Process(target=interrupted, args=(words, number, str(here / "log")))
    process.start()
    process.join(600)
    assert process.exitcode == 130
    text = (here / "log").read_text()
    assert "Traceback" not in text
    *_, last = text.splitlines()
    assert last.strip() == (
        f"attn2mamba distill --recipe {recipe} --teacher {teacher_directory} --data {corpus} "
        "--set 'keep=[1]' --output 'my run' --resume"
    )
    assert (here / "my run" / "checkpoints" / "stage1-step00000001").is_dir()
    code, _, err = cli(*words, "--resume")
    assert code == 0 and "resuming from stage1-step00000001" in err
