"""A live line for a terminal, plain lines elsewhere: stage, tokens, tokens per second, loss, time left."""

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

PLAIN_EVERY = 15.0
"""Seconds between plain lines."""


class Progress:
    """Writes to standard error, so that results can be piped."""

    def __init__(self, file: TextIO | None = None) -> None:
        self.console = Console(file=file or sys.stderr, highlight=False, soft_wrap=True)
        self.bar: Bar | None = None
        self.task: TaskID | None = None

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

    def note(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False)

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
