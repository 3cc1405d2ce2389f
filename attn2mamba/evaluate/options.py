"""What a user may say about an evaluation; every measure takes what concerns it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SuiteOptions:
    """data_root: local copies of hub data sets (None: the hub). limit: items of each task (None: all). context: tokens,
    for measures by length; perplexity's windows have the first. data: the user's own text, as `--data` takes it.
    batch_size changes speed alone."""

    data_root: Path | None = None
    limit: int | None = None
    context: tuple[int, ...] = (1024, 2048, 4096)
    data: tuple[str, ...] = ()
    seed: int = 0
    batch_size: int = 8
