"""Whole runs on a tiny teacher: what they leave behind, and that nothing that interrupts them changes it."""

import gc
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from attn2mamba.alignment import Projector
from attn2mamba.convert import convert
from attn2mamba.distill import Distillation, distill, recipe_header, save_student
from attn2mamba.errors import UserError
from attn2mamba.evaluate.perplexity import block_perplexity
from attn2mamba.progress import Progress
from attn2mamba.recipe import FinetuneLoss, Recipe, load_recipe
from attn2mamba.run import Run
from attn2mamba.student.modeling_attn2mamba import Attn2MambaForCausalLM
from attn2mamba.teachers import load_teacher
from attn2mamba.train import Trainer

distill_module = sys.modules["attn2mamba.distill"]  # the package's attribute of that name is the function

RECIPE = """
sequence_length: 16
batch_size: 4
micro_batch_size: 2
checkpoints: {every: 128, keep: 2}
evaluate: {every: 256, tokens: 64}
stages:
  - {kind: transfer, tokens: 320, lr: 1e-2}
  - {kind: finetune, mixer: {name: hedgemamba}, loss: {kl: 1.0}, tokens: 320, lr: 1e-3}
"""
STEPS = 5  # of each stage; checkpoints at 2, 4 and 5


def recipe_of(tmp_path, *overrides) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return load_recipe(str(path), overrides)


