"""A session in a process of its own: its memory is its own, it can be stopped in the middle of a step, and when the
system kills it for want of memory, the benchmark goes on."""

import multiprocessing
import os
import signal
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
from tqdm import tqdm

from ..errors import UserError

SPAWN = multiprocessing.get_context("spawn")  # forking a process that has used OpenMP threads may hang


class Unfinished(Exception):
    """A step that gave no result; the message says why."""


def _serve(channel: Connection, arguments: tuple, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own is a semaphore that stays behind when the process is killed
    if torch.get_num_threads() != threads:  # its caller has chosen a number, which the report tells
        torch.set_num_threads(threads)
    from .speed import Session

    session: Any = None
    while True:
        try:
            method, *values = channel.recv()
        except EOFError:  # the parent is gone
            return
        try:
            session = session or Session(*arguments)
            answer = ("done", getattr(session, method)(*values) if method else None)
        except UserError as error:
            answer = ("user", str(error))
        except Exception as error:
            kind = "memory" if is_out_of_memory(error) else "fault"
            answer = (kind, traceback.format_exc())
        channel.send(answer)


def _end_with_parent() -> None:
    """A parent that is killed tells nobody: a step of minutes, with its model, would outlive it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def is_out_of_memory(error: Exception) -> bool:
    """torch has one class for accelerators, and a RuntimeError on a CPU."""
    return "out of memory" in str(error).lower() or "can't allocate memory" in str(error)


class Worker:
    """Loads the model when it is made, in the background; `call` waits for it. A process that was stopped or lost
    is started anew by the next call."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self._start()

    def _start(self) -> None:
        self.channel, theirs = SPAWN.Pipe()
        self.process: Any = SPAWN.Process(
            target=_serve, args=(theirs, self.arguments, torch.get_num_threads()), daemon=True
        )
        self.process.start()
        theirs.close()
        self.channel.send((None,))
        self.loading = True

    def call(self, method: str, *values: Any, seconds: float | None = None) -> Any:
        """The session's answer. Raises Unfinished when it takes longer than `seconds`, lacks memory, or its process
        dies; UserError as the session does."""
        if self.process is None:
            self._start()
        if self.loading:
            self._answer(None)
            self.loading = False
        return self._answer(seconds, (method, *values))

    def _answer(self, seconds: float | None, message: tuple | None = None) -> Any:
        """The answer to `message`, or to what was sent before."""
        try:
            if message is not None:
                self.channel.send(message)
            if not self.channel.poll(seconds):
                self.close()
                raise Unfinished(f"it took longer than {seconds:,.0f} s (--max-seconds)")
            kind, value = self.channel.recv()
        except (EOFError, ConnectionError):
            self.close()
            raise Unfinished("its process was killed, most likely for want of memory") from None
        if kind == "user":
            raise UserError(value)
        if kind == "memory":
            raise Unfinished("the device ran out of memory")
        if kind == "fault":
            raise RuntimeError(f"in the process of the benchmark:\n{value}")
        return value

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.channel.close()
        self.process = None
