"""Ctrl-C and SIGTERM, taken between two steps: in the middle of one the weights fit no position in the data."""

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTE = b"\nstopping at the next safe point; once more to stop at once, without a checkpoint\n"


class Stopped(KeyboardInterrupt):
    """The user asked to stop, and everything is as after a whole step."""


class StopRequest:
    """Within its `with` block the first SIGINT or SIGTERM is only noted, for `check` to act on; a second one
    interrupts at once. Outside the main thread signals go where they went before."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        os.write(2, NOTE)  # print could be in the middle of a line of its own

    def check(self) -> None:
        """Raise Stopped if a signal has come."""
        if self.requested:
            raise Stopped
