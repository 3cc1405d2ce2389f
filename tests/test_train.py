"""The loop, over a stage small enough to see through."""

import contextlib
import io
import os
import signal

import pytest
import torch
from torch import nn

from attn2mamba.interrupt import Stopped, StopRequest
from attn2mamba.progress import Progress
from attn2mamba.recipe import Finetune, Mixer, Optimizer, Recipe
from attn2mamba.run import Run
from attn2mamba.train import NonFiniteError, Trainer, adamw, cosine_schedule, fingerprint, micro_batch_size, steps_of

LENGTH, BATCH, STEPS = 8, 4, 6


class Data:
    """Sequence n holds the numbers from n on."""

    def batch(self, start, count):
        rows = torch.arange(start, start + count)[:, None] + torch.arange(LENGTH)
        return {"input_ids": rows, "document_ids": torch.zeros_like(rows)}


HELD_OUT = [{name: x[0] for name, x in Data().batch(100 + i, 1).items()} for i in range(2)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.frozen = nn.Parameter(torch.tensor(2.0))


class Stage:
    """Pulls the weight, and what trains beside it, towards noisy targets; `events` maps "backward 3" (the third call)
    and the like to a function that is called at the start of it."""

    name = "toy"

    def __init__(self, model, events=None, extra=None):
        self.model, self.events, self.calls = model, events or {}, {"backward": 0, "evaluate": 0}
        self.extra = extra

    def trainable(self):
        return {"weight": self.model.weight, **({"extra.weight": self.extra.weight} if self.extra else {})}

    def start(self): ...

    def stop(self): ...

    def count(self, batch):
        return batch["input_ids"].numel()

    def _call(self, name):
        self.calls[name] += 1
        return self.events.get(f"{name} {self.calls[name]}", lambda: 1.0)()

    def backward(self, batch, total):
        factor = self._call("backward")
        target = batch["input_ids"].float().sin().sum() + torch.randn(())
        loss = (self.model.weight - target).square().sum() * (1.0 if factor is None else factor) / total
        loss = loss + ((self.extra.weight - target).square().sum() / total if self.extra else 0)
        loss.backward()
        return {"loss": float(loss.detach())}

    def evaluate(self, batch):
        self._call("evaluate")
        return {"loss": float(self.model.weight.detach().sum())}


def recipe_of(stages=1, **options) -> Recipe:
    stage = Finetune(mixer=Mixer(name="hedgemamba"), tokens=STEPS * BATCH * LENGTH, lr=0.1)
    options = {"micro_batch_size": 2, "checkpoints": {"every": 2 * BATCH * LENGTH, "keep": 2}} | options
    options = {"evaluate": {"every": 3 * BATCH * LENGTH, "tokens": 2 * LENGTH}} | options
    return Recipe(sequence_length=LENGTH, batch_size=BATCH, stages=[stage] * stages, **options)


class Toy:
    """One stage in a run at `path`, ready to train."""

    def __init__(self, path, events=None, resume=False, index=0, extra=False, **options):
        beside = nn.Linear(4, 2, bias=False) if extra else None
        torch.manual_seed(0)
        self.recipe, self.model = recipe_of(index + 1, **options), Model()
        self.run = Run(path, "toy", resume)
        self.stage = Stage(self.model, events, beside)
        self.trainer = Trainer(self.recipe, index, self.stage, self.model, Data(), HELD_OUT, self.run)
        if resume:
            checkpoint = self.run.latest(pytest.fail)
            self.run.rewind(checkpoint)
            if checkpoint:
                self.trainer.resume(checkpoint)

    def train(self):
        self.output = io.StringIO()
        try:
            self.trainer.train(Progress(self.output))
        finally:
            self.run.close()
        return self

    def result(self):
        """What must not depend on how often the run was stopped."""
        entries = [{k: v for k, v in e.items() if k != "seconds"} for e in self.run.entries()]
        return entries, self.model.weight.detach().clone(), torch.get_rng_state().tolist()


@pytest.fixture
def whole(tmp_path):
    """The result of a run that nobody stopped."""
    return Toy(tmp_path / "whole").train().result()


def same(actual, expected) -> bool:
    return actual[0] == expected[0] and torch.equal(actual[1], expected[1]) and actual[2] == expected[2]


def test_what_a_run_logs(whole):
    entries = whole[0]
    steps = [e for e in entries if "loss" in e]
    assert [e["step"] for e in steps] == list(range(1, STEPS + 1))
    assert [e["tokens"] for e in steps] == [BATCH * LENGTH * n for n in range(1, STEPS + 1)]
    assert [e["step"] for e in entries if "held_out_loss" in e] == [0, 3, 6]
    assert set(steps[0]) == {"stage", "kind", "step", "tokens", "lr", "loss", "gradient_norm", "skipped"}
    assert (steps[0]["lr"], steps[0]["skipped"]) == (0.1, 0)


def test_checkpoints_come_when_due_and_at_the_end(tmp_path):
    run = Toy(tmp_path, checkpoints={"every": 4 * BATCH * LENGTH, "keep": 5}).train().run
    assert sorted(path.name[-1] for path in run.checkpoints.iterdir()) == ["4", "6"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("event", ["backward 1", "backward 2", "backward 7", "evaluate 2", "evaluate 3", "evaluate 6"])
def test_stopped_and_resumed_is_as_never_stopped(tmp_path, whole, event, number):
    """Wherever the signal comes: between micro-batches, before the first step, within an evaluation."""
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped):
        Toy(tmp_path / "run", {event: lambda: os.kill(os.getpid(), number)}).train()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert same(Toy(tmp_path / "run", resume=True).train().result(), whole)


@pytest.mark.parametrize(("call", "steps"), [(1, 0), (2, 1), (3, 1), (8, 4), (11, 5), (12, 6)])
def test_a_stop_saves_the_steps_done(tmp_path, call, steps):
    """A signal in the last micro-batch of a step is taken once the step is whole, in an earlier one before it."""
    with pytest.raises(Stopped):
        Toy(tmp_path, {f"backward {call}": lambda: os.kill(os.getpid(), signal.SIGINT)}).train()
    resumed = Toy(tmp_path, resume=True)
    assert resumed.trainer.position.step == steps
    resumed.run.close()


def test_what_trains_beside_the_model_is_kept_in_checkpoints_too(tmp_path):
    whole = Toy(tmp_path / "whole", extra=True).train()
    with pytest.raises(Stopped):
        Toy(tmp_path / "run", {"backward 7": lambda: os.kill(os.getpid(), signal.SIGINT)}, extra=True).train()
    resumed = Toy(tmp_path / "run", resume=True, extra=True)
    assert not torch.equal(resumed.stage.extra.weight, whole.stage.extra.weight)
    assert same(resumed.train().result(), whole.result())
    assert torch.equal(resumed.stage.extra.weight, whole.stage.extra.weight)
    files = {path.name for path in (tmp_path / "run" / "checkpoints" / "stage0-step00000006").iterdir()}
    assert files == {"model.safetensors", "extra.safetensors", "trainer.pt", "manifest.json"}


def test_what_trains_beside_the_model_counts_in_the_gradients_norm(tmp_path):
    norms = [
        Toy(tmp_path / str(extra), extra=extra).train().run.entries()[1]["gradient_norm"] for extra in (False, True)
    ]
    assert norms[1] > 1.2 * norms[0]


def test_a_second_signal_stops_at_once(tmp_path):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    toy = Toy(tmp_path, {"backward 3": twice})
    with pytest.raises(KeyboardInterrupt) as caught:
        toy.train()
    assert not isinstance(caught.value, Stopped)
    assert not list(toy.run.checkpoints.glob("*"))


def test_a_signal_while_saving_is_taken_after_it(tmp_path, whole, monkeypatch):
    save = Trainer.save

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGINT)
        return save(self)

    monkeypatch.setattr(Trainer, "save", interrupted)
    with pytest.raises(Stopped):
        Toy(tmp_path / "run").train()
    monkeypatch.undo()
    resumed = Toy(tmp_path / "run", resume=True)
    assert resumed.trainer.position.step == 2
    assert same(resumed.train().result(), whole)


