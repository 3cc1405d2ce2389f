"""Silence from transformers: its progress bars and warnings are about its own steps, not about the user's run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import transformers


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no warnings from transformers, nor huggingface_hub's retries, inside the block."""
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel(logging.CRITICAL)
    verbosity = transformers.logging.get_verbosity()
    bars_were_on = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        hub.setLevel(hub_level)
        transformers.logging.set_verbosity(verbosity)
        if bars_were_on:
            transformers.logging.enable_progress_bar()
