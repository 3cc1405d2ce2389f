"""Silence from transformers: its progress bars and warnings are about its own steps, not about the user's run."""

from collections.abc import Iterator
from contextlib import contextmanager

import transformers


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no warnings from transformers inside the block."""
    verbosity = transformers.logging.get_verbosity()
    bars_were_on = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars_were_on:
            transformers.logging.enable_progress_bar()
