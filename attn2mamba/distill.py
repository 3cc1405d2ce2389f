"""A whole run: teacher -> stage 1 -> hedgehog/ -> stage 2 -> final/, resumable at any point."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from .card import write_card
from .convert import convert, hand_over
from .data import Blocks, BlockStream, open_data
from .evaluate.perplexity import block_perplexity
from .progress import Progress
from .quiet import quiet
from .recipe import Finetune, Recipe
from .run import Run, check_output, place_of, write_beside, write_text
from .sources import parse_source
from .stages import FinetuneStage, Stage, TransferStage, check_freezes
from .student.modeling_attn2mamba import Attn2MambaForCausalLM
from .teachers import Teacher, check_length, load_teacher
from .train import Trainer


def distill(
    recipe: Recipe,
    teacher: str,
    data: Sequence[str],
    output: str | Path,
    *,
    validation: Sequence[str] | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Convert `teacher` by `recipe` and return the finished model's directory, OUTPUT/final.

    Raises UserError for whatever the user can mend; KeyboardInterrupt passes through after a checkpoint is saved.
    """
    return Distillation(recipe, teacher, list(data), Path(output), validation, resume, progress or Progress()).run()


@dataclass
class Distillation:
    """The parts of a run, made in the order in which they can fail cheaply."""

    recipe: Recipe
    teacher_name: str
    data: list[str]
    output: Path
    validation: Sequence[str] | None
    resume: bool
    progress: Progress

    def run(self) -> Path:
        text = recipe_header(self.teacher_name, self.data, self.validation) + self.recipe.to_yaml()
        final = self.output / "final"
        if check_output(self.output, text, self.resume) and final.is_dir():
            self.progress.note(f"{final} is finished already")
            return final
        with quiet():
            self.progress.note(f"loading {self.teacher_name}")
            self.teacher = load_teacher(self.teacher_name)
            check_length(self.teacher.model, self.recipe.sequence_length)
            self.stream, self.held_out = self.open_data(self.teacher)
            torch.manual_seed(self.recipe.seed)
            self.student, report = convert(
                initial_model(self.teacher, self.recipe),
                self.recipe.stages[0].mixer.model_dump(),
                self.recipe.keep,
            )
            check_freezes(self.recipe, self.student.config)
            self.progress.note(f"student: {report}")
            with Run(self.output, text, self.resume) as run:
                self._stages(run)
                self._save_model(final)
        return final

    def _stages(self, run: Run) -> None:
        """Train what is not trained yet."""
        self.figures = self._load_figures()
        self.measure("teacher", self.teacher.model)
        checkpoint = run.latest(self.progress.note)
        first = place_of(checkpoint)[0] if checkpoint else 0
        run.rewind(checkpoint)
        if self.resume:
            self.progress.note(f"resuming from {checkpoint.name if checkpoint else 'the start: no checkpoint yet'}")
        for index in range(len(self.recipe.stages)):
            self._enter(index)
            if index >= first:
                self._train(index, run, checkpoint if index == first else None)

    def open_data(self, teacher: Teacher) -> tuple[BlockStream, Blocks]:
        recipe = self.recipe
        return open_data(
            self.data, teacher.tokenizer, recipe.sequence_length, seed=recipe.seed, validation=self.validation
        )

    def _enter(self, index: int) -> None:
        """Give the student the mixers of stage `index`."""
        options = self.recipe.stages[index].mixer.model_dump()
        if index and options["name"] != self.student.config.mixer["name"]:
            report = hand_over(self.student, options)
            self.progress.note(f"handover to {options['name']}: {report}")

    def _train(self, index: int, run: Run, checkpoint: Path | None) -> None:
        stage = make_stage(self.student, self.recipe, index, self.teacher.model)
        trainer = Trainer(self.recipe, index, stage, self.student, self.stream, self.held_out, run)
        trainable = sum(p.numel() for p in trainer.parameters.values())
        frozen = sum(p.numel() for p in self.student.parameters()) - trainable
        self.progress.note(f"stage {index} ({stage.name}): {trainable:,} parameters train, {frozen:,} are frozen")
        if checkpoint is not None:
            trainer.resume(checkpoint)
        trainer.train(self.progress)
        kinds = [stage.kind for stage in self.recipe.stages[index : index + 2]]
        if kinds == ["transfer", "finetune"]:
            self.measure("hedgehog", self.student)
            self._save_model(self.output / "hedgehog")

    def measure(self, role: str, model: PreTrainedModel) -> None:
        """Held-out perplexity of one model, once; kept beside the run."""
        if role not in self.figures:
            result = block_perplexity(model, self.held_out, self.recipe.evaluate.tokens)
            self.figures[role] = {"perplexity": result.per_token, "tokens": result.tokens}
            write_text(self.output / "figures.json", json.dumps(self.figures, indent=1))
            self.progress.note(f"{role}: held-out perplexity {result.per_token:.2f} ({result.tokens:,} tokens)")

    def _load_figures(self) -> dict[str, Any]:
        path = self.output / "figures.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _save_model(self, path: Path) -> None:
        if path.name == "final":
            self.measure("student", self.student)
        with write_beside(path) as partial:
            save_student(self.student, self.teacher, partial)
            held_out = describe_held_out(self.data, self.validation)
            write_card(partial, self.student.config, self.recipe, self.teacher.name, held_out, self.figures)


def initial_model(teacher: Teacher, recipe: Recipe) -> PreTrainedModel:
    """The teacher, or a model of its shape with random weights."""
    if recipe.initialize == "teacher":
        return teacher.model
    return AutoModelForCausalLM.from_config(teacher.config, dtype=torch.float32).eval()


def make_stage(student: Attn2MambaForCausalLM, recipe: Recipe, index: int, teacher: PreTrainedModel | None) -> Stage:
    spec = recipe.stages[index]
    if isinstance(spec, Finetune):
        return FinetuneStage(student, recipe, spec, teacher)
    return TransferStage(student, recipe, spec)


def save_student(student: Attn2MambaForCausalLM, teacher: Teacher, path: Path) -> None:
    """A plain Hugging Face directory: weights, configuration, modelling code, tokenizer, generation configuration."""
    student.save_pretrained(path)
    teacher.tokenizer.save_pretrained(path)


def describe_held_out(data: Sequence[str], validation: Sequence[str] | None) -> str:
    """In words, the text that perplexities are measured on, without a machine's paths."""
    names = ", ".join(_public_name(parse_source(x).name) for x in validation or data)
    return f"Validation text ({names})" if validation else f"Held-out part of the training data ({names})"


def _public_name(source: str) -> str:
    """A file or directory by its last part, anything else (a hub id, a built-in name) as it is."""
    return Path(source).name if Path(source).exists() or source[0] in "/.~" else source


def recipe_header(teacher: str, data: Sequence[str], validation: Sequence[str] | None) -> str:
    """What a run was started with, as a comment above its recipe."""
    options = [("teacher", teacher), *(("data", x) for x in data), *(("validation", x) for x in validation or ())]
    words = [word for name, value in options for word in (f"--{name}", value)]
    return f"# attn2mamba distill --recipe recipe.yaml {shlex.join(words)}\n"
