"""The loop: accumulate, clip, step, log, evaluate, save, resume. It knows no stage by name."""

import hashlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from .data import Blocks, BlockStream
from .errors import UserError
from .progress import Progress
from .recipe import Optimizer, Recipe
from .run import Run, load_tensors
from .stages import Batch, Metrics, Stage

MICRO_TOKENS = 2048
NON_FINITE_LIMIT = 3


@dataclass
class Position:
    """Where a run stands: stage index, optimiser steps done in it, tokens consumed by it."""

    stage: int
    step: int = 0
    skipped: int = 0

    @property
    def tag(self) -> str:
        return f"stage{self.stage}-step{self.step:08d}"


class Trainer:
    """Trains one stage of a run. Batches are a pure function of the sequence number, so that a resumed run sees
    exactly what an uninterrupted one would have seen."""

    def __init__(
        self,
        recipe: Recipe,
        index: int,
        stage: Stage,
        model: nn.Module,
        data: BlockStream,
        held_out: Blocks,
        run: Run,
    ) -> None:
        self.recipe, self.stage, self.model, self.data, self.held_out, self.run = (
            recipe,
            stage,
            model,
            data,
            held_out,
            run,
        )
        self.position = Position(index)
        self.first_sequence = sum(steps_of(recipe, i) for i in range(index)) * recipe.batch_size
        self.steps = steps_of(recipe, index)
        self.parameters = stage.trainable()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self.parameters)
        self.optimizer = adamw(self.parameters, recipe.stages[index].lr, recipe.optimizer)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, cosine_schedule(self.steps, recipe.optimizer))
        self.frozen_before = fingerprint(self._frozen())
        self.in_a_row = 0

    def _frozen(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if name not in self.parameters}

    def resume(self, checkpoint: Path) -> None:
        """Continue from a checkpoint of this stage."""
        load_model(self.model, checkpoint / "model.safetensors")
        state = load_tensors(checkpoint / "trainer.pt")
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["rng"])
        self.position = Position(**state["position"])

    def save(self) -> Path:
        """Write a checkpoint of the model, the optimiser and the place in the data."""

        def write(path: Path) -> None:
            save_model(self.model, str(path / "model.safetensors"))
            state = {
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "rng": torch.get_rng_state(),
                "position": vars(self.position),
            }
            torch.save(state, path / "trainer.pt")
            (path / "position.json").write_text(json.dumps(vars(self.position)))

        return self.run.save(self.position.tag, write, self.recipe.checkpoints.keep)

    def train(self, progress: Progress) -> None:
        """Run the stage to its end. On KeyboardInterrupt the state is saved and the interrupt passed on."""
        progress.start(self.stage.name, self.steps * self.recipe.batch_size * self.recipe.sequence_length)
        self.stage.start()
        step_tokens = self.recipe.batch_size * self.recipe.sequence_length
        began, saved_at = time.monotonic(), self.position.step
        try:
            if self.position.step == 0:
                self._evaluate(progress)
            while self.position.step < self.steps:
                metrics = self._step()
                self.position.step += 1
                tokens = self.position.step * step_tokens
                entry = {
                    "stage": self.position.stage,
                    "kind": self.stage.name,
                    "step": self.position.step,
                    "tokens": tokens,
                }
                entry |= {
                    "lr": self.schedule.get_last_lr()[0],
                    "seconds": round(time.monotonic() - began, 3),
                    **metrics,
                }
                self.run.log(entry)
                progress.update(tokens, metrics["loss"])
                last = self.position.step == self.steps
                if last or crossed(tokens, step_tokens, self.recipe.evaluate.every):
                    self._evaluate(progress)
                if last or crossed(tokens, step_tokens, self.recipe.checkpoints.every):
                    self.save()
                    saved_at = self.position.step
        except (KeyboardInterrupt, NonFiniteError):
            if self.position.step > saved_at:
                self.optimizer.zero_grad()
                self.save()
            raise
        finally:
            self.stage.stop()
            progress.stop()
        assert fingerprint(self._frozen()) == self.frozen_before, "a frozen tensor changed during the stage"

    def _step(self) -> Metrics:
        start = self.first_sequence + self.position.step * self.recipe.batch_size
        batch = to_device(self.data.batch(start, self.recipe.batch_size), self.model)
        total = self.stage.count(batch)
        sums: Metrics = defaultdict(float)
        for piece in split(batch, self.recipe.micro_batch_size or micro_batch_size(self.recipe)):
            for name, value in self.stage.backward(piece, total).items():
                sums[name] += value
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), self.recipe.optimizer.clip))
        if math.isfinite(sums["loss"]) and math.isfinite(norm):
            self.optimizer.step()
            self.in_a_row = 0
        else:
            self.position.skipped += 1
            self.in_a_row += 1
        self.optimizer.zero_grad()
        self.schedule.step()
        if self.in_a_row == NON_FINITE_LIMIT:
            raise NonFiniteError(
                f"loss or gradient was not finite {NON_FINITE_LIMIT} steps in a row (step {self.position.step + 1} of "
                f"{self.stage.name}); lower its lr and start again"
            )
        return {**sums, "gradient_norm": norm, "skipped": self.position.skipped}

    def _evaluate(self, progress: Progress) -> None:
        count = min(len(self.held_out), max(1, self.recipe.evaluate.tokens // self.recipe.sequence_length))
        sums: Metrics = defaultdict(float)
        for index in range(count):
            batch = to_device({name: x.unsqueeze(0) for name, x in self.held_out[index].items()}, self.model)
            sums["tokens"] += self.stage.count(batch)
            for name, value in self.stage.evaluate(batch).items():
                sums[name] += value
        loss = sums["loss"] / sums["tokens"]
        self.run.log(
            {
                "stage": self.position.stage,
                "kind": self.stage.name,
                "step": self.position.step,
                "held_out_loss": loss,
            }
        )
        progress.note(f"{self.stage.name} step {self.position.step}: held-out loss {loss:.4f}")


class NonFiniteError(UserError):
    """Training diverged."""


def steps_of(recipe: Recipe, stage: int) -> int:
    """Optimiser steps of a stage: its tokens over a step's tokens, rounded up."""
    return -(-recipe.stages[stage].tokens // (recipe.batch_size * recipe.sequence_length))


def micro_batch_size(recipe: Recipe) -> int:
    """The most sequences, dividing the batch, that hold no more than MICRO_TOKENS tokens (at least one)."""
    fits = [
        n
        for n in range(1, recipe.batch_size + 1)
        if recipe.batch_size % n == 0 and n * recipe.sequence_length <= MICRO_TOKENS
    ]
    return max(fits, default=1)


def crossed(tokens: int, step_tokens: int, every: int) -> bool:
    """Whether the step that ended at `tokens` passed a multiple of `every`."""
    return tokens // every > (tokens - step_tokens) // every


def split(batch: Batch, size: int) -> Iterator[Batch]:
    for start in range(0, len(batch["input_ids"]), size):
        yield {name: x[start : start + size] for name, x in batch.items()}


def to_device(batch: Batch, model: nn.Module) -> Batch:
    device = next(model.parameters()).device
    return {name: x.to(device) for name, x in batch.items()}


def adamw(parameters: dict[str, nn.Parameter], lr: float, options: Optimizer) -> torch.optim.AdamW:
    """AdamW; biases, norms and decay rates are not decayed."""
    plain = [p for name, p in parameters.items() if p.dim() < 2 or name.endswith("bias")]
    decayed = [p for name, p in parameters.items() if not (p.dim() < 2 or name.endswith("bias"))]
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=options.betas)


def cosine_schedule(steps: int, options: Optimizer):
    """Linear warm-up over `warmup` of the steps, then a cosine from 1 to `min_lr_ratio`."""
    warm = max(1, round(steps * options.warmup))

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        progress = min(1.0, (step - warm) / max(1, steps - warm))
        return options.min_lr_ratio + (1 - options.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def fingerprint(tensors: dict[str, Tensor]) -> dict[str, str]:
    """sha256 of each tensor's bytes."""
    return {
        name: hashlib.sha256(t.detach().cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()
        for name, t in tensors.items()
    }
