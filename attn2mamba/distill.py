"""A whole run: teacher -> stage 1 -> hedgehog/ -> stage 2 -> final/, resumable at any point."""

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from .card import write_card
from .convert import convert, hand_over
from .data import Blocks, BlockStream, open_data
from .errors import UserError
from .evaluate.perplexity import block_perplexity
from .freezing import check_freezes
from .probe import refuse_packing
from .progress import Progress
from .quiet import quiet
from .recipe import Finetune, Recipe
from .run import Run, check_output, place_of, write_beside, write_text
from .sources import parse_source
from .stages import Batch, FinetuneStage, Stage, TransferStage, needs_teacher, parameter_counts
from .student.modeling_attn2mamba import Attn2MambaForCausalLM
from .teachers import Teacher, check_length, load_teacher
from .train import Trainer, micro_batches
from .vocabulary import Vocabulary, check_tokenizers, tokenizer_of


def distill(
    recipe: Recipe,
    teacher: str,
    data: Sequence[str],
    output: str | Path,
    *,
    base: str | None = None,
    validation: Sequence[str] | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    allow_pickle: bool = False,
) -> Path:
    """Convert `base` (`teacher` where it is not given) by `recipe` and return the finished model's directory,
    OUTPUT/final. A teacher that is not the base needs the base's tokenizer, and a stage with loss kl or hidden.

    With allow_pickle the models' weights may be pickles. Raises UserError for whatever the user can mend;
    KeyboardInterrupt passes through after a checkpoint is saved.
    """
    same = base is not None and (
        base == teacher or (Path(base).exists() and Path(base).resolve() == Path(teacher).resolve())
    )
    other = None if same else base
    progress = progress or Progress()
    return Distillation(
        recipe, teacher, list(data), Path(output), validation, resume, progress, other, allow_pickle
    ).run()


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
    base_name: str | None = None
    allow_pickle: bool = False

    def run(self) -> Path:
        text = recipe_header(self.teacher_name, self.data, self.validation, self.base_name) + self.recipe.to_yaml()
        final = self.output / "final"
        if check_output(self.output, text, self.resume) and final.is_dir():
            self.progress.note(f"{final} is finished already")
            return final
        with quiet():
            self._prepare()
            with Run(self.output, text, self.resume) as run:
                self._stages(run)
                self._save_model(final)
        return final

    def _prepare(self) -> None:
        """Load models and data and make the student; writes nothing. The models themselves are kept in `models` alone,
        by role, so that one can be let go of."""
        for name in (*self.data, *(self.validation or ())):
            parse_source(name)  # a slip in a name shows before a model is loaded
        self.progress.note(f"loading {' and '.join(x for x in (self.teacher_name, self.base_name) if x)}")
        teacher, base = load_models(self.recipe, self.teacher_name, self.base_name, self.allow_pickle)
        self.labels, self.tokenizer = (teacher.name, base.name), tokenizer_of(base)
        self.vocabulary = Vocabulary.of(teacher, base)
        self.models = {"teacher": teacher.model} if base is teacher else {"teacher": teacher.model, "base": base.model}
        if self.recipe.reset_documents:
            for model in self.models.values():
                refuse_packing(model)
        self.stream, self.held_out = self.open_data(base)
        torch.manual_seed(self.recipe.seed)
        mixer = self.recipe.stages[0].mixer.model_dump()
        self.student, report = convert(initial_model(base, self.recipe), mixer, self.recipe.keep)
        check_freezes(self.recipe, self.student.config)
        self.progress.note(f"student: {report}")

    def _stages(self, run: Run) -> None:
        """Train what is not trained yet."""
        self.figures = self._load_figures()
        for role, model in self.models.items():
            self.measure(role, model)
        del model
        self.models.pop("base", None)
        checkpoint = run.latest(self.progress.note)
        first = place_of(checkpoint)[0] if checkpoint else 0
        run.rewind(checkpoint)
        if self.resume:
            self.progress.note(f"resuming from {checkpoint.name if checkpoint else 'the start: no checkpoint yet'}")
        for index in range(len(self.recipe.stages)):
            if not any(map(needs_teacher, self.recipe.stages[index:])):
                self.models.clear()
            self._enter(index)
            if index >= first:
                self._train(index, run, checkpoint if index == first else None)

    def open_data(self, base: Teacher) -> tuple[BlockStream, Blocks]:
        recipe = self.recipe
        return open_data(
            self.data, tokenizer_of(base), recipe.sequence_length, seed=recipe.seed, validation=self.validation
        )

    def _enter(self, index: int) -> None:
        """Give the student the mixers of stage `index`."""
        options = self.recipe.stages[index].mixer.model_dump()
        if index and options["name"] != self.student.config.mixer["name"]:
            report = hand_over(self.student, options)
            self.progress.note(f"handover to {options['name']}: {report}")

    def _train(self, index: int, run: Run, checkpoint: Path | None) -> None:
        first = micro_batches(self.recipe, self.stream.batch(0, self.recipe.batch_size))
        stage = make_stage(
            self.student, self.recipe, index, self.models.get("teacher"), self.vocabulary, None if checkpoint else first
        )
        trainer = Trainer(self.recipe, index, stage, self.student, self.stream, self.held_out, run)
        trainable, extra, frozen = parameter_counts(self.student, stage)
        dropped = f" ({extra:,} of them in projectors, which are dropped afterwards)" if extra else ""
        self.progress.note(
            f"stage {index + 1} of {len(self.recipe.stages)} ({stage.name}): {trainable:,} parameters train{dropped}, "
            f"{frozen:,} are frozen"
        )
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
            save_student(self.student, self.tokenizer, partial)
            held_out = describe_held_out(self.data, self.validation)
            teacher, base = self.labels
            distilled_from = teacher if self.base_name and path.name == "final" else None
            write_card(partial, self.student.config, self.recipe, base, held_out, self.figures, distilled_from)