def test_signals_are_left_alone_outside_the_main_thread():
    import threading

    before, seen = signal.getsignal(signal.SIGINT), []

    def enter():
        with StopRequest() as stop:
            seen.append(signal.getsignal(signal.SIGINT))
            stop.check()

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]


def nan() -> float:
    return float("nan")


@pytest.mark.parametrize("bad", [nan, lambda: float("inf"), lambda: 1e38])
def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path, bad):
    before: list[torch.Tensor] = []
    toy = Toy(tmp_path, {"backward 3": lambda: before.append(toy.model.weight.detach().clone()) or bad()})
    toy.stage.events["backward 5"] = lambda: before.append(toy.model.weight.detach().clone()) or 1.0
    toy.train()
    assert torch.equal(*before)
    steps = [e for e in toy.run.entries() if "skipped" in e]
    assert [e["skipped"] for e in steps] == [0, 1, 1, 1, 1, 1]
    assert steps[1]["loss"] is None or steps[1]["gradient_norm"] is None
    assert toy.model.weight.isfinite().all()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first step is skipped
def test_three_in_a_row_end_the_run(tmp_path):
    toy = Toy(tmp_path, {f"backward {n}": nan for n in (1, 5, 7, 9)})
    with pytest.raises(NonFiniteError, match="not finite 3 steps in a row") as caught:
        toy.train()
    assert "\n" not in str(caught.value)
    resumed = Toy(tmp_path, resume=True)
    assert (resumed.trainer.position.step, resumed.trainer.position.skipped) == (5, 4)
    assert torch.equal(resumed.model.weight, toy.model.weight) and toy.model.weight.isfinite().all()
    assert resumed.train().trainer.position.step == STEPS


