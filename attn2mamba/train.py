"""The loop: accumulate, clip, step, log, evaluate, save, resume. It knows no stage by name."""

import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

from .data import Blocks, BlockStream
from .errors import UserError
from .interrupt import Stopped, StopRequest
from .progress import Progress
from .recipe import Optimizer, Recipe
from .run import Run, load_tensors, tag_of
from .stages import Batch, Metrics, Stage, train_only

MICRO_TOKENS = 2048
NON_FINITE_LIMIT = 3


@dataclass
class Position:
    """Where a run stands: stage index, optimiser steps done in it, and how many of those were skipped."""

    stage: int
    step: int = 0
    skipped: int = 0

    @property
    def tag(self) -> str:
        return tag_of(self.stage, self.step)


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
        self.recipe, self.stage, self.model = recipe, stage, model
        self.data, self.held_out, self.run = data, held_out, run
        self.position = Position(index)
        self.first_sequence = sum(steps_of(recipe, i) for i in range(index)) * recipe.batch_size
        self.steps = steps_of(recipe, index)
        self.parameters = train_only(model, stage)
        self.optimizer = adamw(self.parameters, recipe.stages[index].lr, recipe.optimizer)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, cosine_schedule(self.steps, recipe.optimizer))
        self.frozen_before = fingerprint(self._frozen())
        self.bounded: list[Any] = [module for module in model.modules() if hasattr(module, "project")]
        self.in_a_row = 0
        self.random_state = torch.get_rng_state()  # after the last whole step

    def _frozen(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if name not in self.parameters}

    def resume(self, checkpoint: Path) -> None:
        """Continue from a checkpoint of this stage."""
        load_model(self.model, checkpoint / "model.safetensors")
        if self.stage.extra is not None:
            self.stage.extra.load_state_dict(load_file(checkpoint / "extra.safetensors"))
        state = load_tensors(checkpoint / "trainer.pt")
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.random_state = state["rng"]
        torch.set_rng_state(self.random_state)
        self.position = Position(**state["position"])
        self.frozen_before = fingerprint(self._frozen())

    def save(self) -> Path:
        """Write a checkpoint of the model, what trains beside it, the optimiser and the place in the data."""

        def write(path: Path) -> None:
            save_model(self.model, str(path / "model.safetensors"))
            if self.stage.extra is not None:
                save_file(self.stage.extra.state_dict(), path / "extra.safetensors")
            state = {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
            torch.save({**state, "rng": self.random_state, "position": vars(self.position)}, path / "trainer.pt")

        return self.run.save(self.position.tag, write, self.recipe.checkpoints.keep)

    @property
    def _step_tokens(self) -> int:
        return self.recipe.batch_size * self.recipe.sequence_length

    def _due(self, every: int) -> bool:
        """Whether the last step passed a multiple of `every` tokens, or was the stage's last. True before the first."""
        tokens = self.position.step * self._step_tokens
        return self.position.step == self.steps or tokens // every > (tokens - self._step_tokens) // every

    def train(self, progress: Progress) -> None:
        """Run the stage to its end. When the user stops it, or training diverges, a checkpoint is saved first."""
        progress.start(self.stage.name, self.steps * self._step_tokens, self.position.step * self._step_tokens)
        self.stage.start()
        began, saved_at = time.monotonic(), self.position.step
        try:
            with StopRequest() as stop:
                try:
                    if self._due(self.recipe.evaluate.every) and not self._evaluated():
                        self._evaluate(progress, stop)
                    while self.position.step < self.steps:
                        self._log_step(self._step(stop), time.monotonic() - began, progress)
                        if self.in_a_row == NON_FINITE_LIMIT:
                            raise NonFiniteError(
                                f"loss or gradient was not finite {NON_FINITE_LIMIT} steps in a row (step "
                                f"{self.position.step} of {self.stage.name}); lower its lr and start again"
                            )
                        if self._due(self.recipe.evaluate.every):
                            self._evaluate(progress, stop)
                        if self._due(self.recipe.checkpoints.every):
                            self.save()
                            saved_at = self.position.step
                        stop.check()
                except (Stopped, NonFiniteError):
                    self.optimizer.zero_grad()
                    if self.position.step > saved_at:
                        self.save()
                    raise
        finally:
            self.stage.stop()
            progress.stop()
        assert fingerprint(self._frozen()) == self.frozen_before, "a frozen tensor changed during the stage"

    def _log_step(self, metrics: Metrics, seconds: float, progress: Progress) -> None:
        position, tokens = self.position, self.position.step * self._step_tokens
        entry = {"stage": position.stage, "kind": self.stage.name, "step": position.step, "tokens": tokens}
        self.run.log({**entry, "seconds": round(seconds, 3), **metrics})
        progress.update(tokens, metrics["loss"])

    def _step(self, stop: StopRequest) -> Metrics:
        """One optimiser step, or none if the loss or a gradient is not finite. Stopped midway, it leaves no trace."""
        start = self.first_sequence + self.position.step * self.recipe.batch_size
        batch = to_device(self.data.batch(start, self.recipe.batch_size), self.model)
        total = self.stage.count(batch)
        sums: Metrics = defaultdict(float)
        for piece in micro_batches(self.recipe, batch):
            stop.check()
            for name, value in self.stage.backward(piece, total).items():
                sums[name] += value
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), self.recipe.optimizer.clip))
        lr = float(self.schedule.get_last_lr()[0])
        if math.isfinite(sums["loss"]) and math.isfinite(norm):
            self.optimizer.step()
            for module in self.bounded:
                module.project()
            self.in_a_row = 0
        else:
            self.position.skipped += 1
            self.in_a_row += 1
        self.optimizer.zero_grad()
        self.schedule.step()
        self.position.step += 1
        self.random_state = torch.get_rng_state()
        return {"lr": lr, **sums, "gradient_norm": norm, "skipped": self.position.skipped}

    def _evaluate(self, progress: Progress, stop: StopRequest) -> None:
        count = min(len(self.held_out), max(1, self.recipe.evaluate.tokens // self.recipe.sequence_length))
        sums: Metrics = defaultdict(float)
        for index in range(count):
            stop.check()
            batch = to_device({name: x.unsqueeze(0) for name, x in self.held_out[index].items()}, self.model)
            sums["tokens"] += self.stage.count(batch)
            for name, value in self.stage.evaluate(batch).items():
                sums[name] += value
        tokens = max(sums["tokens"], 1)
        loss = sums["loss"] / tokens
        shares = [total / tokens for name, total in sums.items() if name.startswith("layer ")]
        layers = [x if math.isfinite(x) else None for x in shares]
        position = self.position
        entry = {"stage": position.stage, "kind": self.stage.name, "step": position.step}
        self.run.log({**entry, "held_out_loss": loss, **({"layers": layers} if layers else {})})
        progress.note(f"{self.stage.name} step {position.step}: held-out loss {loss:.4f}")

    def _evaluated(self) -> bool:
        """Whether this position's held-out loss is in the log: not if the run was stopped while measuring it."""
        place = (self.position.stage, self.position.step)
        return any("held_out_loss" in e and (e["stage"], e["step"]) == place for e in self.run.entries())


class NonFiniteError(UserError):
    """Training diverged."""


def steps_of(recipe: Recipe, stage: int) -> int:
    """Optimiser steps of a stage: its tokens over a step's tokens, rounded up."""
    return -(-recipe.stages[stage].tokens // (recipe.batch_size * recipe.sequence_length))


def micro_batch_size(recipe: Recipe) -> int:
    """The most sequences, dividing the batch, that hold no more than MICRO_TOKENS tokens (at least one)."""
    divisors = (n for n in range(1, recipe.batch_size + 1) if recipe.batch_size % n == 0)
    return max((n for n in divisors if n * recipe.sequence_length <= MICRO_TOKENS), default=1)


def micro_batches(recipe: Recipe, batch: Batch) -> Iterator[Batch]:
    """The pieces of an optimiser step's batch whose gradients are summed."""
    return split(batch, recipe.micro_batch_size or micro_batch_size(recipe))


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
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": plain, "weight_decay": 0.0}]
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
        name: hashlib.sha256(t.detach().cpu().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
        for name, t in tensors.items()
    }