def load_models(recipe: Recipe, teacher: str, base: str | None, allow_pickle: bool = False) -> tuple[Teacher, Teacher]:
    """The teacher and the model to convert; the same one where `base` is None. Two are compared before the weights of
    either are read. Raises UserError for models that this recipe cannot use, or not together."""
    if base is None:
        only = load_teacher(teacher, allow_pickle=allow_pickle)
        check_length(only.model, recipe.sequence_length)
        return only, only
    if not any(map(needs_teacher, recipe.stages)):
        raise UserError(
            f"nothing would be learnt from teacher '{teacher}': no stage weighs loss kl or hidden; give one a weight, "
            "such as --set stages.1.loss.kl=0.5, or leave --base out and give it as --teacher"
        )
    shapes = [load_teacher(name, config_only=True) for name in (teacher, base)]
    check_tokenizers(*shapes)
    for shape in shapes:
        check_length(shape.model, recipe.sequence_length)
    whole = [load_teacher(name, allow_pickle=allow_pickle) for name in (teacher, base)]
    return whole[0], whole[1]


def initial_model(base: Teacher, recipe: Recipe) -> PreTrainedModel:
    """The model to convert, or one of its shape with random weights."""
    if recipe.initialize == "teacher":
        return base.model
    return AutoModelForCausalLM.from_config(base.config, dtype=torch.float32).eval()


def make_stage(
    student: Attn2MambaForCausalLM,
    recipe: Recipe,
    index: int,
    teacher: PreTrainedModel | None,
    vocabulary: Vocabulary,
    first: Iterable[Batch] | None = None,
) -> Stage:
    """Stage `index` of the recipe. A projector that it needs is fitted to the micro-batches of `first`, where they are
    given (a stage that resumes has its projector in the checkpoint)."""
    spec = recipe.stages[index]
    if not isinstance(spec, Finetune):
        return TransferStage(student, recipe, spec)
    stage = FinetuneStage(student, recipe, spec, teacher, vocabulary)
    if first is not None:
        stage.fit_projector(first)
    return stage


def save_student(student: Attn2MambaForCausalLM, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """A plain Hugging Face directory: weights, configuration, modelling code, tokenizer, generation configuration, by
    which rows that pad the vocabulary are never generated."""
    rows = cast(Tensor, student.get_output_embeddings().weight).shape[0]
    settings = student.generation_config
    padding = set(range(rows)).difference(tokenizer.get_vocab().values())
    settings.suppress_tokens = sorted(padding.union(settings.suppress_tokens or ())) or None
    student.save_pretrained(path)
    tokenizer.save_pretrained(path)


def describe_held_out(data: Sequence[str], validation: Sequence[str] | None) -> str:
    """In words, the text that perplexities are measured on, without a machine's paths."""
    names = ", ".join(_public_name(parse_source(x).name) for x in validation or data)
    return f"Validation text ({names})" if validation else f"Held-out part of the training data ({names})"


def _public_name(source: str) -> str:
    """A file or directory by its last part, anything else (a hub id, a built-in name) as it is."""
    return Path(source).name if Path(source).exists() or source[0] in "/.~" else source


def recipe_header(teacher: str, data: Sequence[str], validation: Sequence[str] | None, base: str | None = None) -> str:
    """What a run was started with, as a comment above its recipe."""
    options = [("teacher", teacher), *([("base", base)] if base else [])]
    options += [*(("data", x) for x in data), *(("validation", x) for x in validation or ())]
    words = [word for name, value in options for word in (f"--{name}", value)]
    return f"# attn2mamba distill --recipe recipe.yaml {shlex.join(words)}\n"