def test_a_frozen_tensor_that_changes_is_noticed(tmp_path):
    toy = Toy(tmp_path)
    toy.stage.events["backward 4"] = lambda: toy.model.frozen.data.add_(1e-6) and None
    with pytest.raises(AssertionError, match="a frozen tensor changed"):
        toy.train()


def test_a_later_stage_reads_on_in_the_data(tmp_path):
    seen: list[int] = []
    toy = Toy(tmp_path, index=1)
    batch = toy.trainer.data.batch
    toy.trainer.data.batch = lambda start, count: seen.append(start) or batch(start, count)
    toy.train()
    assert seen == [BATCH * (STEPS + n) for n in range(STEPS)]


def test_fingerprints_tell_tensors_apart():
    a, b = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).T
    marks = fingerprint({"a": a, "b": b, "same": b.contiguous(), "bits": torch.tensor(0.0), "-0": torch.tensor(-0.0)})
    assert marks["b"] == marks["same"]
    assert len(set(marks.values())) == 4


@pytest.mark.parametrize(
    ("batch", "length", "expected"), [(48, 1024, 2), (4, 256, 4), (6, 512, 3), (7, 512, 1), (2, 4096, 1), (1, 2, 1)]
)
def test_micro_batches_divide_the_batch_and_fit(batch, length, expected):
    stage = Finetune(mixer=Mixer(name="hedgemamba"), tokens=1, lr=1)
    assert micro_batch_size(Recipe(sequence_length=length, batch_size=batch, stages=[stage])) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (32, 1), (33, 2), (320, 10)])
def test_steps_are_rounded_up(tokens, expected):
    stage = Finetune(mixer=Mixer(name="hedgemamba"), tokens=tokens, lr=1)
    assert steps_of(Recipe(sequence_length=8, batch_size=4, stages=[stage]), 0) == expected


def test_the_schedule():
    factor = cosine_schedule(100, Optimizer(warmup=0.1, min_lr_ratio=0.2))
    values = [factor(step) for step in range(101)]
    assert values[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert values[10] == 1 and values[55] == pytest.approx(0.6) and values[100] == pytest.approx(0.2)
    assert values[10:] == sorted(values[10:], reverse=True)
    assert cosine_schedule(1, Optimizer())(0) == 1


def test_biases_norms_and_rates_do_not_decay():
    shapes = {"w.weight": (2, 2), "norm.weight": (2,), "decay.rate": (2,), "map.bias": (2, 1, 2), "w.bias": (2,)}
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    optimizer = adamw(parameters, 1.0, Optimizer(weight_decay=0.5))
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert {name for name, p in parameters.items() if not torch.equal(p, torch.ones_like(p))} == {"w.weight"}


def test_plain_lines_where_there_is_no_terminal():
    output = io.StringIO()
    progress = Progress(output)
    with contextlib.closing(output):
        progress.start("toy", 100)
        progress.update(50, 2.0)
        progress.update(100, 1.5)
        progress.note("[a note]")
        progress.stop()
        lines = output.getvalue().splitlines()
    assert lines[0].startswith("toy: 100/100 tokens") and "loss 1.5000" in lines[0]
    assert lines[1:] == ["[a note]"]