def result(run: Path):
    """All that must not depend on how often the run was stopped."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    entries = [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]
    figures = json.loads((run / "figures.json").read_text())
    return entries, figures, *({n: x.tolist() for n, x in weights(run / d).items()} for d in ("hedgehog", "final"))


def weights(model: Path):
    return load_file(model / "model.safetensors")


def tags(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory, teacher_directory, corpus) -> Path:
    """A run that nobody stopped."""
    path, log = tmp_path_factory.mktemp("runs"), io.StringIO()
    distill(recipe_of(path), teacher_directory, [corpus], path / "whole", progress=Progress(log))
    (path / "log").write_text(log.getvalue())
    return path / "whole"


@pytest.fixture
def again(tmp_path, teacher_directory, corpus):
    """Resume (or start) the run at tmp_path/run."""

    def run(*overrides, resume=True, output=tmp_path / "run", **options):
        return distill(recipe_of(tmp_path, *overrides), teacher_directory, [corpus], output, resume=resume, **options)

    return run


def test_the_finished_model_is_a_plain_directory(whole, teacher_directory, tiny_tokenizer):
    final = whole / "final"
    model = AutoModelForCausalLM.from_pretrained(final)
    assert isinstance(model, Attn2MambaForCausalLM) and model.config.mixer["name"] == "hedgemamba"
    tokenizer, original = AutoTokenizer.from_pretrained(final), AutoTokenizer.from_pretrained(teacher_directory)
    assert tokenizer.chat_template == original.chat_template is not None
    assert tokenizer("the cat äö").input_ids == tiny_tokenizer("the cat äö").input_ids
    generation = GenerationConfig.from_pretrained(final)
    assert (generation.repetition_penalty, generation.eos_token_id) == (1.5, 0)
    assert (final / "modeling_attn2mamba.py").is_file()
    assert not list(whole.rglob(".partial-*"))


def test_rows_that_pad_the_vocabulary_are_never_generated(tiny_teacher, tiny_tokenizer, tmp_path):
    """Twenty rows more than the tokenizer has ids, as Pythia has 27, and they would win every time."""
    student, _ = convert(tiny_teacher("llama", vocab_size=len(tiny_tokenizer) + 20, tie_word_embeddings=False))
    with torch.no_grad():
        student.get_output_embeddings().weight[len(tiny_tokenizer) :] *= 100
    prompt = torch.arange(1, 6)[None]
    mask = torch.ones_like(prompt)
    assert student.generate(prompt, attention_mask=mask, max_new_tokens=8).max() >= len(tiny_tokenizer)
    save_student(student, tiny_tokenizer, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for options in ({}, {"do_sample": True}, {"num_beams": 3}):
        assert again.generate(prompt, attention_mask=mask, max_new_tokens=8, **options).max() < len(tiny_tokenizer)


def test_embeddings_come_out_as_they_went_in(whole, teacher_directory):
    before, after = weights(Path(teacher_directory)), weights(whole / "final")
    assert torch.equal(after["backbone.model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert "backbone.lm_head.weight" not in after  # tied: neither doubled nor lost
    assert not torch.equal(after["backbone.model.norm.weight"], before["model.norm.weight"])
    first = weights(whole / "hedgehog")
    for name, tensor in before.items():
        assert torch.equal(first[f"backbone.{name}"], tensor), name


def test_the_log_has_every_step_once(whole):
    entries = result(whole)[0]
    expected = [(stage, step) for stage in (0, 1) for step in range(1, STEPS + 1)]
    assert [(e["stage"], e["step"]) for e in entries if "loss" in e] == expected
    held_out = [(e["stage"], e["step"]) for e in entries if "held_out_loss" in e]
    assert held_out == [(stage, step) for stage in (0, 1) for step in (0, 4, 5)]
    assert tags(whole) == ["stage1-step00000004", "stage1-step00000005"]


@pytest.mark.parametrize("directory", ["hedgehog", "final"])
def test_the_card_has_the_measured_figures(whole, teacher_directory, corpus, tmp_path, directory):
    figures = json.loads((whole / "figures.json").read_text())
    card = (whole / directory / "README.md").read_text()
    role = "student" if directory == "final" else "hedgehog"
    run = Distillation(recipe_of(tmp_path), teacher_directory, [corpus], tmp_path, None, False, Progress())
    held_out = run.open_data(load_teacher(teacher_directory))[1]
    model = AutoModelForCausalLM.from_pretrained(whole / directory).eval()
    measured = block_perplexity(model, held_out, 64)
    assert figures[role]["perplexity"] == pytest.approx(measured.per_token, rel=1e-6)
    for name in ("teacher", role):
        assert f"| {name} | {figures[name]['perplexity']:.2f} | {measured.tokens} |" in card
    assert "(pure: no softmax attention), made from `tiny-llama`" in card
    assert "corpus.jsonl" in card and str(Path(corpus).parent) not in card
    saved = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert Recipe.model_validate(saved) == recipe_of(tmp_path)


def test_the_run_says_what_it_is(whole, teacher_directory, corpus, tmp_path):
    text = (whole / "recipe.yaml").read_text()
    assert text.startswith(f"# attn2mamba distill --recipe recipe.yaml --teacher {teacher_directory} --data {corpus}\n")
    assert load_recipe(str(whole / "recipe.yaml")) == recipe_of(tmp_path)
    log = (whole.parent / "log").read_text()
    assert "21 tensors copied" in log
    new = sum(x.numel() for name, x in weights(whole / "hedgehog").items() if ".mixer." in name)
    assert f"stage 1 of 2 (transfer): {new:,} parameters train" in log
    assert recipe_header("a b", ["x=1", "it's"], ["v"]).endswith(
        "--teacher 'a b' --data x=1 --data 'it'\"'\"'s' --validation v\n"
    )


def test_transformers_is_silent(again, capfd):
    again(progress=Progress(io.StringIO()))
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")


@pytest.mark.parametrize("tag", [None, "stage0-step00000002", "stage0-step00000005", "stage1-step00000002", "final"])
def test_resumed_from_any_checkpoint_is_as_never_stopped(whole, again, tmp_path, monkeypatch, tag):
    """`tag` is the last thing that a killed run had written; `final`: all but the finished model."""

    def kill(self):
        path = save(self)
        if path.name == tag:
            raise SystemExit
        return path

    save = Trainer.save
    monkeypatch.setattr(Trainer, "save", kill)
    if tag in (None, "final"):
        step = "measure" if tag is None else "_save_model"
        original = getattr(Distillation, step)

        def stop(self, what, *rest):
            if tag is None or what.name == "final":
                raise SystemExit
            return original(self, what, *rest)

        monkeypatch.setattr(Distillation, step, stop)
    with pytest.raises(SystemExit):
        again(resume=False)
    monkeypatch.undo()
    assert not (tmp_path / "run" / "final").exists()
    again()
    assert result(tmp_path / "run") == result(whole)
    assert tags(tmp_path / "run") == tags(whole)


def test_resumed_where_what_stage_1_trained_is_frozen(again, tmp_path):
    options = ["stages.1.freeze=['*.mixer.feature_q', '*.mixer.feature_k']", "checkpoints.every=64"]
    again(*options)
    expected = result(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "final")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "stage1-step00000005")
    again(*options)
    assert result(tmp_path / "run") == expected


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(whole, again, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "final")
    newest = run / "checkpoints" / "stage1-step00000005" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    log = io.StringIO()
    again(progress=Progress(log))
    text = log.getvalue()
    assert "stage1-step00000005 is damaged" in text and "resuming from stage1-step00000004" in text
    assert result(run) == result(whole)


def test_a_finished_run_is_left_as_it_is(whole, again, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.name != ".lock"}
    assert again(output=whole) == whole / "final"
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.name != ".lock"} == before
    with pytest.raises(UserError, match="holds a finished run"):
        again(output=whole, resume=False)
    with pytest.raises(UserError, match="has another recipe"):
        again("seed=1", output=whole)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["stages.1.freeze=[nosuch]"], "'nosuch' matches no parameter"),
        (["stages.1.freeze=['*']"], "nothing is left to train"),
        (["keep=[7]"], "layer 7 does not exist"),
        (["keep=sliding"], "no sliding-window layer"),
        (["sequence_length=9000"], "needs at least"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(again, tmp_path, overrides, complaint):
    with pytest.raises(UserError, match=complaint):
        again(*overrides, resume=False)
    assert not (tmp_path / "run").exists()


def test_an_error_lets_go_of_the_directory(again, tmp_path, monkeypatch):
    """In a notebook the traceback keeps the failed run's objects alive."""
    monkeypatch.setattr(Distillation, "measure", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError) as kept:
        again(resume=False)
    monkeypatch.undo()
    assert kept and again() == tmp_path / "run" / "final"


