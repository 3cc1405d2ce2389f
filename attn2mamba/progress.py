"""A live line for a terminal, plain lines elsewhere: stage, tokens, tokens per second, loss, time left."""

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

PLAIN_EVERY = 15.0
"""Seconds between plain lines."""


class Live:
    """Writes to standard error, so that results can be piped."""

    def __init__(self, file: TextIO | None = None) -> None:
        self.console = Console(file=file or sys.stderr, highlight=False, soft_wrap=True)
        self.bar: Bar | None = None
        self.task: TaskID | None = None

    def note(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False)

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class Progress(Live):
    """Through the tokens of a training stage."""

    def start(self, name: str, total_tokens: int, done: int = 0) -> None:
        """Begin a stage of `total_tokens`, of which a resumed run has `done` some."""
        self.name, self.total, self.first = name, total_tokens, done
        self.began = self.shown = time.monotonic()
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
            )
            self.bar = Bar(*columns, console=self.console)
            self.task = self.bar.add_task(name, total=total_tokens, completed=done, text="")
            self.bar.start()

    def update(self, tokens: int, loss: float) -> None:
        """Tokens of the stage done so far and the last step's loss."""
        now = time.monotonic()
        rate = (tokens - self.first) / max(now - self.began, 1e-9)
        text = f"{tokens:,}/{self.total:,} tokens, {rate:,.0f} tokens/s, loss {loss:.4f}"
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=tokens, text=text)
        elif now - self.shown >= PLAIN_EVERY or tokens >= self.total:
            self.shown = now
            left = f", {(self.total - tokens) / rate:,.0f} s left" if rate else ""
            self.console.print(f"{self.name}: {text}{left}", markup=False)


class Steps(Live):
    """Through pieces of like size."""

    def start(self, name: str, total: int, done: int = 0) -> None:
        """Begin `total` pieces of which `done` are known from an earlier run."""
        self.name, self.total, self.done, self.first = name, total, done, done
        self.began = self.shown = time.monotonic()
        if self.console.is_terminal:
            self.bar = Bar("{task.description}", BarColumn(), "{task.completed}/{task.total}", TimeRemainingColumn())
            self.task = self.bar.add_task(name, total=total, completed=done)
            self.bar.start()

    def advance(self) -> None:
        """One piece more is done."""
        self.done += 1
        now = time.monotonic()
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=self.done)
        elif self.done == self.total:
            self.console.print(f"{self.name}: done in {now - self.began:,.0f} s", markup=False)
        elif now - self.shown >= PLAIN_EVERY:
            self.shown = now
            left = (now - self.began) / (self.done - self.first) * (self.total - self.done)
            self.console.print(f"{self.name}: {self.done}/{self.total}, {left:,.0f} s left", markup=False)