def test_random_weights_in_the_teachers_shape(again, tmp_path, teacher_directory):
    options = ["initialize=random", "stages.1.freeze=[]"]
    again(*options)
    random, own = weights(tmp_path / "run" / "final"), weights(Path(teacher_directory))
    assert not torch.equal(random["backbone.model.norm.weight"], own["model.norm.weight"])
    assert (random["backbone.model.embed_tokens.weight"] - own["model.embed_tokens.weight"]).abs().mean() > 0.1
    assert "random weights in the shape of `tiny-llama`" in (tmp_path / "run" / "final" / "README.md").read_text()
    shutil.rmtree(tmp_path / "run" / "final")
    again(*options)
    assert {n: x.tolist() for n, x in weights(tmp_path / "run" / "final").items()} == {
        n: x.tolist() for n, x in random.items()
    }


def test_a_hybrid_keeps_a_layer(again, tmp_path):
    again("keep=[0]")
    names = set(weights(tmp_path / "run" / "final"))
    assert not any("layers.0.self_attn.mixer" in name for name in names)
    assert any("layers.1.self_attn.mixer" in name for name in names)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert model.config.kept_layers == [0]
    assert "hybrid: layers 0 keep softmax attention" in (tmp_path / "run" / "final" / "README.md").read_text()


def test_validation_text_of_its_own(again, tmp_path, corpus):
    path = tmp_path / "held_out.txt"
    path.write_text("a dog ran to the sun and saw a mat " * 20)
    again(validation=[str(path)])
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert "Validation text (held_out.txt), 16 tokens of context" in card and "corpus.jsonl" not in card


ANOTHER_TEACHER = ("stages.1.loss={cross_entropy: 0.5, kl: 0.5, hidden: 0.5}",)


@pytest.fixture(scope="module")
def larger(tmp_path_factory, teacher_directory) -> str:
    """A teacher with the tokenizer of `teacher_directory`, but wider, deeper and with padding rows."""
    torch.manual_seed(8)
    config = AutoConfig.from_pretrained(teacher_directory)
    config.update({"hidden_size": 48, "num_hidden_layers": 3, "vocab_size": config.vocab_size + 11, "head_dim": 12})
    path = tmp_path_factory.mktemp("teachers") / "larger-llama"
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(teacher_directory).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def learns(tmp_path_factory, larger, teacher_directory, corpus) -> Path:
    """A run whose base learns from another teacher, and that nobody stopped."""
    path, log = tmp_path_factory.mktemp("runs"), io.StringIO()
    recipe = recipe_of(path, *ANOTHER_TEACHER)
    distill(recipe, larger, [corpus], path / "run", base=teacher_directory, progress=Progress(log))
    (path / "log").write_text(log.getvalue())
    return path / "run"


def test_a_base_learns_from_another_teacher(learns, whole, larger, teacher_directory, corpus):
    figures = json.loads((learns / "figures.json").read_text())
    assert list(figures) == ["teacher", "base", "hedgehog", "student"]
    alone = json.loads((whole / "figures.json").read_text())
    assert figures["base"] == alone["teacher"] and figures["hedgehog"] == alone["hedgehog"]
    assert result(learns)[2] == result(whole)[2]  # stage 1 has no use for the teacher
    text = (learns / "recipe.yaml").read_text()
    assert text.startswith(
        f"# attn2mamba distill --recipe recipe.yaml --teacher {larger} --base {teacher_directory} --data {corpus}\n"
    )
    card = (learns / "final" / "README.md").read_text()
    assert "made from `tiny-llama` by attn2mamba" in card and "and distilled from `larger-llama`." in card
    assert f"| base | {figures['base']['perplexity']:.2f} |" in card
    first = (learns / "hedgehog" / "README.md").read_text()
    assert "made from `tiny-llama`" in first and "larger-llama" not in first
    last = [e for e in result(learns)[0] if "loss" in e][-1]
    assert {"cross_entropy", "kl", "hidden"} < set(last)


def test_a_run_fits_its_projector_first(larger, teacher_directory, corpus, tmp_path, monkeypatch):
    """To all of the run's first batch, in micro-batches."""
    seen: list[int] = []

    def fit(self, batches):
        for ours, theirs, valid in batches:
            seen.append(int(valid.sum()))
            assert [x.shape[-1] for x in ours] == [32] * 3 and [x.shape[-1] for x in theirs] == [48] * 4

    monkeypatch.setattr(Projector, "fit", fit)
    distill(recipe_of(tmp_path, *ANOTHER_TEACHER), larger, [corpus], tmp_path / "run", base=teacher_directory)
    assert seen == [2 * 15, 2 * 15]


def test_projectors_train_and_are_dropped(learns, whole):
    extra = 2 * (32 * 48 + 48)
    log = (learns.parent / "log").read_text()
    assert f"({extra:,} of them in projectors, which are dropped afterwards)" in log
    for directory in ("hedgehog", "final"):
        assert set(weights(learns / directory)) == set(weights(whole / directory))
    checkpoint = learns / "checkpoints" / "stage1-step00000005"
    projector = load_file(checkpoint / "extra.safetensors")
    assert sum(x.numel() for x in projector.values()) == extra
    assert not any("projector" in name for name in load_file(checkpoint / "model.safetensors"))
    assert not (whole / "checkpoints" / "stage1-step00000005" / "extra.safetensors").exists()


@pytest.mark.parametrize("tag", ["stage0-step00000005", "stage1-step00000002"])
def test_resumed_with_a_projector_is_as_never_stopped(
    learns, again, larger, teacher_directory, corpus, tmp_path, monkeypatch, tag
):
    def kill(self):
        path = save(self)
        if path.name == tag:
            raise SystemExit
        return path

    save = Trainer.save
    monkeypatch.setattr(Trainer, "save", kill)
    arguments = (recipe_of(tmp_path, *ANOTHER_TEACHER), larger, [corpus], tmp_path / "run")
    with pytest.raises(SystemExit):
        distill(*arguments, base=teacher_directory)
    monkeypatch.undo()
    distill(*arguments, base=teacher_directory, resume=True)
    assert result(tmp_path / "run") == result(learns)
    ends = [load_file(run / "checkpoints" / "stage1-step00000005" / "extra.safetensors")
            for run in (tmp_path / "run", learns)]  # fmt: skip
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(x, ends[1][name]) for name, x in ends[0].items())


def test_another_teacher_changes_what_is_learnt(learns, larger, teacher_directory, corpus, tmp_path, again):
    again(*ANOTHER_TEACHER)
    assert result(tmp_path / "run")[2] == result(learns)[2] and result(tmp_path / "run")[3] != result(learns)[3]
    with pytest.raises(UserError, match="has another recipe, teacher or data"):
        again(*ANOTHER_TEACHER, base=larger)


def test_a_base_that_is_the_teacher_is_as_none(whole, again, teacher_directory, tmp_path):
    again(base=teacher_directory)
    assert result(tmp_path / "run") == result(whole)
    assert (tmp_path / "run" / "recipe.yaml").read_text() == (whole / "recipe.yaml").read_text()


def test_models_are_let_go_of_when_no_stage_needs_them(larger, teacher_directory, corpus, tmp_path, monkeypatch):
    """The base once it is converted, the teacher after the last stage that compares with it."""

    def train(self, index, *rest):
        gc.collect()
        seen.append([role for role, model in alive.items() if model()])

    def convert(*args):
        alive.update({role: weakref.ref(model) for role, model in run.models.items()})
        return original(*args)

    original, alive, seen = distill_module.convert, {}, []
    monkeypatch.setattr(distill_module, "convert", convert)
    monkeypatch.setattr(Distillation, "_train", train)
    recipe = recipe_of(tmp_path, *ANOTHER_TEACHER)
    last = recipe.stages[1].model_copy(update={"loss": FinetuneLoss()})
    recipe = recipe.model_copy(update={"stages": [*recipe.stages, last]})
    run = Distillation(recipe, larger, [corpus], tmp_path / "run", None, False, Progress(), teacher_directory)
    run.run()
    assert seen == [["teacher"], ["teacher"], []]


def test_a_teacher_that_cannot_teach_is_refused_before_anything_is_written(
    again, larger, teacher_directory, corpus, tmp_path, tiny_tokenizer
):
    with pytest.raises(UserError, match="no stage weighs loss kl or hidden"):
        again("stages.1.loss={kl: 0.0}", base=larger, resume=False)
    other = tmp_path / "other"
    shutil.copytree(larger, other)
    state = json.loads((other / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    vocabulary["Ġthe"], vocabulary["dog"] = vocabulary["dog"], vocabulary["Ġthe"]
    (other / "tokenizer.json").write_text(json.dumps(state))
    (other / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(UserError, match="token 260 is 'dog' in the teacher and 'Ġthe' in the base"):
        distill(recipe_of(tmp_path), str(other), [corpus], tmp_path / "run", base=teacher_directory)
    assert not (tmp_path / "run").exists()


# Kills from outside, in processes that are forked from one that has imported everything.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["attn2mamba.distill"])


def victim(place: str, number: int, arguments) -> None:
    """Distil, and send itself signal `number` at `place`: in the middle of a step, or of writing a checkpoint."""
    if place == "step":
        backward = torch.Tensor.backward
        calls = [0]

        def hit(self, *args, **kwargs):
            calls[0] += 1
            if calls[0] == 28:  # the last of step 4 of stage 1: before it 20 of stage 0, two a step for each layer
                os.kill(os.getpid(), number)
            return backward(self, *args, **kwargs)

        torch.Tensor.backward = hit
    else:
        save = torch.save

        def hit(state, path):
            save(state, path)
            if state["position"]["stage"] == 1 and state["position"]["step"] == 4:
                os.truncate(path, 100)
                os.kill(os.getpid(), number)

        torch.save = hit
    distill(*arguments)


@pytest.mark.parametrize("place", ["step", "save"])
def test_killed_and_resumed_is_as_never_stopped(whole, again, tmp_path, teacher_directory, corpus, place):
    arguments = (recipe_of(tmp_path), teacher_directory, [corpus], tmp_path / "run")
    process = CONTEXT.Process(target=victim, args=(place, signal.SIGKILL, arguments))
    process.start()
    process.join(600)
    assert process.exitcode == -signal.SIGKILL
    assert tags(tmp_path / "run")[-1].startswith("stage1")
    again()
    assert result(tmp_path / "run") == result(whole)
    assert not list((tmp_path / "run").rglob(".partial-*"))


@pytest.fixture
def small_disk(tmp_path):
    """A directory on a file system of 2 MB; needs root."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a small file system here")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path, left: int) -> Path:
    """A file that leaves `left` bytes."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        free = shutil.disk_usage(disk).free
        file.write(bytes(free - left))
    return filler


@pytest.mark.parametrize("left", [0, 60_000, 110_000])
@pytest.mark.parametrize("place", ["checkpoint", "hedgehog", "final"])
def test_a_full_disk(whole, again, small_disk, monkeypatch, place, left):
    """One line, nothing half-written, and what was there stays usable."""
    run = small_disk / "run"
    if place == "checkpoint":

        def save(self):
            if self.position.tag == "stage0-step00000004":
                fill(small_disk, left)
            return original(self)

        original = Trainer.save
        monkeypatch.setattr(Trainer, "save", save)
    else:

        def save_model(self, path):
            if path.name == place:
                fill(small_disk, left)
            return original_model(self, path)

        original_model = Distillation._save_model
        monkeypatch.setattr(Distillation, "_save_model", save_model)
    with pytest.raises(
        UserError, match=r"no space left while writing .*; free some and start again \(distill: --resume\)"
    ):
        again(resume=False, output=run)
    monkeypatch.undo()
    assert not list(run.rglob(".partial-*"))
    with Run(run, (run / "recipe.yaml").read_text(), resume=True) as opened:
        newest = opened.latest(pytest.fail)
    assert newest.name == {"checkpoint": "stage0-step00000002", "hedgehog": "stage0-step00000005"}.get(
        place, "stage1-step00000005"
    )
    assert not (run / "final").exists()
    (small_disk / "filler").unlink()
    again(output=run)
    assert result(run) == result(whole)
